import asyncio
import json

import pytest
from mtp_client import (
    AsyncSequence,
    DeadlineExceeded,
    InvalidArgument,
    Sequence,
    SequenceLost,
    ServerError,
    Unavailable,
)
from mtp_client.state import SequenceState


class FakeServer:
    """Emits two tokens a step and stops after `length` steps; `failures` are raised first."""

    def __init__(self, length=3, failures=()):
        self.length = length
        self.failures = list(failures)
        self.requests = []

    def infer(self, request, timeout):
        self.requests.append(request)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        step = request.inputs["step"].item()
        if request.end:
            step = self.length - 1
        return {
            "current_step": [[step]],
            "output_ids": [[2 * step, 2 * step + 1]],
            "text_output": [[f"<{step}>".encode()]],
            "num_accepted": [[1 if step else 0]],
            "sequence_length": [[4 + 2 * step]],
            "finish_reason": [["stop" if step == self.length - 1 else ""]],
            "next_draft_ids": [[7, 8, 9]],
        }

    @property
    def wire(self):
        """(step, start, end) of each request."""
        return [(r.inputs["step"].item(), r.start, r.end) for r in self.requests]


class AsyncFakeServer(FakeServer):
    async def infer(self, request, timeout):
        await asyncio.sleep(0)
        return super().infer(request, timeout)


def make(server, prompt="hi", sequence_id=None, draft=None, priority=0, deadline=None, **params):
    state = SequenceState("speculative", prompt, sequence_id, draft, params, priority, deadline)
    kind = AsyncSequence if isinstance(server, AsyncFakeServer) else Sequence
    return kind(server, state, timeout=9.0)


def run(server, sequence, break_after=None):
    """Iterates over the sequence within its context, in the way of its kind."""
    if isinstance(sequence, Sequence):
        with sequence:
            for step in sequence:
                if step.step == break_after:
                    break
        return

    async def iterate():
        async with sequence:
            async for step in sequence:
                if step.step == break_after:
                    break

    asyncio.run(iterate())


both = pytest.mark.parametrize("fake", [FakeServer, AsyncFakeServer])
START, END = (0, True, False), (-1, False, True)


@both
def test_runs_to_its_end(fake):
    server = fake(3)
    sequence = make(server, "hi", max_tokens=5)
    run(server, sequence)
    assert server.wire == [START, (1, False, False), (2, False, False), END]
    first, second = server.requests[:2]
    assert first.inputs["text_input"].item() == "hi"
    assert first.inputs["sampling_parameters"].item() == '{"max_tokens": 5}'
    assert list(second.inputs) == ["step"]
    assert len({r.sequence_id for r in server.requests}) == 1
    assert sequence.token_ids == [0, 1, 2, 3, 4, 5]
    assert sequence.text == "<0><1><2>"
    assert [s.step for s in sequence.steps] == [0, 1, 2]
    assert (sequence.num_accepted, sequence.num_drafted) == (2, 6)
    assert sequence.finish_reason == "stop"


@both
def test_end_is_sent_once_after_early_break(fake):
    server = fake(9)
    run(server, make(server), break_after=1)
    assert server.wire == [START, (1, False, False), END]


def test_end_is_sent_once_after_an_exception_and_close_repeated():
    server = FakeServer()
    with pytest.raises(KeyError):
        with make(server) as sequence:
            sequence.step()
            raise KeyError("mine")
    sequence.close()
    assert server.wire == [START, END]
    with pytest.raises(InvalidArgument, match="closed"):
        sequence.step()


def test_failing_end_does_not_hide_the_exception():
    server = FakeServer(failures=[None, Unavailable("gone")])
    with pytest.raises(KeyError):
        with make(server) as sequence:
            sequence.step()
            raise KeyError("mine")
    assert server.wire == [START, END]


def test_end_has_a_short_timeout():
    server = FakeServer()
    timeouts = []
    infer = server.infer
    server.infer = lambda request, timeout: (timeouts.append(timeout), infer(request, timeout))[1]
    with make(server) as sequence:
        sequence.step()
    assert timeouts == [9.0, 5.0]


