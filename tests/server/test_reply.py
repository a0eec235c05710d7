"""Answers to Triton's requests, against a stand-in for Triton's Python interface."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from mtp_backend.errors import Cancelled, InvalidArgument


class Sender:
    """A response sender that, like Triton's, must not be used after the last response."""

    def __init__(self):
        self.responses = []
        self.asked = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    @property
    def closed(self):
        return bool(self.responses) and self.responses[-1][1] == 1

    def send(self, response, flags):
        assert not self.closed
        self.responses.append((response, flags))

    def is_cancelled(self):
        assert not self.closed
        self.asked.set()
        self.goes_on.wait(5)
        assert not self.closed
        return False


@pytest.fixture
def role(monkeypatch):
    """The module of the roles' base class."""
    utils = SimpleNamespace(
        Tensor=lambda name, array: (name, array.tolist()),
        InferenceResponse=lambda output_tensors=None, error=None: error or dict(output_tensors),
        TritonError=SimpleNamespace,
    )
    utils.TritonError = type(
        "TritonError",
        (),
        {
            "INVALID_ARG": 1,
            "CANCELLED": 2,
            "INTERNAL": 3,
            "__init__": lambda self, message, code: vars(self).update(message=message, code=code),
        },
    )
    for name in [
        name for name in sys.modules if name.startswith(("mtp_backend.serving.triton_io", "mtp_backend.serving.roles"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    from mtp_backend.serving.roles import draft

    yield draft
    for name in [
        name for name in sys.modules if name.startswith(("mtp_backend.serving.triton_io", "mtp_backend.serving.roles"))
    ]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def sender():
    return Sender()


@pytest.fixture
def reply(role, sender):
    return role.DraftReply(SimpleNamespace(get_response_sender=lambda: sender))


def test_answer(reply, sender):
    assert reply.is_cancelled() is False
    reply.answer(SimpleNamespace(draft_ids=[5, 6]))
    assert sender.responses == [({"next_draft_ids": [[5, 6]]}, 1)]


@pytest.mark.parametrize("end", ["answer", "fail"])
def test_nobody_asks_about_an_answered_request(reply, sender, end):
    """The server crashes otherwise: the request is gone there."""
    reply.answer(SimpleNamespace(draft_ids=[])) if end == "answer" else reply.fail(Cancelled("gone"))
    assert reply.is_cancelled() is False
    assert not sender.asked.is_set()


def test_last_answer_waits_for_the_question(reply, sender):
    sender.goes_on.clear()
    asking = threading.Thread(target=reply.is_cancelled)
    asking.start()
    assert sender.asked.wait(5)
    answering = threading.Thread(target=reply.answer, args=(SimpleNamespace(draft_ids=[]),))
    answering.start()
    answering.join(0.2)
    assert not sender.responses
    sender.goes_on.set()
    answering.join(5)
    asking.join(5)
    assert sender.closed


@pytest.mark.parametrize(
    "error, message",
    [(InvalidArgument("step", 5, "3"), "step: got 5; allowed: 3"), (Cancelled("gone"), "CANCELLED: gone")],
)
def test_error(reply, sender, error, message):
    reply.fail(error)
    [(response, flags)] = sender.responses
    assert (response.message, flags) == (message, 1)


class BrokenRole:
    """A decoupled role whose second request cannot be read."""

    decoupled = True

    def __init__(self, role):
        self.client = SimpleNamespace(submit=lambda submissions: setattr(self, "submitted", submissions))
        self._execute = role.Role.execute

    def execute(self, requests):
        self._execute(self, requests)

    def submission(self, request):
        if request.bad:
            raise request.bad
        return request


@pytest.mark.parametrize(
    "error, message",
    [
        (KeyError("x"), "KeyError: 'x'"),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
            "request: got b'\\xff'; allowed: UTF-8 in ids, names and parameters",
        ),
    ],
)
def test_unreadable_request(role, error, message):
    """Only that request fails: a batch that fails as a whole after a part of it was answered crashes the server."""
    senders = [Sender() for _ in range(3)]
    requests = [
        SimpleNamespace(
            bad=error if number == 1 else None,
            request_id=lambda: "r",
            get_response_sender=lambda number=number: senders[number],
        )
        for number in range(3)
    ]
    broken = BrokenRole(role)
    broken.execute(requests)
    assert broken.submitted == [requests[0], requests[2]]
    [(response, flags)] = senders[1].responses
    assert message in response.message and flags == 1


def test_batch_is_answered_at_once(role):
    """A role that is not decoupled returns an answer for every request of its batch, in order."""

    class Batched(BrokenRole):
        decoupled = False

        def submission(self, request):
            super().submission(request)
            return lambda number: number, role.DraftReply(request)

    broken = Batched(role)
    broken.client = SimpleNamespace(
        submit=lambda submissions: [r.answer(SimpleNamespace(draft_ids=[7])) for _, r in submissions]
    )
    first, second, third = broken._execute(
        broken, [SimpleNamespace(bad=KeyError("x") if number == 1 else None, request_id=str) for number in range(3)]
    )
    assert first == third == {"next_draft_ids": [[7]]}
    assert "KeyError: 'x'" in second.message


@pytest.mark.parametrize("request_id", ["", "r-1", "x" * 128, " ~"])
def test_request_id(role, request_id):
    role.triton_io.check_id(SimpleNamespace(request_id=lambda: request_id))


@pytest.mark.parametrize("request_id", ["x" * 129, "a\nb", "a\0", "ä", "\x1b[0m", "\x7f"])
def test_request_id_refused(role, request_id):
    with pytest.raises(InvalidArgument, match="id: got .*; allowed: at most 128 printable ASCII characters"):
        role.triton_io.check_id(SimpleNamespace(request_id=lambda: request_id))


def test_request_with_a_wrong_id(role):
    """It alone is refused, and never read."""
    senders = [Sender(), Sender()]
    requests = [
        SimpleNamespace(bad=False, request_id=lambda: "a\n", get_response_sender=lambda: senders[0]),
        SimpleNamespace(bad=False, request_id=lambda: "a", get_response_sender=lambda: senders[1]),
    ]
    broken = BrokenRole(role)
    broken.execute(requests)
    assert broken.submitted == requests[1:] and not senders[1].responses
    [(response, flags)] = senders[0].responses
    assert response.code == 1 and flags == 1


def test_lengths_are_looked_at_first(role, monkeypatch):
    io = role.triton_io
    with pytest.raises(InvalidArgument, match="p: got '262145 characters'; allowed: at most 262144 characters"):
        io.json_object("p", " " * 262_145)
    assert io.json_object("p", "{}" + " " * 262_142) == {}
    monkeypatch.setattr(io, "array", lambda request, name: np.arange(5))
    assert io.integers(None, "input_ids", 5) == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidArgument, match="input_ids: got '5 tokens'; allowed: at most 4 tokens"):
        io.integers(None, "input_ids", 4)
