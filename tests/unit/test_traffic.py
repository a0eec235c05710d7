"""What a decode step reads and what drafts promise, against values computed by hand."""

from pathlib import Path

import pytest
import torch
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.models.traffic import PassTraffic, StepTraffic, step_traffic

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
STEP = StepTraffic(
    target=PassTraffic(dense_bytes=1000, expert_bytes=100, kv_bytes=2, num_experts=4, num_chosen=1),
    draft=PassTraffic(dense_bytes=300, expert_bytes=10, kv_bytes=1, num_experts=4, num_chosen=1),
)


def test_bytes_of_a_pass():
    # One token meets 1 of 4 experts, two are expected to meet 1 + 3/4, three 1 + 3/4 + 9/16.
    assert STEP.target.bytes(1, 0) == pytest.approx(1100)
    assert STEP.target.bytes(2, 0) == pytest.approx(1175)
    assert STEP.target.bytes(3, 50) == pytest.approx(1000 + 231.25 + 100)
    assert STEP.target.bytes(1000, 0) == pytest.approx(1400)


def test_bytes_of_a_step():
    assert STEP.bytes(1, 0, 10) == pytest.approx(1100 + 20)
    # Target over 3 rows; a draft pass over 1 row and half a row, and one over 1 row.
    first, second = 300 + 40 * (1 - 0.75**1.5) + 10, 300 + 10 + 10
    assert STEP.bytes(1, 2, 10, 0.5) == pytest.approx(1231.25 + 20 + first + second)
    assert STEP.bytes(2, 0, 10) == pytest.approx(1175 + 40)


def test_predicted_speedup():
    # k = 1, always accepted: two tokens for a pass of the target over two rows and one of the draft over two.
    assert STEP.predicted_speedup(1, [1.0], 0) == pytest.approx(2 * 1100 / (1175 + 317.5))
    assert STEP.predicted_speedup(1, [0.0], 0) == pytest.approx(1100 / (1175 + 310))
    assert STEP.predicted_speedup(1, [], 10) == 1


@pytest.mark.parametrize(
    ("name", "attention", "shared_width"),
    [
        # q_a, q_a norm, q_b, kv_a, kv_a norm, kv_b, o
        ("deepseek-demo", 96 * 256 + 96 + 8 * 96 * 96 + 576 * 256 + 512 + 8 * 64 * 512 + 256 * 256, 576),
        # q, k, v with biases, o, norms of q and k
        ("glm-demo", (512 + 128 + 128) * 257 + 256 * 512 + 2 * 64, 256),
    ],
)
def test_bytes_of_a_checkpoint(name, attention, shared_width):
    traffic = step_traffic(Checkpoint(CHECKPOINTS / name), torch.bfloat16)
    expert, norms = 3 * 64 * 256, 2 * 256
    router = 2 * (8 * 256 + 8)  # in float32
    dense_layer, sparse_layer = attention + norms + 3 * 512 * 256, attention + norms + router + expert
    head = 1024 * 256
    assert traffic.target.dense_bytes == 2 * (dense_layer + 3 * sparse_layer + 256 + head)
    assert traffic.target.expert_bytes == 2 * 3 * expert
    # Two norms of the inputs, one behind, and the projection of both inputs.
    assert traffic.draft.dense_bytes == 2 * (sparse_layer + 3 * 256 + 2 * 256 * 256 + head)
    assert traffic.draft.expert_bytes == 2 * expert
    assert (traffic.target.kv_bytes, traffic.draft.kv_bytes) == (4 * 2 * shared_width, 2 * shared_width)
    assert (traffic.target.num_experts, traffic.target.num_chosen) == (8, 2)
