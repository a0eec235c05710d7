"""Every field of an engine's configuration is checked by name."""

import dataclasses
import json

import pytest
from mtp_backend.config import EngineConfig, SpeculativeConfig
from mtp_backend.errors import InvalidArgument, MtpError, NotFound, Unavailable, from_code

WRONG_INTEGERS = (0, -1, 1.0, 1.5, True, "1", [1])
WRONG = {
    "model": (None, "", 5, ["a"]),
    "speculative": (True, 1, "mtp", [1], 0, ""),
    "dtype": ("float16", "", None, 32, "bf16"),
    "device": ("cuda", "npu:0", "", None, 0),
    "max_model_len": (*WRONG_INTEGERS, 1),
    "block_size": (*WRONG_INTEGERS, 1025),
    "kv_cache_bytes": (*WRONG_INTEGERS, None, "1GB"),
    "max_num_seqs": (*WRONG_INTEGERS, None, 4097, 10**30),
    "max_num_batched_tokens": (*WRONG_INTEGERS, None),
    "prefill_chunk_size": (*WRONG_INTEGERS, None),
    "max_queue_size": (-1, 1.0, True, "1", None),
    "enable_prefix_caching": (1, 0, None, "true", [True]),
    "max_sequences": (*WRONG_INTEGERS, None),
    "otlp_endpoint": (None, 4318, "127.0.0.1:4318", "ftp://a", "http://", "http://a b"),
    "sequence_ttl_seconds": (0, -1, 0.0, float("nan"), float("inf"), 1e10, 10**400, True, "300", None),
    "graph_mode": ("npugraph", "torchair", "", 1),  # of a CPU
    "graph_capture_sizes": ([4], (), "4", 4),
    "torchair_graph_config": (None, 1, [], {"run_eagerly": True}),  # without graph_mode torchair
    "attention_strategy": ("batch_expansion", "chunked_prefill", "", None, 1),  # of a CPU
    "multistream_shared_expert": (True, 1, None, "true", [False]),  # true on a CPU
    "weight_prefetch_bytes": (-1, 1, None, 0.5, True),  # 1 on a CPU
    "int8_weights": ("int8", "", "true", None, 1, 0, [True]),
    "num_threads": WRONG_INTEGERS,
}
WRONG_SPECULATIVE = {
    "num_speculative_tokens": (16, -1, True, False, "2", 1.0, None, [1], 10**30),
    "num_speculative_tokens_per_batch_size": (None, 3, "1", {}, True),
    "adaptive_draft_length": (1, 0, None, "true", [True]),
    "method": ("eagle", "", "MTP", None, 1, ["mtp"]),
    "draft_model": (None, 1, True, ["a"]),
    "use_mtp_vanilla": (1, 0, None, "true", [True]),
    "mtp_carry": ("Raw", "", None, True, 1, ["raw"]),
    "mask_pos0": (1, 0, None, "false", [False]),
    "rejection_sample_method": ("relaxed", "", "Strict", None, 1, ["strict"]),
    "relaxed_topk": (0, -1, 1.5, True, None, "10"),
    "relaxed_delta": (-0.1, 1.1, None, "0.6", float("nan")),
    "begin_thinking_phase_token": ("", None, 1.0, True, -1),
    "end_thinking_phase_token": ("", None, 1.0, True, -1),
    "synthetic_acceptance_rates": ((0.5,), [0.5]),
    "synthetic_acceptance_length": (1.5, 2),
}
ALLOWED = {
    "model": "checkpoint directory",
    "speculative": "object or null",
    "dtype": "auto, bfloat16, float32",
    "device": "cpu, npu",
    "max_model_len": "≥ 2",
    "block_size": "1 … 1024",
    "otlp_endpoint": "an http:// or https:// URL, or empty",
    "sequence_ttl_seconds": "(0, 1e+09]",
    "max_queue_size": "≥ 0",
    "enable_prefix_caching": "true or false",
    "num_speculative_tokens": "0 … 15",
    "num_speculative_tokens_per_batch_size": "a list of [low, high, k]",
    "adaptive_draft_length": "true or false",
    "method": "one of mtp",
    "use_mtp_vanilla": "true or false",
    "mtp_carry": "one of normed, raw",
    "mask_pos0": "true or false",
}


def cases(table):
    return [pytest.param(field, value, id=f"{field}={value!r:.20}") for field in table for value in table[field]]


def refused(error, field, value):
    """The message names field, value and what is allowed."""
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77]
    message = str(error.value)
    assert message.startswith(f"{field}: got {shown}"), message
    assert "; allowed: " in message and message.split("; allowed: ")[1], message
    assert error.value.field == field
    assert ALLOWED.get(field.split(".")[-1], "") in message


