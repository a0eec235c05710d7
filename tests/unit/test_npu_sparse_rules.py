"""Every documented rule of sparse attention on NPUs, broken on purpose."""

import pytest
import torch
from mtp_backend.errors import InvalidArgument
from mtp_backend.ops import npu_sparse_rules as rules

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


SIZES = {"dtype": BF16, "index_heads": 64, "index_size": 128, "top_k": 2048, "block_size": 128}
PAGED = {"lengths": meta(2, 3, dtype=INT32), "tables": meta(3, 4, dtype=INT32)}
INDEXER = {"query": meta(5, 64, 128), "weights": meta(5, 64), "key": meta(9, 128, 1, 128), "top_k": 2048} | PAGED
ATTENTION = PAGED | {
    "query": meta(5, 16, 512),
    "query_rope": meta(5, 16, 64),
    "key": meta(9, 128, 1, 512),
    "key_rope": meta(9, 128, 1, 64),
    "selection": meta(5, 1, 2048, dtype=INT32),
}
# (check, arguments that are right, one change that breaks a rule, what the error names)
BROKEN = [
    (rules.check_sparse_sizes, SIZES, {"dtype": FP32}, "npu_lightning_indexer: query: got torch.float32"),
    (rules.check_sparse_sizes, SIZES, {"index_heads": 65}, "query: got '65 heads'"),
    (rules.check_sparse_sizes, SIZES, {"index_size": 64}, "query: got 'D 64'; allowed: D 128"),
    (rules.check_sparse_sizes, SIZES, {"top_k": 2049}, "sparse_count: got 2049"),
    (rules.check_sparse_sizes, SIZES | {"top_k": 8192}, {"top_k": 9216}, "sparse_count: got 9216"),
    (rules.check_sparse_sizes, SIZES, {"block_size": 24}, "key: got 'block_size 24'; allowed: a multiple of 16"),
    (rules.check_sparse_sizes, SIZES, {"block_size": 1040}, "key: got 'block_size 1040'"),
    (rules.check_indexer, INDEXER, {"key": meta(9, 128, 1, 128, dtype=torch.float16)}, "key: got torch.float16"),
    (rules.check_indexer, INDEXER, {"key": meta(9, 128, 2, 128)}, "key: got (9, 128, 2, 128)"),
    (rules.check_indexer, INDEXER, {"weights": meta(5, 64, dtype=FP32)}, "weights: got torch.float32"),
    (rules.check_indexer, INDEXER, {"weights": meta(5, 32)}, "weights: got (5, 32); allowed: (5, 64)"),
    (rules.check_indexer, INDEXER, {"weights": meta(64, 5).T}, "weights: got 'strides (1, 5)'"),
    (
        rules.check_indexer,
        INDEXER,
        {"tables": meta(2, 4, dtype=INT32)},
        "block_table: got (2, 4); allowed: [3, blocks]",
    ),
    (rules.check_indexer, INDEXER, {"tables": meta(3, 4, dtype=torch.int64)}, "block_table: got torch.int64"),
    (rules.check_indexer, INDEXER, {"lengths": meta(2, 3, dtype=torch.int64)}, "actual_seq_lengths_query: got torch.i"),
    (rules.check_attention, ATTENTION, {"query": meta(5, 16, 512, dtype=FP32)}, "query: got torch.float32"),
    (rules.check_attention, ATTENTION, {"key": meta(9, 128, 1, 512, dtype=FP32)}, "key: got torch.float32"),
    (
        rules.check_attention,
        ATTENTION,
        {"query": meta(5, 20, 512), "query_rope": meta(5, 20, 64)},
        "npu_sparse_flash_attention: query: got '20 heads'",
    ),
    (rules.check_attention, ATTENTION, {"query": meta(5, 16, 256)}, "query: got (5, 16, 256)"),
    (rules.check_attention, ATTENTION, {"query_rope": meta(5, 16, 32)}, "query_rope: got (5, 16, 32)"),
    (rules.check_attention, ATTENTION, {"key": meta(9, 128, 2, 512)}, "key: got (9, 128, 2, 512)"),
    (rules.check_attention, ATTENTION, {"key_rope": meta(8, 128, 1, 64)}, "key_rope: got (8, 128, 1, 64)"),
    (rules.check_attention, ATTENTION, {"selection": meta(5, 2048, dtype=INT32)}, "sparse_indices: got (5, 2048)"),
    (
        rules.check_attention,
        ATTENTION,
        {"selection": meta(5, 1, 8, dtype=torch.int64)},
        "sparse_indices: got torch.int64",
    ),
    (
        rules.check_attention,
        ATTENTION,
        {"key": meta(9, 24, 1, 512), "key_rope": meta(9, 24, 1, 64)},
        "key: got 'block_size 24'",
    ),
    (rules.check_attention, ATTENTION, {"query_rope": meta(5, 64, 16).mT}, "query_rope: got 'strides (1024, 1, 16)'"),
    (rules.check_attention, ATTENTION, {"tables": meta(2, 4, dtype=INT32)}, "block_table: got (2, 4)"),
]


@pytest.mark.parametrize(("check", "right", "change", "named"), BROKEN)
def test_broken_rule(check, right, change, named):
    check(**right)
    with pytest.raises(InvalidArgument) as error:
        check(**right | change)
    assert named in str(error.value)
