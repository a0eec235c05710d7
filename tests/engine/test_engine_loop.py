"""What the engine process's loop does by itself: deadlines, failures, roles and servers that end."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import zmq
from mtp_backend.engine.tokenizer import encode
from mtp_backend.serving import engine_loop, messages
from mtp_backend.serving.engine_loop import EngineLoop
from mtp_backend.serving.messages import Asked, Bye, Failed, Generate, Generated, Hello, Step, Stepped
from test_engine_process import Role

TTL = 0.3
PLAIN = {"max_tokens": 4}


@pytest.fixture
def engine(make_llm, deepseek):
    return make_llm(deepseek, 0, sequence_ttl_seconds=TTL).engine


@pytest.fixture
def ids(engine):
    return encode(engine.tokenizer, "prompt", "Let there be")


@contextmanager
def child():
    """Another process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


class Loop:
    """A process's loop in a thread; `lives` is how often it has shown life."""

    def __init__(self, engine, server_pid):
        self.context, self.lives = zmq.Context(), 0
        self.socket, self.server = self.context.socket(zmq.ROUTER), os.pidfd_open(server_pid)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://engine")
        self.process = EngineLoop(engine, self.socket, self.server, self.show_life)
        self.thread = threading.Thread(target=self.process.run)
        self.thread.start()

    def show_life(self):
        self.lives += 1

    def role(self, name=b"role", pid=None):
        return Role(self.context, name, pid)

    def ended(self):
        self.thread.join(20)
        return not self.thread.is_alive()

    def close(self):
        self.process.stop()  # it looks once a second
        assert self.ended()
        os.close(self.server)
        self.context.destroy(linger=0)  # with all sockets


@contextmanager
def running(engine, server_pid=None):
    loop = Loop(engine, server_pid or os.getpid())
    try:
        yield loop
    finally:
        loop.close()


@pytest.fixture
def loop(engine):
    with running(engine) as loop:
        yield loop


@pytest.fixture
def stuck(engine, monkeypatch):
    """The engine's steps compute nothing until this event is set."""
    event, step = threading.Event(), engine.step
    monkeypatch.setattr(engine, "step", lambda: step() if event.wait(0.02) else [])
    yield event
    event.set()