@pytest.mark.parametrize(("device", "block_size"), [("cpu", 16), ("npu", 128)])
def test_block_size_of_a_device(device, block_size):
    config = EngineConfig("somewhere", device=device)
    assert config.block_size == block_size
    assert EngineConfig.from_dict(json.loads(config.to_json())) == config
    assert EngineConfig("somewhere", device=device, block_size=32).block_size == 32


@pytest.mark.parametrize(("field", "value"), cases(WRONG))
def test_engine_field(field, value):
    with pytest.raises(InvalidArgument) as error:
        EngineConfig(**{"model": "somewhere", field: value})
    refused(error, field, value)
    with pytest.raises(InvalidArgument):
        EngineConfig.from_dict({"model": "somewhere", field: value})


@pytest.mark.parametrize(("field", "value"), cases(WRONG_SPECULATIVE))
def test_speculative_field(field, value):
    for build in (SpeculativeConfig, lambda **values: EngineConfig("somewhere", values)):
        with pytest.raises(InvalidArgument) as error:
            build(**{field: value})
        refused(error, f"speculative.{field}", value)


@pytest.mark.parametrize("k", range(16))
def test_every_number_of_drafts(k):
    assert EngineConfig("somewhere", {"num_speculative_tokens": k}).num_drafts == k


@pytest.mark.parametrize(("vanilla", "layers"), [(False, [0, 1, 1, 1]), (True, [0, 1, 2, 3])])
def test_layers_that_drafts_take_in_the_cache(vanilla, layers):
    configs = [SpeculativeConfig(k, use_mtp_vanilla=vanilla) for k in range(4)]
    assert [config.num_draft_layers for config in configs] == layers


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([3], "[0]: got 3; allowed: three integers [low, high, k]"),
        ([[1, 2]], "[0]: got [1, 2]; allowed: three integers [low, high, k]"),
        ([[1, 2, 3, 4]], "[0]: got [1, 2, 3, 4]; allowed: three integers [low, high, k]"),
        ([[0, 2, 1]], "[0].low: got 0; allowed: an integer ≥ 1"),
        ([[1.0, 2, 1]], "[0].low: got 1.0; allowed: an integer ≥ 1"),
        ([[4, 3, 1]], "[0].high: got 3; allowed: an integer ≥ 4"),
        ([[1, None, 1]], "[0].high: got None; allowed: an integer ≥ 1"),
        ([[1, 4, -1]], "[0].k: got -1; allowed: an integer in 0 … 3"),
        ([[1, 4, True]], "[0].k: got True; allowed: an integer in 0 … 3"),
        ([[1, 4, 4]], "[0].k: got 4; allowed: an integer in 0 … 3"),
        ([[1, 4, 3], [4, 8, 1]], "[1].low: got 4; allowed: an integer ≥ 5"),
        ([[5, 8, 3], [1, 4, 1]], "[1].low: got 1; allowed: an integer ≥ 9"),
    ],
)
def test_wrong_table_of_draft_numbers(table, message):
    with pytest.raises(InvalidArgument) as error:
        SpeculativeConfig(3, num_speculative_tokens_per_batch_size=table)
    assert str(error.value) == "speculative.num_speculative_tokens_per_batch_size" + message


def test_table_of_draft_numbers():
    """Touching ranges, a gap, a single size, 0 drafts; not together with the adaptive choice."""
    table = [[1, 4, 3], [5, 5, 2], [9, 64, 0]]
    config = EngineConfig("somewhere", {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": table})
    assert config.speculative.num_speculative_tokens_per_batch_size == ((1, 4, 3), (5, 5, 2), (9, 64, 0))
    assert EngineConfig.from_dict(json.loads(config.to_json())) == config
    with pytest.raises(InvalidArgument, match="got .*; allowed: nothing with adaptive_draft_length$"):
        SpeculativeConfig(3, num_speculative_tokens_per_batch_size=table, adaptive_draft_length=True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], ": got []; allowed: a list of numbers of tokens, or null"),
        (4, ": got 4; allowed: a list of numbers of tokens, or null"),
        ([4], "[0]: got 4; allowed: a multiple of 1 + k = 3"),
        ([3, 3], "[1]: got 3; allowed: an integer in 4 … 24"),
        ([3, 27], "[1]: got 27; allowed: an integer in 4 … 24"),
        ([0], "[0]: got 0; allowed: an integer in 1 … 24"),
        (["3"], "[0]: got '3'; allowed: an integer in 1 … 24"),
    ],
)
def test_wrong_capture_sizes(sizes, message):
    with pytest.raises(InvalidArgument) as error:
        EngineConfig(
            "somewhere",
            {"num_speculative_tokens": 2},
            device="npu",
            max_num_seqs=8,
            graph_mode="npugraph",
            graph_capture_sizes=sizes,
        )
    assert str(error.value) == "graph_capture_sizes" + message


