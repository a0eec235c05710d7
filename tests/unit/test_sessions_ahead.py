"""Steps that are computed before their client asks for them, over an engine that only counts."""

import pytest
from fake_engine import DRAFT, MAIN, TTL, Table
from mtp_backend.errors import MtpError
from mtp_backend.serving.messages import Propose, Proposed, Stepped


@pytest.fixture
def table():
    return Table()


def going_on(table, name="s", computed=True):
    """A client with two steps and the drafts of both; its third step runs ahead, or has run."""
    first = table.step(name, start=True)
    table.propose(name, first.epoch)
    table.run()
    second = table.step(name, 1)
    assert second.next_draft_ids == [7, 8]
    table.take_drafts(name, first.epoch)
    assert ahead(table) == [name]
    if computed:
        table.run()
        assert ahead(table) == []
    return second


def ahead(table):
    """Names of the sequences that the next batch computes."""
    return [table.sessions._by_sequence[sequence] for sequence in table.engine.waiting]


def test_the_step_is_there_when_it_is_asked_for(table):
    going_on(table)
    third = table.ask(step=2)
    assert table.answer(third) == Stepped(third, [7, 8, 102], "", 2, 10, "", 2, 1, [7, 8])
    assert ahead(table) == ["s"]  # and the next one runs


def test_the_step_is_asked_for_before_it_is_computed(table):
    going_on(table, computed=False)
    third = table.ask(step=2)
    assert not table.answers(third)
    table.run()
    assert table.answer(third).token_ids == [7, 8, 102]
    assert ahead(table) == ["s"]


def test_only_who_takes_drafts_and_brings_nothing_runs_ahead(table):
    table.step("takes none", start=True)
    table.step("takes none", 1)
    epoch = table.step("has just begun", start=True).epoch
    table.propose("has just begun", epoch)
    table.run()
    assert ahead(table) == []
    for name, own in (("brings drafts", {"draft_ids": [7]}), ("brings text", {"token_ids": [5]})):
        epoch = table.step(name, start=True).epoch
        table.propose(name, epoch)
        table.run()
        table.step(name, 1, **own)
        assert ahead(table) == []
        table.take_drafts(name, epoch)
        table.step(name, 2)  # it may have been for once
        assert ahead(table) == [name]
        table.run()


def test_nobody_runs_ahead_of_others_who_wait(table):
    table.engine.full = True
    first = table.step(start=True)
    table.propose()
    table.run()
    assert table.step(step=1).next_draft_ids == [7, 8]
    assert ahead(table) == []
    table.take_drafts(epoch=first.epoch)
    assert table.step(step=2).token_ids == [7, 8, 102]


def test_a_client_that_stops_taking_drafts(table):
    """It gets no further ones; those that were made are used up."""
    going_on(table)
    assert table.step(step=2).next_draft_ids == [7, 8]
    table.run()  # that one ran ahead
    assert table.step(step=3).next_draft_ids == [7, 8]
    assert ahead(table) == []
    assert table.step(step=4) == Stepped(6, [7, 8, 104], "", 2, 16, "", 4, 1)
    assert table.step(step=5).token_ids == [105]
    drafts = table.propose()
    table.run()
    assert table.answer(drafts, DRAFT).draft_ids == [7, 8]  # it may begin again


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize(
    "own, tokens, length",
    [({"draft_ids": [9]}, [9], 9), ({"draft_ids": []}, [], 8), ({"token_ids": [4, 5]}, [], 10)],
    ids=["drafts", "no drafts", "text"],
)
def test_a_step_is_taken_back(table, computed, own, tokens, length):
    second = going_on(table, computed=computed)
    third = table.ask(step=2, **own)
    [(sequence, undone)] = table.engine.taken_back
    assert (undone, len(sequence.token_ids)) == (3 * computed, second.sequence_length + len(own.get("token_ids", [])))
    table.run()
    answer = table.answer(third)
    assert answer.token_ids[:-1] == tokens
    assert (answer.step, answer.num_accepted, answer.sequence_length) == (2, len(tokens), length)
    table.take_drafts()
    table.step(step=3)
    table.take_drafts()
    assert table.step(step=4).next_draft_ids == [7, 8]
    assert ahead(table) == []  # a client that did it once will do it again


def test_a_refused_step_changes_nothing(table):
    going_on(table)
    table.refused(table.ask(step=5), "INVALID_ARGUMENT", "step: got 5; allowed: 2 (the next) or 1")
    table.refused(table.ask(step=2, params={}), "INVALID_ARGUMENT", "sampling_parameters")
    assert not table.engine.taken_back
    table.refused(table.ask(step=2, draft_ids=[1, 2, 3]), "INVALID_ARGUMENT", "draft_ids")
    table.refused(table.ask(step=2, token_ids=[5000]), "INVALID_ARGUMENT", "input_ids")
    third = table.step(step=2)
    assert third.token_ids[:2] == [7, 8] and third.sequence_length == 10  # with the drafts that it was offered


