"""What an engine says of all its steps: sums over its requests, never less than before, and where the time went."""

from unittest.mock import patch

import pytest
from mtp_backend import SamplingParams
from mtp_backend.config import EngineConfig, SpeculativeConfig
from mtp_backend.engine.engine import Engine

LOSSY = {"rejection_sample_method": "lossy_synthetic", "synthetic_acceptance_length": 2.5}


def numbers(totals):
    """Every number of the totals, positions included."""
    counters = totals.speculation
    drafted, accepted = (
        [counts[position] for position in range(15)] for counts in (counters.drafted, counters.accepted)
    )
    times = [totals.seconds.draft, totals.seconds.verify, totals.seconds.manage]
    return [totals.num_generated_tokens, counters.num_lossy_draft_tokens, *drafted, *accepted, *times]


@pytest.mark.parametrize("options", [{}, LOSSY], ids=["strict", "lossy"])
def test_totals_of_several_requests(deepseek, make_llm, prompt_of, options):
    """Also of requests that stop inside a run of accepted drafts, and of one that is cancelled."""
    engine = make_llm(deepseek, 3, **options).engine
    params = [SamplingParams(max_tokens=30, ignore_eos=True), SamplingParams(stop=(" ",), max_tokens=30)]
    sequences = [engine.new_sequence(prompt_of(9, index), params[index % 2]) for index in range(6)]
    for sequence in sequences:
        engine.add(sequence)
    start = last = numbers(engine.totals)
    lengths, num_tokens, num_steps = [], 0, 0
    while engine.has_work:
        drafted = {sequence: len(sequence.draft_ids) for sequence in sequences}
        for output in engine.step():
            num_tokens += len(output.token_ids)
            if drafted[output.sequence]:
                lengths.append(output.num_accepted)
        num_steps += 1
        now = numbers(engine.totals)
        assert all(later >= earlier for later, earlier in zip(now, last, strict=True))
        last = now
        if num_steps == 5:
            engine.remove(sequences[0])
    made = [later - earlier for later, earlier in zip(last, start, strict=True)]
    assert made[0] == num_tokens == sum(sequence.num_generated for sequence in sequences)
    assert made[1] == sum(sequence.counters.num_lossy_draft_tokens for sequence in sequences)
    assert (made[1] > 0) == bool(options)
    drafted, accepted = made[2:17], made[17:32]
    assert drafted == [sum(sequence.counters.drafted[at] for sequence in sequences) for at in range(15)]
    assert drafted[0] == len(lengths) > 20
    assert accepted == [sum(length > at for length in lengths) for at in range(15)]


def test_a_request_says_the_same_as_its_engine(deepseek, prompt_of, make_llm):
    llm = make_llm(deepseek, 4, block_size=8)
    [output] = llm.generate(prompt_of(9), SamplingParams(max_tokens=40, ignore_eos=True))
    counters = llm.engine.totals.speculation
    assert {name: getattr(output, name) for name in counters.figures()} == counters.figures()
    assert output.num_spec_steps > 8 and len(output.acceptance_rate_per_position) == 4
    assert llm.engine.totals.num_generated_tokens == 40


class Clock:
    """Stands still but where a test moves it."""

    now = 100.0

    def __call__(self):
        return self.now

    def moving(self, function, seconds):
        """The function, with the clock moved on while it runs."""

        def moved(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return moved


@pytest.mark.parametrize("k", [0, 2])
def test_parts_of_a_step(deepseek, prompt_of, k):
    """Each part gets the seconds that its functions took, and nothing from between the steps."""
    clock = Clock()
    speculative = SpeculativeConfig(k) if k else None
    engine = Engine(EngineConfig(deepseek, speculative, num_threads=1, max_num_seqs=1, max_model_len=64), clock)
    engine.add(engine.new_sequence(prompt_of(9), SamplingParams(max_tokens=10, ignore_eos=True)))
    schedule = clock.moving(engine.scheduler.schedule, 1 / 4)
    run, verify = clock.moving(engine._runner.run, 2), clock.moving(engine._verifier.verify, 1)
    thinks = clock.moving(engine._verifier.thinks_after, 1 / 8)  # after each commit
    drafting = [patch.object(engine._drafter, "propose", clock.moving(engine._drafter.propose, 16))] if k else []
    patches = [
        patch.object(engine.scheduler, "schedule", schedule),
        patch.object(engine._runner, "run", run),
        patch.object(engine._verifier, "verify", verify),
        patch.object(engine._verifier, "thinks_after", thinks),
        *drafting,
    ]
    for each in patches:
        each.start()
    steps = 0
    while engine.has_work:
        engine.step()
        clock.now += 1000
        steps += 1
    for each in patches:
        each.stop()
    seconds = engine.totals.seconds
    assert (seconds.verify, seconds.manage) == (3 * steps, 3 / 8 * steps)
    assert seconds.draft == (16 * (steps - 1) if k else 0)  # the last step leaves nothing to draft for
    assert engine.totals.seconds_per_token.total == seconds.total / 10
