"""The reference operations against loops and formulas written out here."""

import math

import pytest
import torch
import torch.nn.functional as F
from mtp_backend.cache import Span, build_layout
from mtp_backend.models.layers.rotary import RotaryTable
from mtp_backend.ops import ReferenceOps
from reference.mtp import route

CPU = torch.device("cpu")
OPS = ReferenceOps()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_is_multiplication_by_a_complex_number(interleaved):
    theta, size, positions = 100.0, 6, [0, 1, 7, 30]
    x = torch.randn(len(positions), 2, size)
    turned = OPS.rotary(x, *RotaryTable(size, theta, 31, CPU, OPS)(torch.tensor(positions)), interleaved)
    for row, position in enumerate(positions):
        for head in range(2):
            for pair in range(size // 2):
                real, imaginary = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + size // 2)
                angle = position * theta ** (-2 * pair / size)
                expected = complex(x[row, head, real], x[row, head, imaginary]) * complex(
                    math.cos(angle), math.sin(angle)
                )
                assert complex(turned[row, head, real], turned[row, head, imaginary]) == pytest.approx(
                    expected, abs=1e-5
                )


@pytest.mark.parametrize(("num_groups", "top_groups", "top_k"), [(1, 1, 1), (1, 1, 3), (4, 2, 3), (4, 1, 2), (2, 2, 8)])
@pytest.mark.parametrize("normalize", [True, False])
def test_select_experts_is_noaux_tc(num_groups, top_groups, top_k, normalize):
    logits = torch.randn(50, 8)
    scores = logits.sigmoid()
    bias = torch.randn(8)  # large enough to change most choices, and to make some biased scores negative
    ids, weights = OPS.select_experts(logits, bias, top_k, num_groups, top_groups, normalize, scaling=2.5)
    config = {
        "n_group": num_groups,
        "topk_group": top_groups,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": normalize,
        "routed_scaling_factor": 2.5,
    }
    for row in range(len(scores)):
        expected = dict(route(scores[row].tolist(), bias.tolist(), config))
        assert dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)