def test_not_started_is_not_ended():
    server = FakeServer()
    with make(server):
        pass
    assert server.wire == []


@both
@pytest.mark.parametrize("error", [Unavailable("x"), DeadlineExceeded("x")])
def test_lost_answer_repeats_the_same_step_once(fake, error):
    server = fake(2, failures=[error, None, error, None])
    sequence = make(server)
    run(server, sequence)
    assert server.wire == [START, START, (1, False, False), (1, False, False), END]
    assert server.requests[0] is server.requests[1]
    assert len(sequence.steps) == 2


def test_second_loss_is_raised_and_the_step_can_be_asked_for_again():
    lost = DeadlineExceeded("x")
    server = FakeServer(2, failures=[None, lost, lost, None])
    with make(server) as sequence:
        sequence.step()
        with pytest.raises(DeadlineExceeded):
            sequence.step(draft_ids=[5])
        with pytest.raises(InvalidArgument, match="repeat it first"):
            sequence.step(input_ids=[1])
        sequence.step()
    assert server.wire == [START, *[(1, False, False)] * 3, END]
    assert server.requests[3].inputs["draft_ids"].tolist() == [[5]]


def test_a_missed_deadline_is_raised_and_the_step_can_be_asked_for_again():
    """At once, for that is what the caller wants to know; other failures are still answered by another try."""
    server = FakeServer(2, failures=[None, DeadlineExceeded("x"), None, Unavailable("x")])
    with make(server, deadline=0.25, priority=2) as sequence:
        sequence.step()
        with pytest.raises(DeadlineExceeded):
            sequence.step()
        assert sequence.step().step == 1
    assert server.wire == [START, *[(1, False, False)] * 2, END]
    assert [request.deadline_us for request in server.requests] == [250_000] * 3 + [None]
    assert json.loads(server.requests[0].inputs["sampling_parameters"].item()) == {"priority": 2}
    server = FakeServer(1, failures=[Unavailable("x")])
    with make(server, deadline=0.25) as sequence:
        assert sequence.step().finish_reason == "stop"


@both
@pytest.mark.parametrize("prompt", ["hi", [8, 9]], ids=repr)
def test_lost_sequence_goes_on_from_its_tokens(fake, prompt):
    """The START stands for the step that was asked for, and the steps are counted on."""
    lost = SequenceLost("gone")
    server = fake(3, failures=[None, None, lost, None, lost, None])
    sequence = make(server, prompt, temperature=0.5)
    run(server, sequence, break_after=3)
    assert server.wire == [START, *[(step, False, False) for step in (1, 2)], START, (1, False, False), START, END]
    starts = [request for request in server.requests if request.start]
    name = "text_input" if isinstance(prompt, str) else "input_ids"
    for start, generated in zip(starts, [None, [0, 1, 2, 3], [0, 1, 2, 3, 0, 1]], strict=True):
        given = start.inputs.get("generated_ids")
        assert (given if given is None else given.tolist()) == (generated and [generated])
        assert start.inputs[name].tolist() == starts[0].inputs[name].tolist()
        assert "draft_ids" not in start.inputs
    [sampling] = {start.inputs["sampling_parameters"].item() for start in starts}
    assert 0 <= json.loads(sampling)["seed"] < 2**63
    assert [step.step for step in sequence.steps] == [0, 1, 2, 3]
    assert [step.num_drafted for step in sequence.steps] == [0, 3, 0, 0]
    assert len({request.sequence_id for request in server.requests}) == 1


