"""mtp_client and its command against the real server."""

import asyncio
import json
import os
import re
import signal
import subprocess
import textwrap
import time
from contextlib import aclosing

import mtp_client
import pytest
from mtp_client import AsyncClient, Client, DeadlineExceeded, InvalidArgument, NotFound, SequenceLost, Unavailable

from server.helpers import PROMPTS, Connection, sequence_tensors
from server.running import COMMANDS, ROOT, wait_for
from server.test_sequence_batcher import refusal

README = (ROOT / "README.md").read_text(encoding="utf-8")
PARAMS = {"max_tokens": 16, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 4, **PARAMS}
TOKENS = [0, 37, 265, 263, 347, 847, 325, 713, 16]  # of the first prompt
PROTOCOLS = pytest.mark.parametrize("protocol", ["grpc", "http"])


def url(server, protocol):
    return server.grpc_url if protocol == "grpc" else server.http_url


@pytest.fixture(params=["grpc", "http"])
def client(request, triton_server):
    with Client(url(triton_server, request.param), request.param) as client:
        yield client


@PROTOCOLS
@pytest.mark.parametrize("name", ["triton_server", "glm_server"])
def test_three_ways_one_text(request, name, protocol):
    """generate, stream and sequence give the same tokens, texts and counts."""
    with Client(url(request.getfixturevalue(name), protocol), protocol) as client:
        for params in (PARAMS, SAMPLED):
            whole = client.generate(PROMPTS[2], **params)
            chunks = list(client.stream(PROMPTS[2], **params))
            with client.sequence(PROMPTS[2], **params) as sequence:
                steps = list(sequence)
            assert len(chunks) > 1 and len(steps) > 1
            assert whole.text == "".join(chunk.text for chunk in chunks) == sequence.text
            assert whole.token_ids == [token for chunk in chunks for token in chunk.token_ids] == sequence.token_ids
            assert whole.finish_reason == chunks[-1].finish_reason == sequence.finish_reason == "length"
            assert whole.num_accepted_draft_tokens == chunks[-1].num_accepted_draft_tokens == sequence.num_accepted
            assert whole.num_draft_tokens == sequence.num_drafted > 0


@PROTOCOLS
def test_async(triton_server, protocol, alone):
    wanted = alone(PROMPTS[0], **SAMPLED)

    async def run():
        async with AsyncClient(url(triton_server, protocol), protocol) as client:

            async def stream():
                async with aclosing(client.stream(PROMPTS[0], **SAMPLED)) as chunks:
                    return [token async for chunk in chunks for token in chunk.token_ids]

            async def steps():
                async with client.sequence(PROMPTS[0], **SAMPLED) as sequence:
                    return [token async for step in sequence for token in step.token_ids]

            assert await client.is_ready() and await client.is_ready("speculative")
            whole, *others = await asyncio.gather(client.generate(PROMPTS[0], **SAMPLED), stream(), steps(), steps())
            assert [whole.token_ids, *others] == [wanted.token_ids] * 4

    asyncio.run(run())


def test_early_break(client, triton_server):
    """Leaving the block ends the sequence on the server."""
    with client.sequence(PROMPTS[0], sequence_id="early") as sequence:
        for step in sequence:
            if step.step == 2:
                break
    with Connection(triton_server) as connection:
        assert "must specify the START flag" in refusal(connection.step, "early", step=3).message


def test_closed_stream(client, triton_server):
    """Closing a stream cancels its request."""
    stream = client.stream(PROMPTS[0], max_tokens=4000, ignore_eos=True)
    next(stream)
    wait_for(lambda: triton_server.engine_load() > 0.1, 20, "a busy engine")
    stream.close()
    wait_for(lambda: triton_server.engine_load() < 0.1, 10, "an idle engine")


def test_drafter(client, alone):
    """Drafts of the caller's own; those of the server where it gives None."""
    wanted = alone(PROMPTS[0], **PARAMS).token_ids

    def draft(token_ids):
        at = len(token_ids)
        return None if at < 4 else [] if at < 6 else wanted[at : at + 2]

    with client.sequence(PROMPTS[0], draft=draft, **PARAMS) as sequence:
        steps = list(sequence)
    assert sequence.token_ids == wanted
    assert [step.num_accepted for step in steps if step.num_drafted == 2][-3:-1] == [2, 2]
    assert any(step.num_drafted == 0 for step in steps[1:])


def test_append(client, llm, alone):
    tokenizer = llm.engine.tokenizer
    with client.sequence(PROMPTS[0], **PARAMS) as sequence:
        first = sequence.step()
        second = sequence.step(text=" And he said,")
        third = sequence.step(input_ids=[300, 301])
    whole = (
        tokenizer.encode(PROMPTS[0]).ids
        + first.token_ids
        + tokenizer.encode(" And he said,", add_special_tokens=False).ids
    )
    assert second.token_ids == alone(whole, **PARAMS).token_ids[:1]
    whole += second.token_ids + [300, 301]
    assert third.token_ids == alone(whole, **PARAMS).token_ids[:1]


