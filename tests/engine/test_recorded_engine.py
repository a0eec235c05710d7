"""Recorded passes in the engine: the same texts as without."""

import math
import subprocess
import sys

import pytest
from mtp_backend import LLM, SamplingParams
from mtp_backend.errors import InvalidArgument
from mtp_backend.graphs import PlainPasses, RecordedPasses, Rows

pytest.importorskip("mtp_backend._native")
PROMPTS = [
    "In the beginning",
    "And God said",
    "The LORD is my shepherd; I shall not want",
    "Now",
    "Blessed are the meek",
]


def texts(path, mode, k, **speculative):
    speculative = {"method": "mtp", "num_speculative_tokens": k} | speculative if k else None
    llm = LLM(path, graph_mode=mode, dtype="bfloat16", speculative=speculative, num_threads=1, max_num_seqs=4)
    params = [
        SamplingParams(max_tokens=12 + 5 * number, ignore_eos=True, temperature=number % 2, seed=number)
        for number in range(len(PROMPTS))
    ]
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_same_texts(model, k):
    """Sequences that join, leave and accept differently, some sampled; more of them than run at a time."""
    assert texts(model, "recorded", k) == texts(model, "eager", k)


def test_the_compiler_is_not_imported(deepseek):
    """It takes more memory than the demo networks, and longer than all of this."""
    program = f"""
import sys
from mtp_backend import LLM, SamplingParams
llm = LLM({deepseek!r}, {{"num_speculative_tokens": 2}}, dtype="bfloat16", num_threads=1)
llm.generate(["Now", "And God said"], [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=1)])
print(llm.engine._passes.num_recorded, *sys.modules.keys() & {{"torch._dynamo", "torch._inductor", "sympy"}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    number, *imported = done.stdout.split()
    assert int(number) and not imported


def paced(path, mode):
    """Clients ask for their steps one after the other, and for drafts once all have stepped."""
    engine = LLM(path, {"num_speculative_tokens": 2}, graph_mode=mode, dtype="bfloat16", num_threads=1).engine
    params = SamplingParams(ignore_eos=True)
    sequences = [engine.new_sequence(engine.tokenizer.encode(own).ids, params, paced=True) for own in PROMPTS[:3]]
    drafts = []
    for _ in range(8):
        for sequence in sequences:
            engine.add(sequence)
            engine.step()
        for sequence in sequences:
            engine.request_drafts(sequence)
        engine.step()
        drafts += [list(sequence.draft_ids) for sequence in sequences]
    return [sequence.token_ids for sequence in sequences], drafts


@pytest.fixture
def spoiled(monkeypatch):
    """What a pass gave is NaN by the time of the next one, which may write it."""
    run, before = RecordedPasses.run, []

    def spoiling(passes, function, batch):
        batch.hidden = [Rows(span.tensor.clone()).all for span in batch.hidden]
        for result in before:
            if isinstance(result, Rows):
                result.tensor.fill_(math.nan)
        before[:] = run(passes, function, batch)
        return list(before)

    monkeypatch.setattr(RecordedPasses, "run", spoiling)


@pytest.mark.usefixtures("spoiled")
def test_rows_that_wait_for_a_client_are_kept(model):
    assert paced(model, "recorded") == paced(model, "eager")


def test_more_clients_ask_for_drafts_than_step_together(model):
    """Every other one wants fewer of them; they ask at once."""
    made = []
    for mode in ("recorded", "eager"):
        speculative = {"num_speculative_tokens": 3}
        engine = LLM(model, speculative, graph_mode=mode, dtype="bfloat16", num_threads=1, max_num_seqs=2).engine
        sequences = [
            engine.new_sequence(
                [7, 8 + number], SamplingParams(ignore_eos=True, max_tokens=3 + number % 2 * 9), paced=True
            )
            for number in range(20)
        ]
        for first in range(0, 20, 2):
            for sequence in sequences[first : first + 2]:
                engine.add(sequence)
            engine.step()
        for sequence in sequences:
            engine.request_drafts(sequence)
        engine.step()
        made.append([sequence.draft_ids for sequence in sequences])
    assert made[0] == made[1] and {len(own) for own in made[0]} == {1, 3}


@pytest.mark.usefixtures("spoiled")
@pytest.mark.parametrize("vanilla", [False, True])
def test_results_are_read_before_the_next_pass(model, vanilla):
    assert texts(model, "recorded", 2, use_mtp_vanilla=vanilla) == texts(model, "eager", 2, use_mtp_vanilla=vanilla)


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
