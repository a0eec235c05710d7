"""Recorded passes in the engine: the same texts as without."""

import pytest
from mtp_backend import LLM, SamplingParams
from mtp_backend.errors import InvalidArgument
from mtp_backend.graphs import PlainPasses, RecordedPasses

pytest.importorskip("mtp_backend._native")
PROMPTS = [
    "In the beginning",
    "And God said",
    "The LORD is my shepherd; I shall not want",
    "Now",
    "Blessed are the meek",
]


def texts(path, mode, k, **changes):
    speculative = {"method": "mtp", "num_speculative_tokens": k} if k else None
    llm = LLM(
        path, graph_mode=mode, dtype="bfloat16", speculative=speculative, num_threads=1, max_num_seqs=4, **changes
    )
    params = [
        SamplingParams(max_tokens=12 + 5 * number, ignore_eos=True, temperature=number % 2, seed=number)
        for number in range(len(PROMPTS))
    ]
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_same_texts(model, k):
    """Sequences that join, leave and accept differently, some sampled; more of them than run at a time."""
    assert texts(model, "recorded", k) == texts(model, "eager", k)


def test_taken_by_itself(model):
    kinds = {
        (mode, dtype): type(LLM(model, graph_mode=mode, dtype=dtype, num_threads=1).engine._passes)
        for mode, dtype in [(None, "bfloat16"), ("eager", "bfloat16"), (None, "float32")]
    }
    assert kinds == {
        (None, "bfloat16"): RecordedPasses,
        ("eager", "bfloat16"): PlainPasses,
        (None, "float32"): PlainPasses,
    }


def test_refused(model):
    with pytest.raises(InvalidArgument, match="graph_mode: got 'recorded'; allowed: null, or dtype bfloat16"):
        LLM(model, graph_mode="recorded", dtype="float32")