@pytest.mark.parametrize(
    "params",
    [PARAMS, SAMPLED, {"max_tokens": 16, "repetition_penalty": 1.3, "stop": "LORD,"},
     {"max_tokens": 12, "temperature": 1.0, "structured_output": {"regex": "[漢字語🙂]{4} [0-9]{4}"}}],
    ids=["greedy", "sampled", "penalty", "structure"],
)  # fmt: skip
def test_lost_sequence(client, triton_server, params):
    """Whoever ends it: the client starts it again from its tokens, and it goes on with the same ones."""
    whole = client.generate(PROMPTS[0], **params | {"seed": 9 if params.get("temperature") else None})
    for prompt in (PROMPTS[0], None):
        given = params | ({"seed": 9} if params.get("temperature") else {})
        with Connection(triton_server) as other, client.sequence(prompt or TOKENS, **given) as sequence:
            for step in sequence:
                if step.step in (1, 3):
                    other.end(sequence.sequence_id)
        assert sequence.token_ids == whole.token_ids and sequence.text == whole.text
        assert sequence.finish_reason == whole.finish_reason
        assert [step.step for step in sequence.steps] == list(range(len(sequence.steps)))


def test_lost_sequence_after_appended_tokens(client, triton_server, alone):
    with Connection(triton_server) as other, client.sequence(TOKENS, **PARAMS) as sequence:
        first = sequence.step()
        other.end(sequence.sequence_id)
        second = sequence.step(input_ids=[300, 301])
        third = sequence.step()
        other.end(sequence.sequence_id)
        fourth = sequence.step()
    whole = [*TOKENS, *first.token_ids, 300, 301]
    got = second.token_ids + third.token_ids + fourth.token_ids
    assert got == alone(whole, **PARAMS).token_ids[: len(got)]


def test_sequence_survives_the_engine(server_factory, alone):
    """A sequence that is drawn with a seed of the client's own goes on when the engine has been killed."""
    with server_factory() as server, Client(server.grpc_url) as client:
        with client.sequence(PROMPTS[0], temperature=0.9, **PARAMS) as sequence:
            first = [sequence.step() for _ in range(3)]
            os.kill(server.engine_pid(), signal.SIGKILL)
            while not sequence.finish_reason:
                try:
                    sequence.step()
                except Unavailable:
                    time.sleep(0.2)
            seed = sequence.seed
        assert sequence.token_ids == alone(PROMPTS[0], temperature=0.9, seed=seed, **PARAMS).token_ids
        assert len(first) < len(sequence.steps)


@PROTOCOLS
def test_chat(triton_server, protocol):
    """The checkpoint's own template; the same from both clients, whole and streamed."""
    checkpoint = ROOT / "checkpoints" / "deepseek-demo"
    messages = [{"role": "user", "content": "In the beginning"}]
    prompt = "<｜begin▁of▁sentence｜><｜User｜>In the beginning<｜Assistant｜>"

    async def run():
        async with AsyncClient(url(triton_server, protocol), protocol, tokenizer=checkpoint) as client:
            async with aclosing(client.stream_chat(messages, **SAMPLED)) as chunks:
                return [await client.chat(messages, **SAMPLED)], [chunk async for chunk in chunks]

    with Client(url(triton_server, protocol), protocol, tokenizer=checkpoint) as client:
        wanted = client.generate(prompt, add_special_tokens=False, **SAMPLED)
        wholes, chunks = asyncio.run(run())
        wholes.append(client.chat(messages, **SAMPLED))
        assert [whole.token_ids for whole in wholes] == [wanted.token_ids] * 2
        for streamed in (chunks, list(client.stream_chat(messages, **SAMPLED))):
            assert "".join(chunk.text for chunk in streamed) == wanted.text and len(streamed) > 1
        with pytest.raises(InvalidArgument, match=r"messages\[0\].role: got 'wizard'"):
            client.chat([{"role": "wizard", "content": "x"}])
    with Client() as client, pytest.raises(InvalidArgument, match="no chat template"):
        client.chat(messages)


def test_deadline(client, triton_server, alone):
    """A text that takes too long ends; a step that took too long may be asked for again. A microsecond is too little."""
    for ask in (client.generate, lambda *args, **options: list(client.stream(*args, **options))):
        with pytest.raises(DeadlineExceeded, match=r"\(timeout\) have passed"):
            ask(PROMPTS[0], max_tokens=4000, ignore_eos=True, deadline=0.05)
    assert client.generate(PROMPTS[0], deadline=600, priority=-5, **PARAMS).num_output_tokens == 16
    with client.sequence(PROMPTS[0], deadline=1e-6, **PARAMS) as sequence, pytest.raises(DeadlineExceeded):
        sequence.step()
    with pytest.raises(InvalidArgument, match="priority: got 4294967296"):
        client.generate("a", priority=2**32)
    with client.sequence("a", priority=2**32) as sequence, pytest.raises(InvalidArgument, match="priority: got"):
        sequence.step()


