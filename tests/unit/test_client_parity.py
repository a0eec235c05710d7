"""The blocking client and the one for asyncio have the same methods, with the same arguments and results."""

import inspect
import re

import pytest
from mtp_client import AsyncClient, AsyncSequence, Client, Sequence
from mtp_client.transports.grpc import AsyncGrpcTransport, GrpcTransport
from mtp_client.transports.http import AsyncHttpTransport, HttpTransport

PAIRS = [
    (Client, AsyncClient),
    (Sequence, AsyncSequence),
    (GrpcTransport, AsyncGrpcTransport),
    (HttpTransport, AsyncHttpTransport),
]
ids = [blocking.__name__ for blocking, _ in PAIRS]


def public(kind):
    """name → method or property, without the methods of the language."""
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


def blocking_form(annotation):
    """A result's annotation without what asyncio adds to it."""
    text = re.sub(r"\bAsync(\w+)", r"\1", str(annotation))
    return re.sub(r"Generator\[(\w+), None\]", r"Generator[\1, None, None]", text)


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS, ids=ids)
def test_methods(blocking, asynchronous):
    assert public(blocking).keys() == public(asynchronous).keys() and public(blocking)
    for name, method in public(blocking).items():
        other = public(asynchronous)[name]
        if isinstance(method, property):
            assert method is other  # of the common base
            continue
        one, two = inspect.signature(method), inspect.signature(other)
        assert [*one.parameters.values()] == [*two.parameters.values()], name
        assert blocking_form(two.return_annotation) == blocking_form(one.return_annotation), name
        assert inspect.iscoroutinefunction(other) or not re.match("Generation|Step|bool|None", two.return_annotation)
        assert method.__doc__ or not other.__doc__


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS, ids=ids)
def test_construction(blocking, asynchronous):
    one, two = inspect.signature(blocking), inspect.signature(asynchronous)
    assert [(p.name, p.kind, p.default) for p in one.parameters.values()] == [
        (p.name, p.kind, p.default) for p in two.parameters.values()
    ]


def test_context_managers():
    """Each ends with its block, and a sequence is an iterator."""
    for blocking, asynchronous in PAIRS[:2]:
        assert hasattr(blocking, "__enter__") and hasattr(blocking, "__exit__")
        assert hasattr(asynchronous, "__aenter__") and hasattr(asynchronous, "__aexit__")
    assert hasattr(Sequence, "__next__") and hasattr(AsyncSequence, "__anext__")


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS[:2], ids=ids[:2])
def test_documented_and_typed(blocking, asynchronous):
    for kind in (blocking, asynchronous):
        for name, method in public(kind).items():
            method = method.fget if isinstance(method, property) else method
            signature = inspect.signature(method)
            annotated = [p.annotation for n, p in signature.parameters.items() if n != "self"]
            assert inspect.Parameter.empty not in [*annotated, signature.return_annotation], name
