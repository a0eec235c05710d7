import msgspec
import pytest
from mtp_backend.sampling.logprobs import Logprob
from mtp_backend.serving import messages
from mtp_backend.serving.messages import (
    Bye,
    Cancel,
    Failed,
    Generate,
    Generated,
    Hello,
    Propose,
    Proposed,
    RequestTimes,
    Stats,
    Step,
    Stepped,
    Taken,
    Welcome,
)  # fmt: skip

TO_ENGINE = [
    Hello(5, True),
    Bye(),
    Generate(1, [1, 2], {"seed": 2**64 - 1, "stop": ["ä\x00"], "temperature": 0.5}, True),
    Step(2, 2**64 - 1, True, False, [1], None, None, {}),
    Step(3, "7", False, True, None, [], -1, None),
    Step(4, "7", True, False, [1], None, 0, {}, [5, 6]),
    Propose(4, 7, 1),
    Generate(6, [1], {}, False, -3, 0.25),
    Cancel(5),
    Taken(8),
]
FROM_ENGINE = [
    Welcome(4096),
    Generated(1, "text", [5], "", 3, 2, 1, 1, 2, 2, 1, [0]),
    Generated(
        1,
        "text",
        [5],
        "stop",
        3,
        0,
        1,
        1,
        2,
        2,
        0,
        [0],
        [{5: Logprob(-0.5, 1), 7: Logprob(-2.0, 2)}],
        -0.5,
        [None, {6: Logprob(-9.0, 12)}],
    ),
    Stepped(2, [5, 6], "x", 1, 9, "stop", 3, 4),
    Proposed(3, []),
    Stats(
        num_generated_tokens=9,
        num_prompt_tokens=20,
        num_cached_tokens=16,
        num_steps=4,
        num_step_sequences=5,
        num_step_tokens=11,
        num_spec_steps=3,
        num_draft_tokens=6,
        num_lossy_draft_tokens=1,
        accepted_per_pos=[3, 1],
        draft_seconds=0.25,
        verify_seconds=1.5,
        manage_seconds=0.125,
        num_running=1,
        num_waiting=2,
        num_paused=3,
        num_blocks_used=7,
        num_blocks=64,
        requests=[RequestTimes("stop", 0.5, 1.0, None, None, 2.5), RequestTimes("error")],
    ),
    Failed(4, "UNAVAILABLE", "later"),
]


def test_round_trip():
    assert messages.decode_to_engine(messages.encode(TO_ENGINE)) == TO_ENGINE
    assert messages.decode_from_engine(messages.encode(FROM_ENGINE)) == FROM_ENGINE


def test_id_keeps_its_type():
    ids = [7, "7", 2**64 - 1, "ä" * 64]
    sent = [Propose(0, one, 1) for one in ids]
    received = [message.sequence for message in messages.decode_to_engine(messages.encode(sent))]
    assert [(type(one), one) for one in received] == [(type(one), one) for one in ids]


def test_last_answers():
    """`final` tells the last answer of a request."""
    assert all(message.final for message in FROM_ENGINE if isinstance(message, (Stepped, Proposed, Failed)))
    for reason, final in (("", False), ("stop", True), ("length", True)):
        assert Generated(1, "", [], reason, 0, 0, 0, 0, 0, 0, 0, []).final is final


@pytest.mark.parametrize("frame", [b"", b"\xc1", messages.encode([FROM_ENGINE[0]]), messages.encode(TO_ENGINE)[:-1]])
def test_wrong_frames(frame):
    with pytest.raises(msgspec.DecodeError):
        messages.decode_to_engine(frame)
