"""Every documented rule of the NPU operations, broken on purpose; and batches of the engine, which break none."""

import random
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from mtp_backend.cache import Span, build_layout
from mtp_backend.errors import InvalidArgument
from mtp_backend.models.config import YarnConfig
from mtp_backend.ops import npu_cache_rules as cache_rules
from mtp_backend.ops import npu_model_rules as model_rules
from mtp_backend.ops import npu_prefetch as prefetch
from mtp_backend.ops import npu_rules as rules
from mtp_backend.ops import ops_for
from mtp_backend.ops.npu_batch import attention_batch

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
MASK = torch.ones(2048, 2048, dtype=torch.bool)
TABLE = torch.zeros(2, 3, dtype=torch.int32)
LATENT = {"dtype": BF16, "heads": 16, "latent": 512, "rope": 64, "block_size": 128}
GROUPED = {"dtype": BF16, "heads": 96, "kv_heads": 8, "size": 128, "block_size": 128}
GATING = {"experts": 256, "top_k": 8, "groups": 8, "top_groups": 4, "normalize": True}
EXPERTS = {"experts": 256, "hidden": 7168, "width": 2048}


def cache(blocks=4, block=16, width=512):
    return torch.empty(blocks, block, width, device="meta")


# (check, arguments that are right, one change that breaks a rule, what the error names)
BROKEN = [
    (rules.check_latent_sizes, LATENT, {"dtype": FP32}, "query: got torch.float32; allowed: float16 or bfloat16"),
    (rules.check_latent_sizes, LATENT, {"heads": 20}, "num_query_heads: got 20"),
    (rules.check_latent_sizes, LATENT, {"heads": 256}, "num_query_heads: got 256"),
    (rules.check_latent_sizes, LATENT, {"latent": 256}, "key: got 'D 256'; allowed: D 512"),
    (rules.check_latent_sizes, LATENT, {"rope": 32}, "key_rope: got 'D 32'; allowed: D 64"),
    (rules.check_latent_sizes, LATENT, {"block_size": 32}, "block_size: got 32; allowed: one of (16, 128)"),
    (rules.check_grouped_sizes, GROUPED, {"dtype": torch.float16}, "query: got torch.float16; allowed: bfloat16"),
    (rules.check_grouped_sizes, GROUPED, {"heads": 272}, "num_query_heads: got 272"),
    (rules.check_grouped_sizes, GROUPED, {"kv_heads": 7}, "num_key_value_heads: got 7"),
    (rules.check_grouped_sizes, GROUPED, {"kv_heads": 1}, "num_key_value_heads: got 1"),
    (rules.check_grouped_sizes, GROUPED, {"size": 64}, "query: got 'D 64'; allowed: D 128"),
    (rules.check_grouped_sizes, GROUPED, {"block_size": 16}, "block_size: got 16; allowed: one of (128, 256"),
    (rules.check_grouped_sizes, GROUPED, {"block_size": 640}, "block_size: got 640"),
    (rules.check_gating, GATING, {"experts": 2560}, "x: got '2560 experts'"),
    (rules.check_gating, GATING, {"groups": 7}, "group_count: got 7"),
    (rules.check_gating, GATING, {"groups": 128}, "group_count: got 128"),  # 2 experts in a group
    (rules.check_gating, GATING | {"experts": 1024}, {"experts": 2048, "groups": 128}, "group_count: got 128"),
    (rules.check_gating, GATING, {"top_groups": 9}, "k_group: got 9"),
    (rules.check_gating, GATING, {"top_k": 129}, "k: got 129; allowed: 1 … 128"),
    (rules.check_gating, GATING, {"normalize": False}, "norm_topk_prob: got False"),
    (rules.check_experts, EXPERTS, {"experts": 1}, "group_list: got '1 experts'"),
    (rules.check_experts, EXPERTS, {"experts": 1025}, "group_list: got '1025 experts'"),
    (rules.check_experts, EXPERTS, {"hidden": 65536}, "weight: got 'hidden size 65536'"),
    (rules.check_experts, EXPERTS, {"width": 32768}, "weight: got 'intermediate size 65536'"),
    (rules.check_unpermute, {"top_k": 8}, {"top_k": 513}, "probs: got '513 experts a token'"),
    (rules.check_rotary, {"heads": 128, "size": 64}, {"heads": 1000}, "input: got '1000 heads'"),
    (rules.check_rotary, {"heads": 128, "size": 64}, {"size": 63}, "input: got 'D 63'"),
    (rules.check_rotary, {"heads": 128, "size": 64}, {"size": 896}, "input: got 'D 896'"),
    (rules.check_angles, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale_all_dim": 0.7}, "r1: got 'YaRN mscale 1'"),
    (
        rules.check_batch,
        {"query_ends": [2, 5], "kv_lens": [2, 9], "num_tokens": 5},
        {"query_ends": [2, 4]},
        "actual_seq_qlen: got [2, 4]; allowed: cumulative lengths that end at the number of tokens, 5",
    ),
    (
        rules.check_batch,
        {"query_ends": [2, 5], "kv_lens": [2, 9], "num_tokens": 5},
        {"query_ends": [6, 5]},
        "actual_seq_qlen: got [6, 5]",
    ),
    (
        rules.check_batch,
        {"query_ends": [2, 5], "kv_lens": [2, 9], "num_tokens": 5},
        {"kv_lens": [2]},
        "actual_seq_kvlen: got '1 lengths'; allowed: one for each of 2",
    ),
    (
        rules.check_batch,
        {"query_ends": [2, 5], "kv_lens": [2, 9], "num_tokens": 5},
        {"kv_lens": [1, 9]},
        "actual_seq_kvlen: got 1; allowed: at least the 2 query rows",
    ),
    (
        rules.check_batch,
        {"query_ends": [1 << 20], "kv_lens": [1 << 21], "num_tokens": 1 << 20},
        {"query_ends": [(1 << 20) + 1], "num_tokens": (1 << 20) + 1},
        "query: got '1048577 tokens'",
    ),
    (
        rules.check_batch,
        {"query_ends": [*range(1, 4097)], "kv_lens": [1] * 4096, "num_tokens": 4096},
        {"query_ends": [*range(1, 4098)], "kv_lens": [1] * 4097, "num_tokens": 4097},
        "actual_seq_qlen: got '4097 sequences'",
    ),
    (rules.check_latent_rows, {"query_ends": [16, 32]}, {"query_ends": [16, 33]}, "got '17 rows of a sequence'"),
    (
        rules.check_mask,
        {"query_ends": [1, 2], "sparse_mode": 0, "mask": None},
        {"sparse_mode": 3},
        "sparse_mode: got 3; allowed: 0",
    ),
    (
        rules.check_mask,
        {"query_ends": [1, 2], "sparse_mode": 0, "mask": None},
        {"mask": MASK},
        "atten_mask: got 'a mask'; allowed: none",
    ),
    (
        rules.check_mask,
        {"query_ends": [1, 3], "sparse_mode": 3, "mask": MASK},
        {"sparse_mode": 0},
        "sparse_mode: got 0; allowed: 3",
    ),
    (
        rules.check_mask,
        {"query_ends": [1, 3], "sparse_mode": 3, "mask": MASK},
        {"mask": None},
        "atten_mask: got None",
    ),
    (
        rules.check_mask,
        {"query_ends": [1, 3], "sparse_mode": 3, "mask": MASK},
        {"mask": MASK[:64, :64]},
        "atten_mask: got (64, 64)",
    ),
    (
        rules.check_mask,
        {"query_ends": [1, 3], "sparse_mode": 3, "mask": MASK},
        {"mask": MASK.half()},
        "atten_mask: got torch.float16",
    ),
]
NORM = {
    "x": torch.ones(2, 8, dtype=BF16),
    "residual": torch.ones(2, 8, dtype=BF16),
    "weight": torch.ones(8, dtype=BF16),
}
BROKEN += [
    (rules.check_norm, NORM, {"residual": torch.ones(8, dtype=BF16)}, "x2: got (8,); allowed: the shape of x1, (2, 8)"),
    (rules.check_norm, NORM, {"weight": torch.ones(2, dtype=BF16)}, "gamma: got (2,)"),
    (rules.check_norm, NORM, {"weight": torch.ones(8)}, "gamma: got torch.float32"),
    (rules.check_norm, NORM, {"x": torch.ones([1] * 9, dtype=BF16)}, "x1: got '9 dimensions'"),
]
PRODUCTS = {"x": torch.ones(3, 8), "gate_up": torch.ones(4, 12, 8), "down": torch.ones(4, 8, 6)}
BROKEN += [
    (rules.check_expert_products, PRODUCTS, {"x": torch.ones(3, 6)}, "x: got (3, 6); allowed: [rows, 8]"),
    (rules.check_expert_products, PRODUCTS, {"x": torch.ones(3, 1, 8)}, "x: got (3, 1, 8)"),
    (
        rules.check_expert_products,
        PRODUCTS,
        {"down": torch.ones(4, 8, 12)},
        "weight: got (4, 8, 12); allowed: (4, 8, 6)",
    ),
    (rules.check_expert_products, PRODUCTS, {"down": torch.ones(3, 8, 6)}, "weight: got (3, 8, 6)"),
    (rules.check_expert_products, PRODUCTS, {"down": torch.ones(4, 8, 6).half()}, "next_weight: got torch.float16"),
    (rules.check_expert_products, PRODUCTS, {"gate_up": torch.ones(1, 12, 8)}, "group_list: got '1 experts'"),
    (rules.check_swiglu, {"x": torch.ones(3, 8)}, {"x": torch.ones(3, 7)}, "npu_swiglu: input: got (3, 7)"),
    (rules.check_swiglu, {"x": torch.ones(3, 8)}, {"x": torch.ones(3, 8).double()}, "input: got torch.float64"),
]
WRITE = {
    "kv": (1, 1, 3, 576),
    "weight": (512,),
    "cos": (1, 1, 3, 64),
    "rope": (4, 16, 1, 64),
    "latent": (4, 16, 1, 512),
}
WRITE = {name: torch.ones(shape, dtype=BF16) for name, shape in WRITE.items()} | {"index": torch.zeros(3, dtype=int)}
BROKEN += [
    (cache_rules.check_latent_write, WRITE, {name: tensor}, named)
    for name, tensor, named in [
        ("kv", torch.ones(1, 1, 3, 576), "kv: got torch.float32; allowed: float16 or bfloat16"),
        ("cos", torch.ones(1, 1, 3, 64), "cos: got torch.float32; allowed: torch.bfloat16, as kv"),
        ("kv", torch.ones(3, 1, 1, 576, dtype=BF16), "kv: got (3, 1, 1, 576)"),
        ("kv", torch.ones(1, 1, 3, 192, dtype=BF16), "kv: got (1, 1, 3, 192)"),
        ("weight", torch.ones(128, dtype=BF16), "gamma: got (128,)"),
        ("cos", torch.ones(1, 1, 3, 32, dtype=BF16), "cos: got (1, 1, 3, 32)"),
        ("index", torch.zeros(4, dtype=int), "index: got (4,)"),
        ("index", torch.zeros(3, dtype=torch.int32), "index: got torch.int32; allowed: int64"),
        ("rope", torch.ones(4, 16, 2, 64, dtype=BF16), "k_cache: got (4, 16, 2, 64)"),
        ("latent", torch.ones(5, 16, 1, 512, dtype=BF16), "k_cache: got (4, 16, 1, 64)"),
    ]
]
BROKEN += [
    (
        cache_rules.check_latent_write,
        WRITE,
        {"rope": torch.ones(4, 8, 1, 64, dtype=BF16), "latent": torch.ones(4, 8, 1, 512, dtype=BF16)},
        "k_cache: got 'block_size 8'; allowed: a multiple of 16",
    ),
    (
        cache_rules.check_latent_write,
        WRITE | {"rope": torch.ones(1, 16, 1, 64, dtype=BF16), "latent": torch.ones(1, 16, 1, 512, dtype=BF16)},
        {
            "kv": torch.ones(1, 1, 17, 576, dtype=BF16),
            "cos": torch.ones(1, 1, 17, 64, dtype=BF16),
            "index": torch.zeros(17, dtype=int),
        },
        "k_cache: got '1 blocks'; allowed: at least 2 for 17 tokens",
    ),
]
PAGING = {"block_table": TABLE, "kv_lens": [48, 7], "block_size": 16, "caches": {"key": cache()}, "width": 512}
BROKEN += [
    (rules.check_paging, PAGING, {"block_table": TABLE.long()}, "block_table: got torch.int64; allowed: int32"),
    (rules.check_paging, PAGING, {"block_table": TABLE[:1]}, "block_table: got (1, 3); allowed: [2, at least 3]"),
    (rules.check_paging, PAGING, {"block_table": TABLE[0]}, "block_table: got (3,)"),
    (rules.check_paging, PAGING, {"kv_lens": [49, 7]}, "block_table: got (2, 3); allowed: [2, at least 4]"),
    (rules.check_paging, PAGING, {"kv_lens": torch.tensor([1, 1, 1])}, "block_table: got (2, 3); allowed: [3, at"),
    (rules.check_paging, PAGING, {"caches": {"key": cache(block=32)}}, "key: got (4, 32, 512)"),
    (rules.check_paging, PAGING, {"caches": {"key": cache()[None]}}, "key: got (1, 4, 16, 512)"),
    (rules.check_paging, PAGING, {"caches": {"key": cache(), "value": cache(width=64)}}, "value: got (4, 16, 64)"),
    (rules.check_paging, PAGING, {"caches": {"value": cache(blocks=1 << 18)}}, "value: got '2147483648 numbers'"),
    (rules.check_paging, PAGING, {"caches": {"key": cache(width=65536)}, "width": 65536}, "heads · D = 65536"),
    (rules.check_contiguous, {"query": torch.ones(2, 3)}, {"query": torch.ones(3, 2).T}, "query: got 'strides (1, 2)'"),
]


PREFETCH = {"weight": torch.empty(40, 20, dtype=BF16), "offset": 0, "size": 1600}
BROKEN += [
    (prefetch.check_prefetch, PREFETCH, {"size": 0}, "max_size: got 0; allowed: 1 … 1600"),
    (prefetch.check_prefetch, PREFETCH, {"size": 1601}, "max_size: got 1601"),
    (prefetch.check_prefetch, PREFETCH, {"offset": -2}, "offset: got -2; allowed: 0 … 1599"),
    (prefetch.check_prefetch, PREFETCH | {"size": 100}, {"offset": 1600}, "offset: got 1600"),
    (prefetch.check_prefetch, PREFETCH | {"size": 100}, {"offset": 1502}, "max_size: got 100; allowed: 1 … 98"),
    (prefetch.check_prefetch, PREFETCH, {"weight": torch.empty(20, 40, dtype=BF16).T}, "input: got 'strides (1, 40)'"),
]


@pytest.mark.parametrize(("check", "right", "change", "named"), BROKEN)
def test_broken_rule(check, right, change, named):
    check(**right)
    with pytest.raises(InvalidArgument) as error:
        check(**right | change)
    assert str(error.value).startswith("npu_")
    assert named in str(error.value)


@pytest.mark.parametrize("wrong", [torch.float16, torch.float64, torch.int32])
def test_types_must_agree(wrong):
    x = torch.ones(2, dtype=BF16)
    rules.check_same_type("npu_rms_norm", input=x, gamma=x)
    with pytest.raises(InvalidArgument, match=f"npu_rms_norm: gamma: got {wrong}; allowed: "):
        rules.check_same_type("npu_rms_norm", input=x, gamma=x.to(wrong))
    with pytest.raises(InvalidArgument, match="npu_rms_norm: input: got torch.float64"):
        rules.check_same_type("npu_rms_norm", input=x.double(), gamma=x.double())


@pytest.mark.parametrize(
    ("shape", "dtype", "limit", "size"),
    [
        ((40, 20), BF16, 1000, 1000),
        ((40, 20), BF16, 10**9, 1600),
        ((40, 20), torch.int8, 10**9, 48 * 32),  # whole tiles
        ((3, 32, 64), torch.int8, 10**9, 3 * 32 * 64),  # half of bfloat16
    ],
)
def test_bytes_that_are_prefetched(shape, dtype, limit, size):
    weight = torch.empty(shape, dtype=dtype)
    assert prefetch.prefetch_range(weight, limit) == (0, size)
    prefetch.check_prefetch(weight, 0, size)


@pytest.mark.parametrize(
    ("change", "fused"),
    [({}, True), ({"dtype": FP32}, False), ({"interleaved": False}, False), ({"latent": 256}, False)]
    + [({"rope": 32}, False), ({"block_size": 8}, False), ({"block_size": 16}, True)],
)
def test_which_latents_one_operation_writes(change, fused):
    sizes = {"dtype": BF16, "interleaved": True, "latent": 512, "rope": 64, "block_size": 128}
    assert cache_rules.writes_latent(**sizes | change) == fused


def network(**changes):
    """Sizes of DeepSeek-V3 unless changed."""
    sizes = {"num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_routed_experts": 256}
    sizes |= {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True}
    sizes |= {"hidden_size": 7168, "moe_intermediate_size": 2048, "yarn": YarnConfig(40, 4096, mscale_all_dim=1.0)}
    return SimpleNamespace(**sizes | changes)


def test_networks_whose_keys_and_values_can_be_expanded():
    sizes = {"qk_nope_head_dim": 128, "v_head_dim": 128}
    model_rules.check_ways(network(**sizes), BF16, None, "chunked_prefill")
    model_rules.check_ways(grouped_network(), BF16, None, "chunked_prefill")
    for wrong, named in [
        ({"qk_nope_head_dim": 192}, "query: got 'D 192'"),
        ({"v_head_dim": 256}, "value: got 'D 256'"),
    ]:
        with pytest.raises(InvalidArgument, match=named):
            model_rules.check_ways(network(**sizes | wrong), BF16, None, "chunked_prefill")


def sparse_network(**changes):
    """Sizes of DeepSeek-V3.2 unless changed."""
    return network(**{"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128} | changes)


def grouped_network(**changes):
    """Sizes of GLM-4.5 unless changed."""
    sizes = vars(network(num_attention_heads=96, n_routed_experts=160, n_group=1, topk_group=1))
    sizes["yarn"] = None
    del sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    return SimpleNamespace(**sizes | {"num_key_value_heads": 8, "head_dim": 128} | changes)


def test_official_models_are_allowed():
    model_rules.check_model(network(), BF16, 128)
    model_rules.check_model(network(), BF16, 16)
    model_rules.check_model(
        network(num_attention_heads=20, n_group=1, topk_group=1), BF16, 128
    )  # GLM-4.7-Flash: padded to 32
    model_rules.check_model(grouped_network(), BF16, 128)
    model_rules.check_model(sparse_network(), BF16, 128)
    model_rules.check_model(sparse_network(num_attention_heads=64, index_n_heads=32), BF16, 16)  # GLM-5


def test_ways_of_sparse_attention():
    for graph_mode in (None, "eager"):
        model_rules.check_ways(sparse_network(), BF16, graph_mode, "tnd")
    model_rules.check_ways(network(), BF16, "npugraph", "batch_expansion")
    with pytest.raises(InvalidArgument, match="graph_mode: got 'npugraph'; allowed: eager: sparse attention"):
        model_rules.check_ways(sparse_network(), BF16, "npugraph", "tnd")
    with pytest.raises(InvalidArgument, match="attention_strategy: got 'batch_expansion'; allowed: tnd: with sparse"):
        model_rules.check_ways(sparse_network(), BF16, "eager", "batch_expansion")


@pytest.mark.parametrize(
    ("model", "dtype", "block_size", "named"),
    [
        (network(), FP32, 128, "query"),
        (network(), BF16, 64, "block_size"),
        (network(kv_lora_rank=256), BF16, 128, "kv_lora_rank"),
        (network(n_group=128), BF16, 128, "group_count"),
        (network(yarn=YarnConfig(40, 4096)), BF16, 128, "mscale"),
        (network(hidden_size=1 << 16), BF16, 128, "hidden size"),
        (grouped_network(), FP32, 128, "query"),
        (grouped_network(), BF16, 16, "block_size"),
        (grouped_network(head_dim=64), BF16, 128, "head_dim"),
        (sparse_network(index_head_dim=64), BF16, 128, "index_head_dim"),
        (sparse_network(index_n_heads=65), BF16, 128, "index_n_heads"),
        (sparse_network(index_topk=2049), BF16, 128, "index_topk"),
        (grouped_network(norm_topk_prob=False), BF16, 128, "norm_topk_prob"),
    ],
)
def test_other_models_are_refused_at_start(model, dtype, block_size, named):
    with pytest.raises(InvalidArgument, match=named):
        model_rules.check_model(model, dtype, block_size)


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_the_error_says_what_to_install():
    with pytest.raises(InvalidArgument, match="device: got 'npu'; allowed: cpu; npu needs CANN and `pip install"):
        ops_for("npu")


@pytest.mark.parametrize("most_expanded", [0, rules.MOST_LATENT_ROWS])
@pytest.mark.parametrize("most_rows", [rules.MOST_LATENT_ROWS, None])
def test_random_batches_break_no_rule(most_rows, most_expanded):
    """And every query row sees exactly the keys up to its own position, in its own blocks."""
    draw = random.Random(5)
    for _ in range(2500):
        block_size = draw.choice([16, 128])
        ids = iter(draw.sample(range(1000), 60))
        spans = []
        for _ in range(draw.randint(1, 6)):
            length = draw.choice([1, 1, draw.randint(1, 16), draw.randint(1, 100)])
            start = draw.choice([0, draw.randint(0, 40)])
            spare = draw.randint(0, 1)
            table = [next(ids) for _ in range(-(-(start + length) // block_size) + spare)]
            spans.append(Span(table, start, length))
        layout = build_layout(spans, block_size, CPU)
        batch = attention_batch(layout, most_rows, most_expanded)
        tokens = len(layout.positions)
        assert batch.causal == any(span.length > max(most_expanded, 1) for span in spans)
        rules.check_batch(batch.query_ends, batch.kv_lens, tokens)
        if most_rows:
            rules.check_latent_rows(batch.query_ends)
        mode, mask = (3, MASK) if batch.causal else (0, None)
        rules.check_mask(batch.query_ends, mode, mask)
        rules.check_paging(batch.block_tables, batch.kv_lens, block_size, {"key": cache(1000, block_size)}, 512)
        piece, positions, tables = 0, layout.positions.tolist(), batch.block_tables.tolist()
        owners = [span for span in spans for _ in range(span.length)]
        for row in range(tokens):
            piece += row == batch.query_ends[piece]
            assert batch.kv_lens[piece] - (batch.query_ends[piece] - row) == positions[row]
            assert tables[piece][: len(owners[row].block_table)] == owners[row].block_table