def becomes(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_empty(engine):
    return not engine.has_work and engine.pool.num_free == engine.pool.num_blocks


def test_deadlines(loop, stuck, ids):
    role = loop.role()
    role.send(
        Generate(1, ids, PLAIN, True, timeout=0.1), Step(2, "a", True, False, ids, None, None, PLAIN, timeout=0.2)
    )
    for request in (1, 2):
        answer = role.take()
        assert isinstance(answer, Failed) and (answer.request, answer.code) == (request, "DEADLINE_EXCEEDED")


def test_the_engine_lets_answers_pass(engine, ids, monkeypatch):
    """As long as all of them take, which is measured once a second."""
    way, given = Mock(**{"sent.return_value": 1234.5}), []
    monkeypatch.setattr(engine_loop, "GivingWay", lambda clock: way)
    monkeypatch.setattr(engine, "give_way", given.append)
    with running(engine) as loop:
        role = loop.role()
        way.enter.assert_called_once_with(os.getpid())
        role.send(*(Generate(number, ids, PLAIN | {"ignore_eos": True}, True) for number in (1, 2)))
        for _ in range(2 * 4):
            assert isinstance(role.take(), Generated)
        assert becomes(lambda: way.measure.called)
    num_messages = [call.args[0] for call in way.sent.call_args_list]
    assert sum(num_messages) == 1 + 8 and 2 in num_messages  # the welcome, and both answers of a step
    assert given == [1234.5] * len(num_messages)
    assert way.stepped.call_count >= 4 and all(call.args[0] > 0 for call in way.stepped.call_args_list)


def test_a_role_that_ends_while_it_says_hello(loop, ids):
    """The others go on."""
    with child() as process:
        pass
    assert process.poll() is not None
    with loop.context.socket(zmq.DEALER) as gone:
        gone.setsockopt(zmq.IDENTITY, b"gonec")
        gone.connect("inproc://engine")
        gone.send(messages.encode([Hello(process.pid, False)]))
        role = loop.role()
        role.send(Generate(1, ids, {"max_tokens": 1}, True))
        assert isinstance(role.take(), Generated)


def test_an_answer_does_not_wait_for_the_step_behind_it(loop, engine, ids, monkeypatch):
    """A client asks for a step that ran ahead and is computed; the next one, which runs ahead then, takes long."""
    free, step = threading.Event(), engine.step
    free.set()
    monkeypatch.setattr(engine, "step", lambda: step() if free.wait(20) else [])
    role = loop.role()
    role.send(Step(1, "a", True, False, ids, None, None, {"ignore_eos": True}))
    role.send(Asked("a", role.take().epoch))
    role.send(Step(2, "a", False, False, None, None, 1, None))
    assert role.take().step == 1
    session = loop.process._sessions._sessions["a"]
    assert becomes(lambda: session.ahead is not None)
    free.clear()
    role.send(Step(3, "a", False, False, None, None, 2, None))
    try:
        assert role.take().step == 2 and not free.is_set()
    finally:
        free.set()
    role.send(Step(4, "a", False, True, None, None, 3, None))
    assert role.take().step == 3 and becomes(lambda: is_empty(engine))


def test_a_step_that_fails(loop, engine, ids, monkeypatch):
    """Ends what was running; the next request is answered."""
    step, failed = engine.step, []

    def fail_once():
        if not failed:
            failed.append(True)
            raise RuntimeError("broken")
        return step()

    monkeypatch.setattr(engine, "step", fail_once)
    role = loop.role()
    role.send(Generate(1, ids, PLAIN, False), Step(2, "a", True, False, ids, None, None, PLAIN))
    answers = [role.take(), role.take()]
    assert {answer.request for answer in answers} == {1, 2}
    assert all(isinstance(answer, Failed) and "a step of the engine failed" in answer.message for answer in answers)
    role.send(Generate(3, ids, PLAIN, False), Step(4, "a", False, False, None, None, None, None))
    answers = {answer.request: answer for answer in (role.take(), role.take())}
    assert isinstance(answers[3], Generated) and "sequence lost" in answers[4].message


def test_a_role_that_ends(loop, engine, stuck, ids):
    """What it waited for is given up; the others' requests go on."""
    role = loop.role()
    with child() as process:
        guest = loop.role(b"guest", process.pid)
        guest.send(Generate(1, ids, PLAIN, False), Step(1, "a", True, False, ids, None, None, PLAIN))
        assert becomes(lambda: engine.has_work)
        process.kill()
        assert becomes(lambda: is_empty(engine))
    role.send(Generate(1, ids, PLAIN, False))
    assert becomes(lambda: engine.has_work)
    stuck.set()
    assert isinstance(role.take(), Generated)


def test_a_silent_sequence_is_forgotten(loop, engine, ids):
    role = loop.role()
    role.send(Step(1, "a", True, False, ids, None, None, PLAIN))
    assert isinstance(role.take(), Stepped) and not is_empty(engine)
    assert becomes(lambda: is_empty(engine))
    role.send(Step(2, "a", False, False, None, None, None, None))
    assert "sequence lost" in role.take().message


def test_the_server_ends(engine, ids):
    """So do its roles, which may hang, and the loop."""
    with child() as server, child() as stub, running(engine, server.pid) as loop:
        loop.role(b"stub", stub.pid)
        server.kill()
        assert loop.ended() and stub.wait(20) == -9


def test_the_last_role_says_goodbye(loop):
    first, second = loop.role(b"first"), loop.role(b"second")
    first.send(Bye())
    assert becomes(lambda: loop.lives > 1) and loop.thread.is_alive()
    second.send(Bye())
    assert loop.ended()


def test_nobody_comes(engine, monkeypatch):
    monkeypatch.setattr(engine_loop, "ORPHAN_SECONDS", 0.1)
    with running(engine) as loop:
        assert loop.ended() and loop.lives > 1
