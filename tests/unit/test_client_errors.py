import httpx
import pytest
from mtp_client import errors
from mtp_client.errors import from_exception, make_error
from tritonclient.utils import InferenceServerException


@pytest.mark.parametrize(
    ("message", "code", "kind"),
    [
        ("top_p: value 2; allowed: (0, 1]", None, errors.InvalidArgument),
        ("top_p: value 2; allowed: (0, 1]", "INTERNAL", errors.InvalidArgument),
        ("bad", "INVALID_ARGUMENT", errors.InvalidArgument),
        ("bad", "400", errors.InvalidArgument),
        ("no", "NOT_FOUND", errors.NotFound),
        ("no", "404", errors.NotFound),
        ("Request for unknown model: 'x' is not found", "400", errors.NotFound),
        ("full", "UNAVAILABLE", errors.Unavailable),
        ("full", "503", errors.Unavailable),
        ("UNAVAILABLE: too many sequences", None, errors.Unavailable),
        ("Stub process 'main_0' is not healthy.", "400", errors.Unavailable),
        ("timeout of the corresponding sequence has been expired", "400", errors.DeadlineExceeded),
        ("DEADLINE_EXCEEDED: 5 s (timeout) have passed", None, errors.DeadlineExceeded),
        ("in ensemble 'speculative', DEADLINE_EXCEEDED: 5 s", "UNAVAILABLE", errors.DeadlineExceeded),
        ("[StatusCode.CANCELLED] Locally cancelled by application!", None, errors.Cancelled),
        ("late", "DEADLINE_EXCEEDED", errors.DeadlineExceeded),
        (
            "inference request for sequence 7 to model 'main' must specify the START flag on the first request "
            "of the sequence",
            "INVALID_ARGUMENT",
            errors.SequenceLost,
        ),
        ("in ensemble 'speculative', sequence lost: 7", "400", errors.SequenceLost),
        (
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
            "UNIMPLEMENTED",
            errors.InvalidArgument,
        ),
        ("UNAVAILABLE: engine restarted", "400", errors.Unavailable),
        ("boom", "500", errors.ServerError),
        ("boom", None, errors.ServerError),
        ("UNKNOWN_WORD: boom", None, errors.ServerError),
    ],
)
def test_message_and_code(message, code, kind):
    error = make_error(message, code)
    assert type(error) is kind
    assert str(error) == message


@pytest.mark.parametrize(
    ("exception", "kind"),
    [
        (InferenceServerException("x", "StatusCode.UNAVAILABLE"), errors.Unavailable),
        (InferenceServerException("x", "404"), errors.NotFound),
        (InferenceServerException("x"), errors.ServerError),
        (httpx.ReadTimeout("x"), errors.DeadlineExceeded),
        (httpx.ConnectTimeout("x"), errors.Unavailable),
        (httpx.ConnectError("x"), errors.Unavailable),
        (httpx.RemoteProtocolError("x"), errors.Unavailable),
        (httpx.DecodingError("x"), errors.ServerError),
    ],
)
def test_library_exceptions(exception, kind):
    assert type(from_exception(exception)) is kind


def test_translated_leaves_other_exceptions_alone():
    with pytest.raises(KeyError), errors.translated():
        raise KeyError("mine")
    with pytest.raises(errors.Unavailable) as caught, errors.translated():
        raise httpx.ConnectError("refused")
    assert isinstance(caught.value.__cause__, httpx.ConnectError)