def test_a_late_step_may_be_asked_for_again(triton_server, alone):
    wanted = alone(PROMPTS[0], **PARAMS).token_ids
    with Connection(triton_server) as connection, connection.started("late", **PARAMS) as start:
        error = refusal(connection.infer, "speculative", sequence_tensors(step=1), sequence_id="late", timeout=1)
        assert error.code == "UNAVAILABLE" and "DEADLINE_EXCEEDED: 1e-06 s (timeout)" in error.message
        second = connection.step("late", step=1)
        assert second["current_step"] == 1
        got = start["output_ids"] + second["output_ids"]
        assert got == wanted[: len(got)]


def test_errors(client):
    with pytest.raises(InvalidArgument, match="temperature: got -1.0; allowed: a number in"):
        client.generate("a", temperature=-1.0)
    with pytest.raises(InvalidArgument, match="text_input: got ''"):
        list(client.stream(""))
    with pytest.raises(NotFound):
        client.generate("a", model="none")
    with (
        client.sequence(PROMPTS[0]) as sequence,
        client.sequence(PROMPTS[0], sequence_id=sequence.sequence_id) as other,
    ):
        sequence.step()
        sequence.step(text=" and")
        other.step()
        other.close()
        with pytest.raises(SequenceLost):
            sequence.step()
    with client.sequence([5, 5000]) as sequence, pytest.raises(InvalidArgument, match="input_ids: got 5000; allowed"):
        sequence.step()
    with pytest.raises(InvalidArgument, match="128 bytes"):
        client.sequence("a", sequence_id="ä" * 65)


@pytest.mark.parametrize("document", [README, mtp_client.__doc__], ids=["README", "docstring"])
def test_examples(triton_server, document, capsys, monkeypatch):
    """What the documentation shows runs, against this server."""
    monkeypatch.chdir(ROOT)
    if document is README:
        [code] = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "import Client" in block]
    else:
        code = textwrap.dedent("\n".join(line for line in document.splitlines() if line.startswith("    ")))
    assert code.count('"127.0.0.1:8001"') >= 1 and code.count("client.") >= 3
    exec(code.replace("127.0.0.1:8001", triton_server.grpc_url), {})
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_not_reachable():
    with Client("127.0.0.1:1", timeout=5) as client:
        assert not client.is_ready()
        with pytest.raises(Unavailable):
            client.generate("a")


# The command mtp-client


def command(server, protocol, *arguments):
    line = [COMMANDS / "mtp-client", *arguments, "--url", url(server, protocol), "--protocol", protocol]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


@PROTOCOLS
def test_command(triton_server, protocol, alone):
    wanted = alone(PROMPTS[0], max_tokens=9)
    for extra in ([], ["--stream"]):
        done = command(triton_server, protocol, "generate", PROMPTS[0], "--max-tokens", "9", *extra)
        assert (done.returncode, done.stdout, done.stderr) == (0, wanted.text + "\n", "")
    done = command(triton_server, protocol, "generate", PROMPTS[0], "--max-tokens", "9", "--json")
    assert json.loads(done.stdout)["token_ids"] == wanted.token_ids
    done = command(triton_server, protocol, "sequence", PROMPTS[0], "--max-tokens", "9")
    assert done.returncode == 0 and wanted.text in done.stdout
    assert f"accepted {wanted.num_accepted_draft_tokens} of {wanted.num_draft_tokens} draft tokens" in done.stdout
    done = command(triton_server, protocol, "sequence", PROMPTS[0], "--max-tokens", "9", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["text"] == wanted.text
    done = command(triton_server, protocol, "health")
    assert (done.returncode, done.stdout) == (0, "ready\n")


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["generate", "a", "--temperature", "-1"], 2, "temperature: got -1.0; allowed"),
        (["generate", ""], 2, "text_input: got ''"),
        (["generate", "a", "--max-tokens", "many"], 2, "invalid int value"),
        (["generate", "a", "--model", "none"], 1, "unknown model"),
        (["sequence", ""], 2, "a prompt on a START"),
        (["health", "--model", "none"], 1, ""),
        ([], 2, "usage"),
    ],
)
def test_command_errors(triton_server, arguments, code, message):
    done = command(triton_server, "grpc", *arguments)
    assert done.returncode == code and message in done.stderr
    assert "Traceback" not in done.stderr


def test_reader_that_leaves(triton_server):
    """`mtp-client … | head` ends without a traceback."""
    command = [COMMANDS / "mtp-client", "generate", PROMPTS[0], "--stream", "--json", "--url", triton_server.grpc_url]
    with subprocess.Popen([*command, "--max-tokens", "64"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 1