@pytest.mark.parametrize("computed", [True, False])
def test_what_was_answered_stays(table, computed):
    """The last answer and its drafts, though the next step is there already."""
    second = going_on(table, computed=computed)
    again = table.ask(step=1)
    assert table.answer(again).token_ids == second.token_ids
    [session] = table.sessions._sessions.values()
    session.drafts[0][:] = [3, 4]  # those of this step, not of the next
    assert table.answer(table.propose(), DRAFT).draft_ids == [3, 4]
    assert not table.engine.taken_back


@pytest.mark.parametrize("computed", [True, False])
def test_end_without_the_step(table, computed):
    second = going_on(table, computed=computed)
    last = table.answer(table.ask(step=-1, end=True))
    assert (last.token_ids, last.sequence_length, last.finish_reason) == ([], second.sequence_length, "")
    assert len(table.sessions) == 0 and ahead(table) == []


@pytest.mark.parametrize("computed", [True, False])
def test_end_with_the_step(table, computed):
    going_on(table, computed=computed)
    third = table.ask(step=2, end=True)
    table.run()
    assert table.answer(third).token_ids == [7, 8, 102]
    assert len(table.sessions) == 0 and ahead(table) == []


def test_a_finished_text(table):
    """A step that ran ahead to the end is delivered as such, and nothing runs behind it."""
    second = going_on(table)
    [session] = table.sessions._sessions.values()
    session.sequence.finish_reason = "stop"
    session.sequence.draft_ids = []
    assert not table.sessions.expects_more
    assert (second.finish_reason, table.answer(table.ask(step=1)).finish_reason) == ("", "")
    assert table.answer(table.ask(step=2)).finish_reason == "stop"
    assert ahead(table) == []


@pytest.mark.parametrize("computed", [True, False])
def test_start_again(table, computed):
    going_on(table, computed=computed)
    assert table.step(start=True, token_ids=[4]).sequence_length == 2
    assert len(table.engine.removed) == len(table.sessions) == 1
    table.sessions.propose(DRAFT, Propose(99, "s", 1))
    table.refused(99, "NOT_FOUND", "started again", address=DRAFT)


@pytest.mark.parametrize("computed", [True, False])
def test_silent_clients_are_forgotten(table, computed):
    """A step that nobody has asked for keeps no sequence alive, and makes room for a new one."""
    going_on(table, computed=computed)
    table.now = TTL + 1
    table.sessions.expire()
    assert len(table.sessions) == 0 and ahead(table) == []
    going_on(table, "old", computed=computed)
    for name in "abcd":
        table.ask(name, start=True)
    assert "old" not in ahead(table)
    table.run()
    table.refused(table.ask("old", 2), "NOT_FOUND", "sequence lost")


def test_cancel_and_dead_roles_leave_it(table):
    second = going_on(table, computed=False)
    assert not table.sessions.cancel(MAIN, second.request)
    table.sessions.drop(MAIN)
    table.sessions.drop(DRAFT)
    table.run()
    assert table.answer(table.ask(step=2)).token_ids == [7, 8, 102]


def test_cancel_of_a_step_that_runs_ahead(table):
    going_on(table, computed=False)
    third = table.ask(step=2)
    assert table.sessions.cancel(MAIN, third)
    table.refused(third, "CANCELLED")
    assert len(table.sessions) == 0 and ahead(table) == []


def test_a_failed_batch(table):
    """The sequences in it are lost, asked for or not; others stay, with what was computed."""
    going_on(table, "computed")
    going_on(table, "in the batch", computed=False)
    table.sessions.fail_all(MtpError("broken"))
    table.refused(table.ask("in the batch", 2), "NOT_FOUND", "sequence lost")
    assert table.answer(table.ask("computed", 2)).token_ids[:2] == [7, 8]


def test_steps_without_drafts(table):
    """With 0 drafts a step they are none, at once."""
    table.engine.made = []
    table.step(start=True)
    first = table.propose()
    table.run()
    assert table.answer(first, DRAFT) == Proposed(first, [])
    assert table.step(step=1).next_draft_ids == []
    assert ahead(table) == ["s"]


def test_expected_clients(table):
    """For two batches: a step that is computed and not asked for. Nobody else."""
    table.step("plain", start=True)
    assert not table.sessions.expects_more
    going_on(table, computed=False)
    assert not table.sessions.expects_more
    table.run()
    assert table.sessions.expects_more
    table.step("plain", 1)
    assert table.sessions.expects_more
    table.step("plain", 2)
    assert not table.sessions.expects_more
    table.ask(step=2)
    table.run()
    assert table.sessions.expects_more
    table.ask(step=3)
    assert not table.sessions.expects_more
