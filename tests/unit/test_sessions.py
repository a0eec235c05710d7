"""The table of client-paced sequences, over an engine that only counts."""

import pytest
from fake_engine import DRAFT, MAIN, OTHER, TTL, Table
from mtp_backend.errors import MtpError
from mtp_backend.serving.messages import Proposed, Step, Stepped


@pytest.fixture
def table():
    return Table()


def test_steps(table):
    first = table.step(start=True)
    assert first == Stepped(1, [100], "", 0, 4, "", 0, 1)
    drafts = table.propose()
    table.run()
    assert table.answer(drafts, DRAFT) == Proposed(drafts, [7, 8])
    assert table.step(step=1) == Stepped(3, [7, 8, 101], "", 2, 7, "", 1, 1, [7, 8])
    assert table.step() == Stepped(4, [7, 8, 102], "", 2, 10, "", 2, 1, [7, 8])  # without a number: the next


def test_start_behind_tokens_that_were_generated(table):
    """As a client starts a sequence that was lost: its prompt, and its tokens so far."""
    assert table.step(start=True, generated_ids=[50, 51]) == Stepped(1, [100], "", 0, 6, "", 0, 1)


def test_end(table):
    table.step(start=True)
    last = table.step(step=-1, end=True)
    assert (last.token_ids, last.sequence_length) == ([], 4)
    assert len(table.sessions) == 0 and len(table.engine.removed) == 1
    table.refused(table.ask(step=2), "NOT_FOUND", "sequence lost")


def test_end_with_step(table):
    assert table.step(start=True, end=True).token_ids == [100]
    assert len(table.sessions) == 0
    table.step(start=True)
    assert table.step(step=1, end=True).token_ids == [102]
    assert len(table.sessions) == 0


def test_end_even_if_refused(table):
    """END ends the sequence, whatever else is wrong with the request."""
    table.step(start=True)
    table.refused(table.ask(step=9, end=True), "INVALID_ARGUMENT", "step: got 9")
    assert len(table.sessions) == 0


def test_repeat(table):
    first = table.step(start=True)
    for _ in range(2):
        number = table.ask(step=0)
        assert table.answer(number) == Stepped(number, *list(_fields(first))[1:])
    assert table.step(step=1).token_ids == [101]
    assert table.step(step=1).token_ids == [101]
    table.refused(table.ask(step=0), "INVALID_ARGUMENT", "step: got 0; allowed: 2 (the next) or 1 (the last one again)")


def test_repeat_with_end(table):
    table.step(start=True)
    assert table.step(step=0, end=True).token_ids == [100]
    assert len(table.sessions) == 0


def _fields(message):
    return [getattr(message, name) for name in message.__struct_fields__]


@pytest.mark.parametrize("step", [2, -1, 100])
def test_gap(table, step):
    table.step(start=True)
    table.refused(table.ask(step=step), "INVALID_ARGUMENT", f"step: got {step}; allowed: 1 (the next) or 0")
    assert table.step(step=1).step == 1


def test_join(table):
    """A running step that is asked for again is answered once, to the one who asked last."""
    first = table.ask(start=True)
    second = table.ask(step=0, address=OTHER)
    table.refused(first, "CANCELLED", "asked for again")
    table.refused(table.ask(step=5), "INVALID_ARGUMENT", "step: got 5; allowed: 0 (it is running)")
    table.run()
    assert table.answer(second, OTHER).token_ids == [100]
    assert len(table.answers(first)) == 1


def test_start_over_running(table):
    old = table.ask(start=True)
    new = table.ask(start=True, token_ids=[4])
    table.refused(old, "CANCELLED", "it was started again")
    table.run()
    assert (table.answer(new).epoch, table.answer(new).sequence_length) == (2, 2)
    assert len(table.sessions) == 1 and len(table.engine.removed) == 1


def test_ids_of_two_types(table):
    table.step(7, start=True)
    table.step("7", start=True, token_ids=[4])
    assert table.step(7, 1).sequence_length == 5
    assert table.step("7", 1).sequence_length == 3


@pytest.mark.parametrize("epoch, sequence", [(0, "s"), (3, "s"), (2, "other")])
def test_propose_for_another(table, epoch, sequence):
    table.step(start=True)
    table.step(start=True)
    table.refused(table.propose(sequence, epoch), "NOT_FOUND", "sequence lost", address=DRAFT)


def test_propose_twice(table):
    """The answer goes to the later request, and the earlier one is not left without any."""
    table.step(start=True)
    first, second = table.propose(), table.propose()
    table.refused(first, "CANCELLED", "asked for again", address=DRAFT)
    table.run()
    assert table.answer(second, DRAFT).draft_ids == [7, 8]