def test_capture_sizes():
    config = EngineConfig("somewhere", device="npu", graph_mode="npugraph", graph_capture_sizes=[1, 64])
    assert config.graph_capture_sizes == (1, 64)
    assert EngineConfig.from_dict(json.loads(config.to_json())) == config
    with pytest.raises(
        InvalidArgument, match=r"graph_capture_sizes: got \[4\]; allowed: null with graph_mode null, eager"
    ):
        EngineConfig("somewhere", device="npu", graph_capture_sizes=[4])
    with pytest.raises(
        InvalidArgument,
        match="graph_mode: got 'inductor'; allowed: one of eager, npugraph, npugraph_piecewise, torchair",
    ):
        EngineConfig("somewhere", device="npu", graph_mode="inductor")


@pytest.mark.parametrize(
    "speculative", [{"adaptive_draft_length": True}, {"num_speculative_tokens_per_batch_size": [[1, 4, 1]]}]
)
def test_graphs_make_a_fixed_number_of_drafts(speculative):
    with pytest.raises(InvalidArgument, match="allowed: nothing with graph_mode npugraph: its graphs make all drafts"):
        EngineConfig("somewhere", speculative, device="npu", graph_mode="npugraph")


def test_int8_weights():
    config = EngineConfig("somewhere", int8_weights=True)
    assert EngineConfig.from_dict(json.loads(config.to_json())) == config
    with pytest.raises(InvalidArgument, match="int8_weights: got True; allowed: false with device npu"):
        EngineConfig("somewhere", device="npu", int8_weights=True)


def test_multistream_shared_expert():
    config = EngineConfig("somewhere", device="npu", graph_mode="npugraph", multistream_shared_expert=True)
    assert EngineConfig.from_dict(json.loads(config.to_json())) == config
    for options in ({"device": "cpu"}, {"device": "npu", "graph_mode": "torchair"}):
        with pytest.raises(InvalidArgument, match="multistream_shared_expert: got True; allowed: false with"):
            EngineConfig("somewhere", multistream_shared_expert=True, **options)


def test_torchair_graph_config(tmp_path):
    given = {"mode": "", "enable_view_optimize": False, "graph_dump_path": str(tmp_path), "print_tensors": "add_.*"}
    config = EngineConfig("somewhere", device="npu", graph_mode="torchair", torchair_graph_config=given)
    assert dataclasses.asdict(config.torchair_graph_config).items() >= given.items()
    assert EngineConfig.from_dict(json.loads(config.to_json())) == config
    assert EngineConfig("somewhere", torchair_graph_config={}) == EngineConfig("somewhere")


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"mode": "reduce-overhead"}, "one of , max-autotune"),
        ({"enable_frozen_parameter": 1}, "true or false"),
        ({"run_eagerly": "yes"}, "true or false"),
        (
            {"print_tensors": "add("},
            "a regular expression, or empty (missing ), unterminated subpattern at position 3)",
        ),
        ({"graph_dump_path": "/nowhere"}, "a folder that exists, or empty"),
        ({"data_dump_path": 1}, "a folder that exists, or empty"),
        ({"enabled": True}, 'graph_mode "torchair" in its place'),
        ({"graph_batch_sizes": [4, 8]}, "graph_capture_sizes in its place: sizes in tokens"),
        ({"graph_batch_sizes_init": True}, "no graph_capture_sizes in its place"),
        ({"use_cached_graph": True}, "no such key: torchair's cache on disk is read as a pickle and run as code"),
        ({"use_cached_kv_cache_bytes": True}, "kv_cache_bytes in its place"),
        ({"enable_multistream_mla": True}, "no such key"),
        ({"enable_kv_nz": True}, "no such key: the cache is not tiled"),
        ({"enable_super_kernel": True}, "no such key"),
        ({"frozen_parameter": True}, "no such key; the keys are data_dump_path, enable_frozen_parameter, "),
    ],
)
def test_wrong_torchair_graph_config(given, allowed):
    with pytest.raises(InvalidArgument) as error:
        EngineConfig("somewhere", device="npu", graph_mode="torchair", torchair_graph_config=given)
    [name] = given
    assert f"torchair_graph_config.{name}" in str(error.value) and allowed in str(error.value)


def test_a_dummy_request_fits_a_block():
    for device, mode in (("cpu", "inductor"), ("npu", "npugraph")):
        EngineConfig("somewhere", device=device, graph_mode=mode, block_size=16)
        with pytest.raises(InvalidArgument, match=f"block_size: got 15; allowed: at least 16 with graph_mode {mode}"):
            EngineConfig("somewhere", device=device, graph_mode=mode, block_size=15)


