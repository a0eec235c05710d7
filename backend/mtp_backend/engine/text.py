"""Output tokens as text, as far as it is certain."""

from __future__ import annotations

from collections import deque

from tokenizers import Tokenizer

# Decoding starts at least this many tokens before the new one, because a token's text can depend on the ones before it.
CONTEXT_TOKENS = 6
INCOMPLETE = "\ufffd"
MOST_WAITING = 64  # tokens: other sequences wait while they are decoded, some microseconds each
MAX_CHARACTER = 4  # bytes, and so tokens, of one character


class IncrementalText:
    """Decodes tokens one by one, finds stop strings, and tells how much of the text may be shown.

    A character whose bytes are not complete is held back, and so is an ending that may become a stop string. Bytes that
    are no character have no text: it never holds U+FFFD.

    Without stop strings tokens wait until the text is read: one after the other they are decoded faster than one a step.

    Args:
        tokenizer: the checkpoint's tokenizer.
        prompt_ids: the prompt, whose last tokens are the context of the first new one.
        stop: strings that end the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], stop: tuple[str, ...]) -> None:
        self._value = ""
        self._offsets: list[int] = []
        self._waiting: list[int] = []
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids, self._decoded = self._context_of(prompt_ids)
        # Where characters end. Decoding starts at one of them: from inside a character, a decoder with a token for each
        # byte makes nothing of all the bytes that follow.
        self._ends = deque([0])
        self._window = self._decode(self._ids[: self._decoded])  # text of the whole characters that decoding starts at
        self._taken = 0

    @property
    def value(self) -> str:
        """The whole text so far."""
        self._decode_waiting()
        return self._value

    @property
    def offsets(self) -> list[int]:
        """Where the text of each added token starts in `value`; a token that only completes a character has the same
        start as the one before it."""
        self._decode_waiting()
        return self._offsets

    def append(self, token: int, *, may_stop: bool = True) -> bool:
        """Adds one token; True if a stop string is now complete. The text then ends before it.

        With `may_stop` false no stop string is looked for in what the token adds.
        """
        if not self._stop:
            self._waiting.append(token)
            if len(self._waiting) == MOST_WAITING:
                self._decode_waiting()
            return False
        searched = len(self._value)
        self._add(token)
        return may_stop and len(self._value) > searched and self._cut_at_stop(searched)

    def take(self, final: bool) -> str:
        """The text that may be shown now and has not been taken yet; everything when the request is at its end."""
        text = self.value
        end = len(text) if final else len(text) - self._held_back()
        taken = text[self._taken : end]
        self._taken = max(self._taken, end)
        return taken

    def _decode_waiting(self) -> None:
        for token in self._waiting:
            self._add(token)
        self._waiting.clear()

    def _add(self, token: int) -> None:
        self._offsets.append(len(self._value))
        self._ids.append(token)
        text = self._decode(self._ids[self._ends[0] :])
        if text.endswith(INCOMPLETE) or len(text) <= len(self._window):
            return
        self._value += text[len(self._window) :].replace(INCOMPLETE, "")
        self._window, self._decoded = text, len(self._ids)
        self._ends.append(self._decoded)
        if self._decoded - self._ends[0] > 2 * CONTEXT_TOKENS:
            self._shorten_window()

    def _shorten_window(self) -> None:
        """Keeps the last tokens only: the cost of decoding does not grow with the text."""
        while self._ends[1] <= self._decoded - CONTEXT_TOKENS:
            self._ends.popleft()
        self._window = self._decode(self._ids[self._ends[0] :])

    def _context_of(self, prompt_ids: list[int]) -> tuple[list[int], int]:
        """The prompt's last tokens from where a character begins, and how many of them are whole characters.

        The output may complete the character that a prompt ends with.
        """
        for begun in range(MAX_CHARACTER):
            whole = prompt_ids[: len(prompt_ids) - begun]
            for count in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_CHARACTER):
                text = self._decode(whole[-count:])
                if not text.startswith(INCOMPLETE) and not text.endswith(INCOMPLETE):
                    last = prompt_ids[-count - begun :]
                    return last, len(last) - begun
        last = prompt_ids[-CONTEXT_TOKENS:]
        return last, len(last)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _cut_at_stop(self, searched: int) -> bool:
        """Cuts the text at the first stop string that ends after character `searched`."""
        found = []
        for stop in self._stop:
            at = self._value.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0:
                found.append(at)
        if found:
            self._value = self._value[: min(found)]
        return bool(found)

    def _held_back(self) -> int:
        """Length of the longest ending that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=0)
        for length in range(min(longest - 1, len(self._value)), 0, -1):
            if any(stop.startswith(self._value[-length:]) for stop in self._stop if len(stop) > length):
                return length
        return 0