def test_propose_held_drafts(table):
    """Drafts are computed once."""
    table.step(start=True)
    table.propose()
    table.run()
    again = table.propose()
    assert table.answer(again, DRAFT).draft_ids == [7, 8]
    assert not table.engine.drafting


@pytest.mark.parametrize(
    "options, message",
    [
        ({"step": 1}, "step: got 1; allowed: 0"),
        ({"draft_ids": [5]}, "draft_ids: got [5]; allowed: nothing on a START"),
        ({"token_ids": []}, "input_ids"),
        ({"params": {"foo": 1}}, "sampling_parameters.foo: got 1"),
        ({"params": {"temperature": -1}}, "temperature: got -1"),
    ],
)
def test_refused_start(table, options, message):
    table.step(start=True)
    table.refused(table.ask(start=True, **options), "INVALID_ARGUMENT", message)
    assert table.step(step=1).step == 1  # the sequence that was there goes on


def test_start_without_prompt(table):
    table.sessions.step(MAIN, Step(9, "s", True, False, None, None, None, None))
    table.refused(9, "INVALID_ARGUMENT", "input_ids: got None; allowed: a prompt on a START")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"params": {}}, "sampling_parameters"),
        ({"draft_ids": [1, 2, 3]}, "draft_ids"),
        ({"token_ids": [5], "draft_ids": [1, 2, 3]}, "draft_ids"),
        ({"token_ids": [5000], "draft_ids": [1]}, "input_ids"),
    ],
)
def test_refused_step_changes_nothing(table, options, message):
    table.step(start=True)
    table.propose()
    table.run()
    table.refused(table.ask(step=1, **options), "INVALID_ARGUMENT", message)
    assert table.step(step=1) == Stepped(4, [7, 8, 101], "", 2, 7, "", 1, 1, [7, 8])


def test_append(table):
    table.step(start=True)
    table.propose()
    table.run()
    assert table.step(step=1, token_ids=[5, 6]).sequence_length == 7  # the drafts do not follow the new tokens
    assert table.step(step=2, token_ids=[5], draft_ids=[9]).token_ids == [9, 102]


def test_finished(table):
    table.step(start=True)
    [session] = table.sessions._sessions.values()
    session.sequence.finish_reason = "stop"
    for number in (1, 2):
        after = table.ask(step=number)
        assert (table.answer(after).token_ids, table.answer(after).finish_reason) == ([], "stop")
    assert table.answer(table.propose(), DRAFT).draft_ids == []
    assert table.step(step=3, token_ids=[5]).token_ids == [101]  # an append goes on


def test_capacity(table):
    """The least recently used sequence makes room; one that runs does not."""
    for name in "abcd":
        table.step(name, start=True)
    table.step("a", 1)
    table.step("e", start=True)
    table.refused(table.ask("b", 1), "NOT_FOUND", "sequence lost")
    for name, step in (("a", 2), ("c", 1), ("d", 1), ("e", 1)):
        assert table.step(name, step).step == step


def test_capacity_all_running(table):
    for name in "abcd":
        table.ask(name, start=True)
    table.refused(table.ask("e", start=True), "UNAVAILABLE", "4 of 4 sequences", "max_sequences")
    table.run()
    assert table.step("e", start=True).step == 0


def test_restart_needs_no_room(table):
    for name in "abcd":
        table.step(name, start=True)
    table.step("a", start=True)
    assert table.step("b", 1).step == 1


def test_expiry(table):
    table.step("silent", start=True)
    table.now = TTL - 1
    table.step("active", start=True)
    table.ask("running", start=True)
    table.sessions.expire()
    assert len(table.sessions) == 3
    table.now = TTL + 1
    table.sessions.expire()
    table.refused(table.ask("silent", 1), "NOT_FOUND", "sequence lost")
    assert table.step("active", 1).step == 1
    table.now = 2 * TTL
    assert table.step("active", 1).step == 1  # the same answer again is a use too
    table.now = 3 * TTL - 1
    table.sessions.expire()
    running = table.ask("active", 2)
    table.now = 5 * TTL  # its step takes longer than the limit
    table.sessions.expire()
    table.run()
    assert table.answer(running).step == 2


def test_cancel(table):
    number = table.ask(start=True)
    assert not table.sessions.cancel(MAIN, 99)
    assert not table.sessions.cancel(OTHER, number)
    assert table.sessions.cancel(MAIN, number)
    table.refused(number, "CANCELLED", "cancelled")
    assert len(table.sessions) == 0 and len(table.engine.removed) == 1
    table.run()
    assert len(table.answers(number)) == 1


def test_cancel_after_answer(table):
    """Too late: the sequence lives."""
    first = table.step(start=True)
    assert not table.sessions.cancel(MAIN, first.request)
    assert table.step(step=1).step == 1


