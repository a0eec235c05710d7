"""The engine process's loop, driven by messages on its socket."""

import itertools
import os
import threading

import pytest
import zmq
from mtp_backend.engine.tokenizer import encode
from mtp_backend.serving import messages
from mtp_backend.serving.engine_process import EngineProcess
from mtp_backend.serving.messages import Cancel, Failed, Generate, Generated, Hello, Step, Stepped

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
def engine(make_llm, deepseek):
    return make_llm(deepseek, 1).engine


@pytest.fixture
def role(engine):
    """A role of a process whose loop runs in a thread."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("inproc://engine")
    server = os.pidfd_open(os.getpid())
    process = EngineProcess(engine, socket, server, show_life=lambda: None)
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


@pytest.mark.parametrize("structured", [None, {}, "yes", {"regex": 1}, {"regex": "a", "ebnf": "b"}])
def test_what_is_no_grammar_is_refused_or_ignored(engine, role, structured):
    counter = itertools.count(1)
    params = {"structured_output": structured, "max_tokens": 2}
    role.send(Generate(next(counter), prompt(engine), params, False))
    answer = role.take()
    assert isinstance(answer, Generated if structured is None else Failed)
