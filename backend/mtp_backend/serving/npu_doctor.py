"""`mtp npu doctor`: what a host has of what device "npu" needs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mtp_backend.ops.npu_operations import OPERATIONS
from mtp_backend.serving.graph_dumps import dump_files, open_nodes

TORCH_NPU = "2.13.0"
VARIABLES = (
    "ASCEND_HOME_PATH",
    "ASCEND_OPP_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_LAUNCH_BLOCKING",
    "ASCEND_PROCESS_LOG_PATH",
    "PYTORCH_NPU_ALLOC_CONF",
    "TASK_QUEUE_ENABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
)


@dataclass
class Finding:
    """One line of the report.

    Attributes:
        remedy: what is missing and how to get it; empty if nothing is.
    """

    section: str
    name: str
    value: str
    remedy: str = ""


def show(graphs: Path | None) -> int:
    """Prints the report, and the open sizes of the graph dumps in a folder.

    Returns:
        The exit code: 0, or 1 if something that the engine needs is missing or a graph has open sizes.
    """
    environment = dict(os.environ)
    # With torch_npu installed and no CANN, torch would fail to be imported at all.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    found, section = [*_versions(), *_device()], ""
    found += [Finding("environment", name, environment.get(name, "not set")) for name in VARIABLES]
    for own in found:
        if own.section != section:
            section = own.section
            print(f"{section}:")
        print(f"  {own.name:<36}{own.value}")
    missing = [own for own in found if own.remedy]
    for own in missing:
        print(f"missing: {own.name}: {own.remedy}")
    num_open = _show_graphs(graphs) if graphs is not None else 0
    return int(bool(missing or num_open))


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "python", platform.python_version())
    for package in ("torch", "torch_npu"):
        try:
            yield Finding("versions", package, metadata.version(package))
        except metadata.PackageNotFoundError:
            remedy = f"pip install torch_npu=={TORCH_NPU}, with the build of torch {TORCH_NPU} for the CPU"
            yield Finding("versions", package, "not installed", remedy)


def _device() -> Iterator[Finding]:
    try:
        import torch
        import torch_npu
        from torch_npu.npu.utils import get_cann_version
    except (ImportError, OSError, RuntimeError) as error:
        remedy = f"the packages above, CANN, and its set_env.sh sourced ({error})"
        yield Finding("device", "torch_npu", "cannot be imported", remedy)
        return
    yield Finding("device", "CANN", get_cann_version() or "unknown")
    count = torch.npu.device_count()
    yield Finding("device", "devices", str(count), "" if count else "a device: npu-smi info shows those of the driver")
    for index in range(count):
        free, total = torch.npu.mem_get_info(index)
        memory = f"{free / (1 << 30):.1f} GiB free of {total / (1 << 30):.1f} GiB"
        yield Finding("device", f"npu:{index}", f"{torch.npu.get_device_name(index)}, {memory}")
    for name in OPERATIONS:
        there = hasattr(torch_npu, name)
        remedy = "" if there else f"torch_npu {TORCH_NPU}"
        yield Finding("operations", name, "there" if there else "not there", remedy)


def _show_graphs(directory: Path) -> int:
    """Prints the open sizes of each dump; returns how many operations have some."""
    total = 0
    for path in dump_files(directory):
        nodes = open_nodes(path)
        total += len(nodes)
        print(f"{path.name}: {len(nodes)} operations with open sizes")
        for node in nodes:
            origin = "opened here" if node.made_here else "from its inputs"
            print(f"  {node.name} ({node.kind}) {', '.join(node.shapes)}: {origin}")
    return total