def test_role_death(table):
    """Sequences that nobody computes for stay; what the dead role waited for is forgotten."""
    table.step("idle", start=True)
    table.ask("running", start=True)
    table.ask("of another", start=True, address=OTHER)
    table.propose("idle")
    table.sessions.drop(MAIN)
    table.sessions.drop(DRAFT)
    sent = len(table.sent)
    table.run()
    [(to, message)] = [entry for entry in table.sent[sent:] if entry[0] != MAIN]
    assert to == OTHER and message.step == 0
    assert table.step("idle", 1).step == 1
    table.refused(table.ask("running", 1), "NOT_FOUND", "sequence lost")


def test_fail_all(table):
    """A failed engine step answers everybody who waits, for drafts as well."""
    table.step("idle", start=True)
    table.step("drafting", start=True)
    running = table.ask("running", start=True)
    drafting = table.propose("drafting", 2)
    table.sessions.fail_all(MtpError("broken"))
    table.refused(running, "INTERNAL", "broken")
    table.refused(drafting, "INTERNAL", "broken", address=DRAFT)
    assert table.step("idle", 1).step == 1


def test_every_request_is_answered_once(table):
    """Random steps, ends, cancels and draft requests: never silence, never two answers."""
    import random

    for seed in range(30):
        table, chance, asked = Table(max_sequences=3), random.Random(seed), []
        for _ in range(200):
            name = chance.choice("abcde")
            kind = chance.randrange(7)
            if kind < 3:
                start = chance.random() < 0.3
                step = chance.choice([None, 0, 1, 2, -1])
                number = table.ask(
                    name,
                    step,
                    start=start,
                    end=chance.random() < 0.2,
                    draft_ids=chance.choice([None, None, [1], [1, 2, 3]]),
                )
                asked.append((MAIN, number))
            elif kind == 3:
                session = table.sessions._sessions.get(name)
                if session is None or session.proposing is None:  # the server lets one request of a sequence run
                    asked.append((DRAFT, table.propose(name, session.epoch if session else 1)))
                    table.take_drafts(name, session.epoch if session else 1)
            elif kind == 4 and asked:
                table.sessions.cancel(*chance.choice(asked))
            elif kind == 5:
                table.now += chance.random() * TTL
                table.sessions.expire()
            else:
                table.run()
        table.run()
        assert sorted((to, message.request) for to, message in table.sent) == sorted(asked)


def late(table, **step):
    """A step whose client has half a second, when two are over."""
    number = table.ask(**step, timeout=0.5)
    table.sessions.expire_steps()
    assert not table.answers(number)
    table.now += 2
    table.sessions.expire_steps()
    return number


@pytest.mark.parametrize("computed", [True, False])
def test_a_late_step_may_be_asked_for_again(table, computed):
    table.step(start=True)
    table.refused(late(table, step=1), "DEADLINE_EXCEEDED", "0.5 s (timeout) have passed before step 1")
    if computed:
        table.run()
    again = table.ask(step=1)
    if not computed:
        table.run()
    assert (table.answer(again).token_ids, table.answer(again).step) == ([101], 1)
    assert table.step(step=2).token_ids == [102]
    table.now += TTL + 1
    table.sessions.expire()
    assert len(table.sessions) == 0


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("own", [{"token_ids": [5]}, {"draft_ids": [5]}])
def test_a_late_step_is_taken_back_for_tokens(table, computed, own):
    """Also where the client has never asked for drafts."""
    table.step(start=True)
    late(table, step=1)
    if computed:
        table.run()
    answer = table.step(step=1, **own)
    assert (answer.step, answer.sequence_length) == (1, 6)  # prompt, START's token, the client's, the step's own
    assert [undone for _, undone in table.engine.taken_back] == [int(computed)]


@pytest.mark.parametrize("step", [{"start": True}, {"step": 1, "end": True}, {"step": 1, "token_ids": [5]},
                                  {"step": 1, "draft_ids": [5]}])  # fmt: skip
def test_a_late_step_that_cannot_be_asked_for_again_ends_its_sequence(table, step):
    if "start" not in step:
        table.step(start=True)
    table.refused(late(table, **step), "DEADLINE_EXCEEDED")
    assert len(table.sessions) == 0 and not table.engine.waiting
    table.refused(table.ask(step=1), "NOT_FOUND", "sequence lost")


def test_the_deadline_of_a_step_is_its_own(table):
    """That of a step before it, or of a request that it takes the place of, is over."""
    table.step(start=True, timeout=0.5)
    first = table.ask(step=1, timeout=0.5)
    second = table.ask(step=1)
    table.now += 2
    table.sessions.expire_steps()
    table.refused(first, "CANCELLED", "asked for again")
    table.run()
    assert table.answer(second).token_ids == [101]


def test_priority_of_a_start(table):
    table.ask(start=True, priority=-3)
    assert [sequence.priority for sequence in table.engine.waiting] == [-3]
