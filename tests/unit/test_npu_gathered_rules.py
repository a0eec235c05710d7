"""Every documented rule of attention to gathered keys and values on NPUs, broken on purpose."""

import pytest
import torch
from mtp_backend.errors import InvalidArgument
from mtp_backend.ops import npu_gathered_rules as rules

BF16 = torch.bfloat16


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


SIZES = {"dtype": BF16, "heads": 128, "nope": 128, "rope": 64, "value": 128}
LATENT = {
    "query_ends": [2, 5],
    "kv_ends": [9, 12],
    "query": meta(5, 20, 128),
    "key": meta(12, 20, 128),
    "value": meta(12, 20, 128),
    "query_rope": meta(5, 20, 64),
    "key_rope": meta(12, 20, 64),
}
GROUPED = {name: LATENT[name] for name in ("query_ends", "kv_ends", "query")} | dict.fromkeys(
    ("key", "value"), meta(12, 4, 128)
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": torch.float16}, "query: got torch.float16; allowed: bfloat16"),
        ({"heads": 257}, "num_query_heads: got 257"),
        ({"nope": 192}, "query: got 'D 192'; allowed: D 128"),
        ({"rope": 32}, "query_rope: got 'D 32'; allowed: D 64"),
        ({"value": 256}, "value: got 'D 256'; allowed: D 128"),
    ],
)
def test_sizes(change, named):
    rules.check_expanded_sizes(**SIZES)
    with pytest.raises(InvalidArgument) as error:
        rules.check_expanded_sizes(**SIZES | change)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("right", "change", "named"),
    [
        (GROUPED, {"query_ends": [2, 4]}, "actual_seq_qlen: got [2, 4]; allowed: cumulative"),
        (GROUPED, {"kv_ends": [9]}, "actual_seq_kvlen: got '1 lengths'"),
        (GROUPED, {"kv_ends": [8, 11]}, "actual_seq_kvlen: got [8, 11]; allowed: cumulative lengths that end at 12"),
        (GROUPED, {"kv_ends": [1, 12]}, "actual_seq_kvlen: got 1; allowed: at least the 2 query rows"),
        (GROUPED, {"query": meta(5, 20, 128, dtype=torch.float16)}, "query: got torch.float16"),
        (GROUPED, {"query": meta(5, 20, 192)}, "query: got 'D 192'"),
        (GROUPED, {"query": meta(5, 18, 128)}, "num_key_value_heads: got 4; allowed: a divisor of the 18"),
        (GROUPED, {"query": meta(5, 260, 128)}, "num_key_value_heads: got 4; allowed: a divisor of the 260"),
        (GROUPED, {"value": meta(12, 4, 64)}, "value: got (12, 4, 64)"),
        (GROUPED, {"value": meta(12, 4, 128, dtype=torch.float32)}, "value: got torch.float32"),
        (GROUPED, {"value": meta(4, 12, 128).transpose(0, 1)}, "value: got 'strides (128, 1536, 1)'"),
        (LATENT, {"query_rope": meta(5, 20, 32)}, "query_rope: got (5, 20, 32)"),
        (LATENT, {"key_rope": meta(12, 1, 64)}, "key_rope: got (12, 1, 64); allowed: (12, 20, 64)"),
        (LATENT, {"key_rope": meta(12, 1, 64).expand(-1, 20, -1)}, "key_rope: got 'strides (64, 0, 1)'"),
        (
            GROUPED,
            {"kv_ends": [9, (1 << 20) + 1], "key": meta((1 << 20) + 1, 4, 128), "value": meta((1 << 20) + 1, 4, 128)},
            "key: got '1048577 tokens'",
        ),
    ],
)
def test_broken_rule(right, change, named):
    rules.check_gathered(*right.values())
    with pytest.raises(InvalidArgument) as error:
        rules.check_gathered(*(right | change).values())
    assert named in str(error.value)
