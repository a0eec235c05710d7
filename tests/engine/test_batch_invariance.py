"""In bfloat16 the native operations give a text that depends on neither drafts nor batch, token for token.

Attention is taken row by row here: the reference attention computes all rows of a sequence at once, and rounds by their
number.
"""

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.ops import BatchLayout

if not shutil.which("g++"):
    pytest.importorskip("mtp_backend._native")
from mtp_backend.ops.cpu import CpuOps

pytestmark = pytest.mark.slow
CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
PROMPTS = ["In the beginning", "And it came to pass in the days of", "The Lord said unto Moses", "Verse "]


class RowByRow(CpuOps):
    """Each row is a sequence of its own, which ends with it."""

    def mla_attention(self, q_latent, q_rope, latent, rope, layout, scale):
        return super().mla_attention(q_latent, q_rope, latent, rope, _rows_apart(layout), scale)

    def gqa_attention(self, query, key, value, layout, scale):
        return super().gqa_attention(query, key, value, _rows_apart(layout), scale)


def _rows_apart(layout):
    ends = torch.tensor(layout.query_ends)
    sequence = torch.searchsorted(ends, torch.arange(len(layout.positions)), right=True)
    return BatchLayout(
        layout.positions,
        layout.slots,
        list(range(1, len(layout.positions) + 1)),
        (layout.positions + 1).tolist(),
        layout.block_tables[sequence],
    )


@pytest.mark.parametrize("checkpoint", ["deepseek", "glm"])
def test_greedy_text_with_drafts_and_in_a_batch_is_the_text_alone(checkpoint):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = []
    for k in range(5):
        with patch("mtp_backend.engine.engine.ops_for", lambda *_: RowByRow()):
            llm = LLM(
                str(CHECKPOINTS / f"{checkpoint}-demo"),
                {"num_speculative_tokens": k} if k else None,
                "bfloat16",
                num_threads=1,
            )
        texts.append([llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS])
        texts.append([output.token_ids for output in llm.generate(PROMPTS, params)])
    assert all(text == texts[0] for text in texts)
