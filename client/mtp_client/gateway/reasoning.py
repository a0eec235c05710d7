"""Reasoning and answer in the text of a model that thinks first."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Splits a text, fed in pieces, at its markers: `<think>reasoning</think>content`.

    The text is reasoning from its start when the prompt ends with the opening marker, else when
    the text begins with it. Nothing is lost but the markers and white space before the first.
    """

    def __init__(self, thinking: bool) -> None:
        self._thinking = thinking  # in reasoning
        self._begun = thinking  # past where an opening marker may stand
        self._held = ""  # may become a marker

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that are certain now."""
        text, self._held = self._held + text, ""
        if not self._begun:
            begin = text.lstrip()
            if len(begin) < len(OPEN) and OPEN.startswith(begin):
                self._held = text
                return "", ""
            self._begun = True
            if begin.startswith(OPEN):
                self._thinking = True
                text = begin[len(OPEN) :]
        if not self._thinking:
            return "", text
        reasoning, marker, content = text.partition(CLOSE)
        if marker:
            self._thinking = False
            return reasoning, content
        held = next(n for n in range(len(CLOSE) - 1, -1, -1) if reasoning.endswith(CLOSE[:n]))
        self._held = reasoning[len(reasoning) - held :]
        return reasoning[: len(reasoning) - held], ""

    def finish(self) -> tuple[str, str]:
        """What is held back when the text ends."""
        held, self._held = self._held, ""
        return (held, "") if self._thinking else ("", held)
