"""Step numbers, main without draft, drafts of the client, appended text, and how sequences finish."""

import pytest

from server.helpers import PROMPTS, text, tokens
from server.test_sequence_batcher import GREEDY, SAMPLED, check_consistent, refusal


def test_lost_step(connection, alone):
    """Every step, the START too, can be asked for again by its number."""
    steps = []
    with connection.started("repeat", PROMPTS[0], **GREEDY) as first:
        for number in range(5):
            step = connection.step("repeat", step=number) if steps else first
            assert [connection.step("repeat", step=number) for _ in range(2)] == [step, step]
            steps.append(step)
    assert tokens(steps) == alone(PROMPTS[0], **GREEDY).token_ids[: len(tokens(steps))]
    check_consistent(steps)


@pytest.mark.parametrize(
    "step, allowed", [(4, "3 (the next) or 2"), (1, "3 (the next) or 2"), (-1, "3 (the next)"), (2**62, "3 (")]
)
def test_gap(connection, undisturbed, step, allowed):
    with connection.started("gap", PROMPTS[0], **GREEDY):
        connection.step("gap", step=1)
        third = connection.step("gap", step=2)
        error = refusal(connection.step, "gap", step=step)
        assert error.invalid
        assert f"step: got {step};" in error.message and allowed in error.message
        assert connection.step("gap", step=2) == third
        assert connection.step("gap", step=3)["current_step"] == 3


def test_main_alone(connection, alone):
    steps = connection.run("main alone", PROMPTS[0], SAMPLED, model="main")
    assert tokens(steps) == alone(PROMPTS[0], **SAMPLED).token_ids
    assert all(step["num_accepted"] == 0 and "next_draft_ids" not in step for step in steps)


def test_draft_epoch(connection):
    """draft answers only for the very sequence that main's answer is about."""
    main = connection.step("epoch", model="main", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)
    draft = connection.step("epoch", model="draft", start=True, epoch=main["epoch"])
    with connection.started("epoch of speculative", PROMPTS[0], **GREEDY) as first:
        assert draft["next_draft_ids"] == first["next_draft_ids"] != []
    assert connection.step("epoch", model="draft", epoch=main["epoch"]) == draft
    for wrong in (main["epoch"] - 1, main["epoch"] + 1, -1):
        error = refusal(connection.step, "epoch", model="draft", epoch=wrong)
        assert error.code in ("NOT_FOUND", "404") and "sequence lost" in error.message
    connection.end("epoch", "main")
    error = refusal(connection.step, "epoch", model="draft", epoch=main["epoch"])
    assert error.code in ("NOT_FOUND", "404") and "sequence lost" in error.message
    connection.step("epoch", model="draft", end=True, epoch=0)


def test_client_drafts(connection, alone):
    wanted = alone(PROMPTS[0], **GREEDY).token_ids
    wrong = [token + 1 for token in wanted]
    with connection.started("drafts", PROMPTS[0], **GREEDY) as step:
        at = len(step["output_ids"])
        for drafts, accepted in [
            (wanted[at : at + 2], 2),
            (wrong[at + 3 : at + 5], 0),
            ([wanted[at + 4], wrong[at + 5]], 1),
            ([], 0),
        ]:
            number = step["current_step"] + 1
            step = connection.step("drafts", step=number, draft_ids=drafts)
            assert step["num_accepted"] == accepted
            assert step["output_ids"] == wanted[at : at + accepted + 1]
            at += accepted + 1


def test_too_many_drafts(connection, undisturbed):
    with connection.started("many", PROMPTS[0], **GREEDY) as first:
        error = refusal(connection.step, "many", step=1, draft_ids=[5, 6, 7])
        assert error.invalid and "draft_ids: got '3 tokens'; allowed: 0 … 2 tokens" in error.message
        step = connection.step("many", step=1)  # the refused request was no step
    check_consistent([first, step])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["input_ids", "text_input"])
