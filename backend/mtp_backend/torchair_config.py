"""What a configuration says to torchair, and its switches for finding faults."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument

FIELD = "torchair_graph_config"
MODES = {"", "max-autotune"}
# Keys that vllm-ascend documents under this name and that have no meaning here, and what there is in their place.
ELSEWHERE = {
    "enabled": 'graph_mode "torchair" in its place',
    "graph_batch_sizes": "graph_capture_sizes in its place: sizes in tokens, those in sequences times 1 + k",
    "graph_batch_sizes_init": "no graph_capture_sizes in its place: 1, 2, 4, … and max_num_seqs sequences",
    "use_cached_graph": "no such key: torchair's cache on disk is read as a pickle and run as code",
    "use_cached_kv_cache_bytes": "kv_cache_bytes in its place, which is the same at each start",
    "enable_multistream_mla": "no such key: the graph engine has no second stream for it",
    "enable_kv_nz": "no such key: the cache is not tiled",
    "enable_super_kernel": "no such key: operations are not joined into one kernel",
}


@dataclass(frozen=True)
class TorchairGraphConfig:
    """Settings of `graph_mode` "torchair". The first three have the names and defaults that vllm-ascend documents.

    Attributes:
        mode: "max-autotune", or empty, which is the same.
        enable_view_optimize: views are joined into the operations that read them.
        enable_frozen_parameter: weights stay at their addresses.
        run_eagerly: the functions are traced and converted, and the traced graph runs one operation at a time: tells a
            fault of the graph engine from one of the graph.
        print_tensors: a regular expression; results whose names it matches are printed at each run. Names are those
            of the graph's dump; output n of an operation with several is `name.n`. Empty: none.
        graph_dump_path: folder that gets each graph as torchair converts it (`dynamo_*.pbtxt`); empty: none.
        data_dump_path: folder that gets the operations' inputs and outputs of each run, by the graph engine, or with
            `run_eagerly` as .npy; empty: none.
    """

    mode: str = "max-autotune"
    enable_view_optimize: bool = True
    enable_frozen_parameter: bool = True
    run_eagerly: bool = False
    print_tensors: str = ""
    graph_dump_path: str = ""
    data_dump_path: str = ""

    def __post_init__(self) -> None:
        checks.choice(f"{FIELD}.mode", self.mode, MODES)
        for name in ("enable_view_optimize", "enable_frozen_parameter", "run_eagerly"):
            checks.boolean(f"{FIELD}.{name}", getattr(self, name))
        try:
            re.compile(self.print_tensors)
        except (re.error, TypeError) as error:
            allowed = f"a regular expression, or empty ({error})"
            raise InvalidArgument(f"{FIELD}.print_tensors", self.print_tensors, allowed) from error
        for name in ("graph_dump_path", "data_dump_path"):
            path = getattr(self, name)
            if not isinstance(path, str) or (path and not Path(path).is_dir()):
                raise InvalidArgument(f"{FIELD}.{name}", path, "a folder that exists, or empty")

    @classmethod
    def from_dict(cls, values: Any) -> TorchairGraphConfig:
        """Reads an object of a configuration; a key that is elsewhere, or nowhere, is refused by name."""
        for name, allowed in ELSEWHERE.items():
            if isinstance(values, dict) and name in values:
                raise InvalidArgument(f"{FIELD}.{name}", values[name], allowed)
        return cls(**checks.known_keys(FIELD, values, [field.name for field in dataclasses.fields(cls)]))
