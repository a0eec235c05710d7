"""The engine process's loop, driven by messages on its socket."""

import itertools
import os
import threading

import pytest
import zmq
from mtp_backend.engine.tokenizer import encode
from mtp_backend.serving import connections, messages
from mtp_backend.serving.engine_loop import EngineLoop
from mtp_backend.serving.messages import Cancel, Failed, Generate, Generated, Hello, Step, Stepped, Taken

GRAMMAR = {"structured_output": {"regex": "yes|no"}, "max_tokens": 8}
PLAIN = {"max_tokens": 4}


class Role:
    """A role's end of the socket."""

    def __init__(self, context, name=b"role", pid=None):
        self.commands, self.answers = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for socket, suffix in ((self.commands, b"c"), (self.answers, b"r")):
            socket.setsockopt(zmq.IDENTITY, name + suffix)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 30_000)
            socket.connect("inproc://engine")
        self.answers.send(messages.encode([Hello(pid or os.getpid(), False)]))
        self.unread = []
        self.take()  # Welcome

    def send(self, *requests):
        self.commands.send(messages.encode(list(requests)))

    def take(self):
        if not self.unread:
            self.unread = list(messages.decode_from_engine(self.answers.recv()))
        return self.unread.pop(0)


@pytest.fixture
def options():
    return {}


@pytest.fixture
def engine(make_llm, deepseek, options):
    return make_llm(deepseek, 1, **options).engine


@pytest.fixture
def role(engine):
    """A role of a process whose loop runs in a thread."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("inproc://engine")
    server = os.pidfd_open(os.getpid())
    process = EngineLoop(engine, socket, server, show_life=lambda: None)
    loop = threading.Thread(target=process.run)
    loop.start()
    role = Role(context)
    yield role
    process.stop()
    role.send(Cancel(0))  # wakes the loop
    loop.join(30)
    os.close(server)
    for end in (socket, role.commands, role.answers):
        end.close()
    context.term()
    assert not loop.is_alive()


@pytest.fixture
def compiling(engine, monkeypatch):
    """The compiler waits for this event; `compiling.started` tells that it does."""
    event, compile_grammar = threading.Event(), engine.compile_grammar
    event.started = threading.Event()

    def wait(wanted):
        event.started.set()
        assert event.wait(30)
        compile_grammar(wanted)

    # The process takes the method when it is made, so this fixture comes before `role`.
    monkeypatch.setattr(engine, "compile_grammar", wait)
    yield event
    event.set()


def prompt(engine):
    return encode(engine.tokenizer, "prompt", "Let there be")


def test_others_go_on_while_a_grammar_is_compiled(engine, compiling, role):
    ids = prompt(engine)
    role.send(Generate(1, ids, GRAMMAR, False))
    assert compiling.started.wait(30)
    role.send(
        Step(2, "a", True, False, ids, None, None, GRAMMAR),
        Generate(3, ids, PLAIN, False),
        Step(4, "b", True, True, ids, None, None, PLAIN),
    )
    first = {role.take().request for _ in range(2)}
    assert first == {3, 4}
    compiling.set()
    answers = {message.request: message for message in (role.take(), role.take())}
    assert isinstance(answers[1], Generated) and answers[1].text in ("yes", "no")
    assert isinstance(answers[2], Stepped)
    role.send(Step(5, "a", False, True, None, None, -1, None))
    assert role.take().request == 5


def test_a_wrong_grammar_is_refused(engine, role):
    wrong = {"structured_output": {"regex": "("}}
    role.send(Generate(1, prompt(engine), wrong, False))
    answer = role.take()
    assert isinstance(answer, Failed) and "structured_output.regex" in answer.message
    role.send(Step(2, "a", True, True, prompt(engine), None, None, PLAIN))
    role.take()
    # The END of a refused START ends the sequence that has its id.
    role.send(Step(3, "a", True, False, prompt(engine), None, None, PLAIN))
    role.take()
    role.send(Step(4, "a", True, True, prompt(engine), None, None, wrong))
    assert "structured_output.regex" in role.take().message
    role.send(Step(5, "a", False, False, None, None, None, None))
    assert "sequence lost" in role.take().message


def test_a_request_is_cancelled_while_its_grammar_is_compiled(engine, compiling, role):
    role.send(Generate(1, prompt(engine), GRAMMAR, False))
    assert compiling.started.wait(30)
    role.send(Generate(2, prompt(engine), GRAMMAR, False), Cancel(1), Cancel(2))
    for number in (1, 2):
        answer = role.take()
        assert (answer.request, answer.code) == (number, "CANCELLED")
    compiling.set()
    role.send(Generate(3, prompt(engine), GRAMMAR, False))
    assert role.take().request == 3


@pytest.mark.parametrize("options", [{"max_num_seqs": 2, "max_queue_size": 1}])
def test_not_too_many_wait_for_their_grammars(engine, compiling, role):
    ids = prompt(engine)
    role.send(Generate(1, ids, GRAMMAR, False))
    assert compiling.started.wait(30)
    role.send(Generate(2, ids, GRAMMAR, False), Step(3, "a", True, True, ids, None, None, GRAMMAR))
    role.send(Generate(4, ids, GRAMMAR, False), Step(5, "b", True, True, ids, None, None, GRAMMAR))
    refused = "3 requests are waiting for their grammars of at most 3 (max_num_seqs + max_queue_size); try again later"
    for number in (4, 5):
        answer = role.take()
        assert (answer.request, answer.code, answer.message) == (number, "UNAVAILABLE", refused)
    role.send(Generate(6, ids, PLAIN, False))  # the bound is not theirs
    assert isinstance(role.take(), Generated)
    role.send(Cancel(2), Generate(7, ids, GRAMMAR, False))
    assert role.take().code == "CANCELLED"
    compiling.set()
    answers = [role.take() for _ in range(3)]
    assert {answer.request for answer in answers} == {1, 3, 7}
    assert not [answer for answer in answers if isinstance(answer, Failed)]


def test_streams_wait_for_a_role_that_takes_nothing(engine, role, monkeypatch):
    """It gets so many frames, the Welcome among them, and then last answers alone, until it says what it has taken."""
    monkeypatch.setattr(connections, "MAX_UNTAKEN_FRAMES", 4)

    def stream(number):
        role.send(Generate(number, prompt(engine), {"max_tokens": 16, "ignore_eos": True}, True))
        answers = [role.take()]
        while not answers[-1].final:
            answers.append(role.take())
        return answers

    streams = [stream(1), stream(2)]
    role.send(Taken(1 + sum(map(len, streams))))
    streams.append(stream(3))
    assert list(map(len, streams)) == [3 + 1, 1, 4 + 1]
    texts = [[token for answer in answers for token in answer.token_ids] for answers in streams]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 16


@pytest.mark.parametrize("structured", [None, {}, "yes", {"regex": 1}, {"regex": "a", "ebnf": "b"}])
def test_what_is_no_grammar_is_refused_or_ignored(engine, role, structured):
    counter = itertools.count(1)
    params = {"structured_output": structured, "max_tokens": 2}
    role.send(Generate(next(counter), prompt(engine), params, False))
    answer = role.take()
    assert isinstance(answer, Generated if structured is None else Failed)