def test_append(connection, llm, alone, kind, params):
    """After an append the sequence goes on as a fresh one over the whole text."""
    appended = "\nAnd the king said,"
    appended_ids = llm.engine.tokenizer.encode(appended, add_special_tokens=False).ids
    prompt = llm.engine.tokenizer.encode(PROMPTS[0]).ids
    with connection.started("append", prompt=PROMPTS[0], **params) as first:
        before = [first] + [connection.step("append", step=number) for number in (1, 2)]
        value = appended_ids if kind == "input_ids" else appended
        after = [connection.step("append", step=3, **{kind: value})]
        while not after[-1]["finish_reason"]:
            after.append(connection.step("append", step=3 + len(after)))
    whole = prompt + tokens(before) + appended_ids
    wanted = alone(whole, **params)
    assert (tokens(after), text(after)) == (wanted.token_ids, wanted.text)
    assert after[0]["num_accepted"] == 0  # the drafts that were held belonged to another text
    assert after[-1]["sequence_length"] == len(whole) + len(wanted.token_ids)


def test_append_after_finish(connection, llm, alone):
    short = GREEDY | {"max_tokens": 3}
    with connection.started("go on", PROMPTS[0], **short) as step:
        steps = [step]
        while not steps[-1]["finish_reason"]:
            steps.append(connection.step("go on", step=len(steps)))
        more = [connection.step("go on", step=len(steps), input_ids=[300, 301])]
        while not more[-1]["finish_reason"]:
            more.append(connection.step("go on", step=len(steps) + len(more)))
    prompt = llm.engine.tokenizer.encode(PROMPTS[0]).ids
    assert tokens(more) == alone(prompt + tokens(steps) + [300, 301], **short).token_ids


def test_refused_append(connection, alone):
    """A step that is refused for its drafts has not appended its tokens either."""
    with connection.started("refused", PROMPTS[0], **GREEDY) as first:
        error = refusal(connection.step, "refused", step=1, input_ids=[300], draft_ids=[5, 6, 7])
        assert error.invalid and "draft_ids" in error.message
        error = refusal(connection.step, "refused", step=1, input_ids=[5000], draft_ids=[5, 6])
        assert error.invalid and "input_ids" in error.message
        step = connection.step("refused", step=1)
    check_consistent([first, step])
    assert tokens([first, step]) == alone(PROMPTS[0], **GREEDY).token_ids[: len(tokens([first, step]))]


END_TOKEN = {"temperature": 1.0, "seed": 5}  # comes to deepseek-demo's end token after 25 tokens of PROMPTS[0]


@pytest.mark.parametrize(
    "params, reason, ends_with",
    [
        ({"max_tokens": 7}, "length", None),
        ({"max_tokens": 1}, "length", None),
        (END_TOKEN, "stop", 1),
        ({"stop_token_ids": [395]}, "stop", 395),
        ({"stop": ["unto him"]}, "stop", None),
        ({"stop": ["LORD s"]}, "stop", None),
    ],
    ids=["length", "one token", "end token", "stop token", "stop string", "stop string within a token"],
)
def test_finish(connection, alone, params, reason, ends_with):
    wanted = alone(PROMPTS[0], **params)
    with connection.started("finish", PROMPTS[0], **params) as first:
        steps = [first]
        while not steps[-1]["finish_reason"]:
            steps.append(connection.step("finish", step=len(steps)))
        last = steps[-1]
        assert last["finish_reason"] == wanted.finish_reason == reason
        assert (tokens(steps), text(steps)) == (wanted.token_ids, wanted.text)
        assert ends_with in (None, tokens(steps)[-1])
        assert not any(stop in text(steps) for stop in params.get("stop", ()))
        # Steps after the end give nothing and say the same.
        for number in (len(steps), len(steps) + 1):
            after = connection.step("finish", step=number)
            assert after["output_ids"] == after["next_draft_ids"] == [] and after["text_output"] == ""
            assert after["num_accepted"] == 0
            assert (after["finish_reason"], after["sequence_length"]) == (reason, last["sequence_length"])


def test_ignore_eos(connection, alone):
    params = END_TOKEN | {"ignore_eos": True, "max_tokens": 40}
    steps = connection.run("ignore", PROMPTS[0], params)
    assert tokens(steps) == alone(PROMPTS[0], **params).token_ids
    assert 1 in tokens(steps)[:-1]