def test_appended_tokens_are_prompt_of_a_lost_sequence():
    lost = SequenceLost("gone")
    server = FakeServer(9, failures=[None, None, None, lost, None, lost])
    with make(server, [8, 9]) as sequence:
        sequence.step()
        sequence.step(input_ids=[7])
        sequence.step()
        sequence.step(input_ids=[6], draft_ids=[5])
        sequence.step()
    _, third, fourth = [request.inputs for request in server.requests if request.start]
    assert third["input_ids"].tolist() == [[8, 9, 0, 1, 7, 2, 3, 4, 5, 6]] and "generated_ids" not in third
    assert fourth["input_ids"].tolist() == third["input_ids"].tolist() and fourth["generated_ids"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("prompt", "appended"), [([8, 9], {"text": "x"}), ("hi", {"text": "x"}), ("hi", {"input_ids": [7]})]
)
@pytest.mark.parametrize("pending", [False, True])
def test_lost_for_good(prompt, appended, pending):
    """Tokens that the client does not know cannot be given again; a lost sequence is not ended."""
    lost = SequenceLost("gone")
    server = FakeServer(9, failures=[None, lost] if pending else [None, None, lost])
    with make(server, prompt) as sequence:
        sequence.step()
        for _ in range(2):
            with pytest.raises(SequenceLost):
                sequence.step(**appended)
                sequence.step()
    assert server.wire == [START, *[(step, False, False) for step in range(1, 2 if pending else 3)]]


@both
@pytest.mark.parametrize("error", [SequenceLost("started again"), InvalidArgument("unexpected input")])
def test_a_start_that_fails_is_the_last(fake, error):
    server = fake(9, failures=[None, SequenceLost("gone"), error])
    with pytest.raises(type(error)):
        run(server, make(server))
    assert server.wire == [START, (1, False, False), START]


def test_a_start_whose_answer_is_lost_is_repeated():
    server = FakeServer(9, failures=[None, SequenceLost("gone"), Unavailable("x"), Unavailable("x"), None])
    with make(server) as sequence:
        sequence.step()
        with pytest.raises(Unavailable):
            sequence.step()
        sequence.step()
    assert server.wire == [START, (1, False, False), START, START, START, END]


def test_refused_step_can_be_replaced():
    server = FakeServer(failures=[None, InvalidArgument("draft_ids: …")])
    with make(server) as sequence:
        sequence.step()
        with pytest.raises(InvalidArgument):
            sequence.step(draft_ids=[-1])
        assert sequence.step(draft_ids=[1]).num_drafted == 1
    assert server.wire == [START, (1, False, False), (1, False, False), END]


def test_answer_of_another_step_is_an_error():
    server = FakeServer()
    server.infer = lambda request, timeout: FakeServer.infer(server, request, timeout) | {"current_step": [[4]]}
    with pytest.raises(ServerError, match="asked for step 0"):
        make(server).step()


def test_appended_tokens_and_drafts():
    server = FakeServer(9)
    with make(server, [1, 2]) as sequence:
        with pytest.raises(InvalidArgument, match="first step"):
            sequence.step(input_ids=[1])
        sequence.step()
        assert sequence.step(input_ids=[3]).num_drafted == 0
        assert sequence.step(text="more", draft_ids=[4, 5]).num_drafted == 2
        assert sequence.step().num_drafted == 3
    assert server.requests[0].inputs["input_ids"].tolist() == [[1, 2]]
    assert server.requests[1].inputs["input_ids"].tolist() == [[3]]


def test_drafter_sees_the_tokens_and_replaces_the_draft():
    seen = []

    def draft(token_ids):
        seen.append(token_ids)
        return [] if len(seen) == 1 else None

    server = FakeServer(3)
    with make(server, draft=draft) as sequence:
        assert [step.num_drafted for step in sequence] == [0, 0, 3]
    assert seen == [[0, 1], [0, 1, 2, 3]]
    assert server.requests[1].inputs["draft_ids"].shape == (1, 0)
    assert "draft_ids" not in server.requests[2].inputs


@pytest.mark.parametrize("sequence_id", [1, 2**63 - 1, "3f1c1f0e-5d2b-4c55-9a51-6f2e0a7b8c9d"])
def test_given_id(sequence_id):
    server = FakeServer(1)
    with make(server, sequence_id=sequence_id) as sequence:
        sequence.step()
    assert {r.sequence_id for r in server.requests} == {sequence_id}


def test_random_id():
    made = {make(FakeServer()).sequence_id for _ in range(100)}
    assert len(made) == 100 and all(0 < i < 2**63 for i in made)


@pytest.mark.parametrize("sequence_id", [0, -1, 2**63, "", "x" * 129, 1.5])
def test_impossible_id(sequence_id):
    with pytest.raises(InvalidArgument, match="sequence_id"):
        make(FakeServer(), sequence_id=sequence_id)