def test_grouped_experts_is_a_weighted_sum():
    x, gate_up, down = torch.randn(9, 5), torch.randn(6, 8, 5), torch.randn(6, 5, 4)
    ids = torch.stack([torch.randperm(5)[:3] for _ in x])  # expert 5 gets no token
    weights = torch.rand(9, 3)
    result = OPS.grouped_experts(x, gate_up, down, ids, weights)
    for row in range(len(x)):
        expected = torch.zeros(5)
        for expert, weight in zip(ids[row], weights[row], strict=True):
            gate, up = gate_up[expert][:4] @ x[row], gate_up[expert][4:] @ x[row]
            expected += weight * (down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(result[row], expected)


def cached(values, tables, block_size, num_blocks):
    """A cache tensor with the values [length, heads, width] of each sequence in its blocks, NaN elsewhere."""
    cache = torch.full((num_blocks, block_size, *values[0].shape[1:]), math.nan)
    for rows, table in zip(values, tables, strict=True):
        for position, row in enumerate(rows):
            cache[table[position // block_size], position % block_size] = row
    return cache


# Query rows and cached rows of each sequence in a batch.
BATCHES = [[(1, 1)], [(3, 3)], [(2, 7), (1, 5), (4, 4)], [(5, 6), (1, 1)]]
TABLES = [[7, 2, 5], [9, 1], [3, 8]]


def batch_layout(batch):
    return build_layout(
        [Span(table, total - new, new) for (new, total), table in zip(batch, TABLES, strict=False)], 3, CPU
    )


def visible(batch):
    """Batch row, sequence and how many cached rows it sees, for every query row."""
    row = 0
    for sequence, (new, total) in enumerate(batch):
        for index in range(new):
            yield row, sequence, total - new + index + 1
            row += 1


@pytest.mark.parametrize("batch", BATCHES)
def test_grouped_query_attention_sees_the_past_only(batch):
    keys, values = ([torch.randn(total, 2, 8) for _, total in batch] for _ in range(2))
    caches = [cached(rows, TABLES[: len(batch)], 3, 10) for rows in (keys, values)]
    query = torch.randn(sum(new for new, _ in batch), 6, 8)
    result = OPS.gqa_attention(query, *caches, batch_layout(batch), scale=0.3)
    for row, sequence, seen in visible(batch):
        for head in range(6):
            group = head // 3
            scores = keys[sequence][:seen, group] @ query[row, head] * 0.3
            expected = scores.softmax(0) @ values[sequence][:seen, group]
            torch.testing.assert_close(result[row, head], expected)


@pytest.mark.parametrize("batch", BATCHES)
def test_latent_attention_sees_the_past_only(batch):
    latents, ropes = ([torch.randn(total, 1, width) for _, total in batch] for width in (8, 4))
    caches = [cached(rows, TABLES[: len(batch)], 3, 10) for rows in (latents, ropes)]
    tokens = sum(new for new, _ in batch)
    q_latent, q_rope = torch.randn(tokens, 5, 8), torch.randn(tokens, 5, 4)
    result = OPS.mla_attention(q_latent, q_rope, *caches, batch_layout(batch), scale=0.3)
    for row, sequence, seen in visible(batch):
        for head in range(5):
            scores = latents[sequence][:seen, 0] @ q_latent[row, head] + ropes[sequence][:seen, 0] @ q_rope[row, head]
            expected = (scores * 0.3).softmax(0) @ latents[sequence][:seen, 0]
            torch.testing.assert_close(result[row, head], expected)


def selected(batch, top_k):
    """A selection of random positions, padded with −1, for every query row."""
    rows = [torch.randperm(seen)[:top_k].tolist() for _, _, seen in visible(batch)]
    return torch.tensor([row + [-1] * (top_k - len(row)) for row in rows], dtype=torch.int32)


@pytest.mark.parametrize("top_k", [1, 3, 9])
@pytest.mark.parametrize("batch", BATCHES)
def test_latent_attention_sees_the_selection_only(batch, top_k):
    latents, ropes = ([torch.randn(total, 1, width) for _, total in batch] for width in (8, 4))
    caches = [cached(rows, TABLES[: len(batch)], 3, 10) for rows in (latents, ropes)]
    tokens = sum(new for new, _ in batch)
    q_latent, q_rope = torch.randn(tokens, 5, 8), torch.randn(tokens, 5, 4)
    layout = batch_layout(batch)
    layout.selection = selected(batch, top_k)
    result = OPS.mla_attention(q_latent, q_rope, *caches, layout, scale=0.3)
    for row, sequence, _ in visible(batch):
        chosen = [position for position in layout.selection[row].tolist() if position >= 0]
        keys, rope_keys = latents[sequence][chosen, 0], ropes[sequence][chosen, 0]
        for head in range(5):
            scores = keys @ q_latent[row, head] + rope_keys @ q_rope[row, head]
            torch.testing.assert_close(result[row, head], (scores * 0.3).softmax(0) @ keys)
    if top_k == 9:  # more than any row sees, so all that it sees is selected
        dense = OPS.mla_attention(q_latent, q_rope, *caches, batch_layout(batch), scale=0.3)
        assert torch.equal(result, dense)


@pytest.mark.parametrize("top_k", [1, 3, 9])
@pytest.mark.parametrize("batch", BATCHES)
def test_index_topk_takes_the_best_scores(batch, top_k):
    keys = [torch.randn(total, 1, 4) for _, total in batch]
    tokens = sum(new for new, _ in batch)
    query, weights = torch.randn(tokens, 6, 4), torch.randn(tokens, 6)
    cache = cached(keys, TABLES[: len(batch)], 3, 10)
    selection = OPS.index_topk(query, weights, cache, batch_layout(batch), top_k)
    assert selection.dtype == torch.int32 and selection.shape == (tokens, top_k)
    for row, sequence, seen in visible(batch):
        scores = [
            sum(weights[row, head] * max(query[row, head] @ key, 0) for head in range(6))
            for key in keys[sequence][:seen, 0]
        ]
        best = sorted(range(seen), key=lambda position: -scores[position])[:top_k]  # noqa: B023
        assert selection[row].tolist() == best + [-1] * (top_k - len(best))


def test_index_topk_takes_lower_positions_of_equal_scores():
    """ReLU makes many scores exactly 0; `torch.topk` would take any of them."""
    keys = torch.tensor([-1.0, 2, -1, -3, 5, -2, 0, 2] * 8)[:, None, None]
    table = list(range(22))
    cache = cached([keys], [table], 3, 22)
    for top_k, expected in ((2, [4, 12]), (10, [4, 12, 20, 28, 36, 44, 52, 60, 1, 7]), (27, [0, 2, 3])):
        layout = build_layout([Span(table, 63, 1)], 3, CPU)
        selection = OPS.index_topk(torch.ones(1, 2, 1), torch.tensor([[0.5, 0.25]]), cache, layout, top_k)[0].tolist()
        assert selection[-len(expected) :] == expected
    negative = OPS.index_topk(torch.ones(1, 1, 1), -torch.ones(1, 1), cache, layout, 5)[0].tolist()
    assert negative == [0, 2, 3, 5, 6]


def test_write_cache_fills_the_slots_of_the_layout_only():
    batch = BATCHES[2]
    layout = batch_layout(batch)
    values = torch.randn(7, 2, 4)
    cache = torch.full((10, 3, 2, 4), math.nan)
    OPS.write_cache(cache, layout.slots, values)
    for row, sequence, seen in visible(batch):
        block, offset = TABLES[sequence][(seen - 1) // 3], (seen - 1) % 3
        assert torch.equal(cache[block, offset], values[row])
    assert cache[:, :, 0, 0].isfinite().sum() == 7


def test_rms_norm_in_bfloat16_computes_in_float32():
    weight = torch.rand(4096).bfloat16()
    x = (torch.randn(3, 4096) * 3).bfloat16()
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    result = OPS.rms_norm(x, weight, 1e-6)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, weight * exact.bfloat16())


def test_rms_norm_uses_eps_and_the_last_dimension():
    x, weight = torch.randn(2, 3, 4), torch.randn(4)
    expected = [
        [
            [v / math.sqrt(sum(u * u for u in row) / 4 + 0.5) * w for v, w in zip(row, weight.tolist(), strict=True)]
            for row in rows
        ]
        for rows in x.tolist()
    ]
    torch.testing.assert_close(OPS.rms_norm(x, weight, 0.5), torch.tensor(expected))


def test_swiglu_takes_the_gate_from_the_first_half():
    gate, up = torch.randn(2, 3, 4)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(OPS.swiglu(torch.cat([gate, up], dim=-1)), expected)