def test_weight_prefetch_bytes():
    for mode in ("eager", "npugraph", "torchair"):
        config = EngineConfig("somewhere", device="npu", graph_mode=mode, weight_prefetch_bytes=1 << 20)
        assert config.weight_prefetch_bytes == 1 << 20
    for options in ({"device": "cpu"}, {"device": "npu", "graph_mode": "npugraph_piecewise"}):
        with pytest.raises(InvalidArgument, match="weight_prefetch_bytes: got 1; allowed: 0 with"):
            EngineConfig("somewhere", weight_prefetch_bytes=1, **options)


def test_attention_strategy():
    config = EngineConfig("somewhere", device="npu", attention_strategy="batch_expansion")
    assert EngineConfig.from_dict(json.loads(config.to_json())) == config
    EngineConfig("somewhere", device="npu", attention_strategy="chunked_prefill")
    with pytest.raises(
        InvalidArgument, match="attention_strategy: got 'paged'; allowed: one of batch_expansion, chunked"
    ):
        EngineConfig("somewhere", device="npu", attention_strategy="paged")
    with pytest.raises(
        InvalidArgument, match="attention_strategy: got 'batch_expansion'; allowed: tnd with graph_mode"
    ):
        EngineConfig("somewhere", device="npu", graph_mode="npugraph", attention_strategy="batch_expansion")


def test_no_speculation():
    assert EngineConfig("somewhere").num_drafts == 0
    assert EngineConfig("somewhere", {}).num_drafts == 1


@pytest.mark.parametrize("field", ["max_batch", "Model", "num_speculative_tokens", ""])
def test_unknown_key(field):
    with pytest.raises(InvalidArgument, match="no such key; the keys are attention_strategy, block_size, ") as error:
        EngineConfig.from_dict({"model": "somewhere", field: 1})
    assert error.value.field == f"engine.{field}"
    with pytest.raises(
        InvalidArgument, match="no such key; the keys are adaptive_draft_length, begin_thinking_phase_token, "
    ) as error:
        EngineConfig.from_dict({"model": "somewhere", "speculative": {field + "x": 1}})
    assert error.value.field == f"speculative.{field}x"


def test_missing_model():
    with pytest.raises(InvalidArgument, match="^model: got None"):
        EngineConfig.from_dict({})


@pytest.mark.parametrize(("k", "least"), [(0, 4), (1, 8), (3, 16), (15, 64)])
def test_a_batch_holds_every_sequence_with_its_drafts(k, least):
    options = {"model": "somewhere", "speculative": {"num_speculative_tokens": k}, "max_num_seqs": 4}
    assert EngineConfig(**options, max_num_batched_tokens=least).max_num_batched_tokens == least
    with pytest.raises(
        InvalidArgument, match=f"^max_num_batched_tokens: got {least - 1}; allowed: an integer ≥ {least}$"
    ):
        EngineConfig(**options, max_num_batched_tokens=least - 1)


def test_json_round_trip():
    config = EngineConfig("somewhere", {"num_speculative_tokens": 3}, dtype="float32", max_model_len=99, num_threads=2)
    assert EngineConfig.from_dict(json.loads(config.to_json())) == config


def test_json_file(tmp_path):
    path = tmp_path / "engine.json"
    path.write_text('{"model": "here", "speculative": {"num_speculative_tokens": 2}}')
    config = EngineConfig.from_json(path)
    assert config.model == str(tmp_path / "here")
    assert config.num_drafts == 2
    path.write_text('{"model": "here", "speculative": {"draft_model": "draft"}}')
    assert EngineConfig.from_json(path).speculative.draft_model == str(tmp_path / "draft")
    path.write_text('{"model": "here", "speculative": {"draft_model": "/draft"}}')
    assert EngineConfig.from_json(path).speculative.draft_model == "/draft"
    path.write_text('{"model": "here", "speculative": {}}')
    assert EngineConfig.from_json(path).speculative.draft_model == ""
    path.write_text('{"model": "/there"}')
    assert EngineConfig.from_json(path).model == "/there"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"5", b"null", b'{"model": 5}', b'{"modle": "a"}'])
def test_bad_json_file(tmp_path, content):
    path = tmp_path / "engine.json"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument):
        EngineConfig.from_json(path)
    with pytest.raises(InvalidArgument, match="a readable JSON file"):
        EngineConfig.from_json(tmp_path / "missing.json")


def test_long_values_are_shortened():
    with pytest.raises(InvalidArgument) as error:
        EngineConfig("somewhere", dtype="x" * 1000)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("kind", [MtpError, InvalidArgument, Unavailable, NotFound])
def test_errors_cross_a_process_boundary(kind):
    rebuilt = from_code(kind.code, "message")
    assert isinstance(rebuilt, MtpError)
    assert (rebuilt.code, str(rebuilt)) == (kind.code, "message")
