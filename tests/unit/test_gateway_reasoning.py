"""Reasoning and content, however the text is cut into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_client.gateway.reasoning import ReasoningSplitter


def split(pieces, thinking):
    """(reasoning, content) of a text fed in pieces."""
    splitter = ReasoningSplitter(thinking)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("text", "thinking", "wanted"),
    [
        ("<think>why</think>so", False, ("why", "so")),
        ("\n<think>\nwhy\n</think>\n\nso", False, ("\nwhy\n", "\n\nso")),
        ("why</think>so", True, ("why", "so")),
        ("why", True, ("why", "")),  # the length limit came first
        ("why</thi", True, ("why</thi", "")),
        ("so", False, ("", "so")),
        ("  so", False, ("", "  so")),
        ("<thin air", False, ("", "<thin air")),
        ("<think", False, ("", "<think")),
        ("so <think>not</think> at the start", False, ("", "so <think>not</think> at the start")),
        ("<think></think>so", False, ("", "so")),
        ("</think>so", True, ("", "so")),
        ("<think>a<think>b</think>c</think>d", False, ("a<think>b", "c</think>d")),
        ("a<</think>b", True, ("a<", "b")),
        ("a</</think>b", True, ("a</", "b")),
        ("", False, ("", "")),
        ("", True, ("", "")),
        (" \n", False, ("", " \n")),
    ],
)
def test_split(text, thinking, wanted):
    assert split([text], thinking) == wanted
    assert split(list(text), thinking) == wanted
    for size in (2, 3, 5):
        assert split([text[at : at + size] for at in range(0, len(text), size)], thinking) == wanted


@settings(deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", "a", "\n", ""])),
    thinking=st.booleans(),
)
def test_pieces_do_not_matter(pieces, thinking):
    assert split(pieces, thinking) == split(["".join(pieces)], thinking)


def test_nothing_is_held_back_that_can_be_no_marker():
    splitter = ReasoningSplitter(True)
    assert [splitter.feed(piece) for piece in ("why <", "b</", "t", "x", "</think>", "so", "<")] == [
        ("why ", ""), ("<b", ""), ("", ""), ("</tx", ""), ("", ""), ("", "so"), ("", "<"),
    ]  # fmt: skip
