"""Output tokens as text, as far as it is certain."""

from __future__ import annotations

from tokenizers import Tokenizer

# Decoding starts this many tokens before the new one, because a token's text can depend on the ones before it.
CONTEXT_TOKENS = 6
INCOMPLETE = "\ufffd"


class IncrementalText:
    """Decodes tokens one by one, finds stop strings, and tells how much of the text may be shown.

    A character whose bytes are not complete is held back, and so is an ending that may become a stop string.

    Args:
        tokenizer: the checkpoint's tokenizer.
        prompt_ids: the prompt, whose last tokens are the context of the first new one.
        stop: strings that end the text.

    Attributes:
        value: the whole text so far.
        offsets: where the text of each added token starts in `value`; a token that only completes a character has the
            same start as the one before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], stop: tuple[str, ...]) -> None:
        self.value = ""
        self.offsets: list[int] = []
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids = prompt_ids[-CONTEXT_TOKENS:]
        self._context = 0
        self._decoded = len(self._ids)
        self._taken = 0

    def append(self, token: int, *, may_stop: bool = True) -> bool:
        """Adds one token; True if a stop string is now complete. The text then ends before it.

        With `may_stop` false no stop string is looked for in what the token adds.
        """
        self.offsets.append(len(self.value))
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._decoded])
        after = self._decode(self._ids[self._context :])
        if after.endswith(INCOMPLETE) or len(after) <= len(before):
            return False
        searched = len(self.value)
        self.value += after[len(before) :]
        # Keep a window of the last tokens only: decoding cost does not grow with the text.
        self._context = max(0, self._decoded - CONTEXT_TOKENS + 1)
        self._decoded = len(self._ids)
        return may_stop and self._cut_at_stop(searched)

    def take(self, final: bool) -> str:
        """The text that may be shown now and has not been taken yet; everything when the request is at its end."""
        end = len(self.value) if final else len(self.value) - self._held_back()
        taken = self.value[self._taken : end]
        self._taken = max(self._taken, end)
        return taken

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _cut_at_stop(self, searched: int) -> bool:
        """Cuts the text at the first stop string that ends after character `searched`."""
        found = []
        for stop in self._stop:
            at = self.value.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0:
                found.append(at)
        if found:
            self.value = self.value[: min(found)]
        return bool(found)

    def _held_back(self) -> int:
        """Length of the longest ending that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=0)
        for length in range(min(longest - 1, len(self.value)), 0, -1):
            if any(stop.startswith(self.value[-length:]) for stop in self._stop if len(stop) > length):
                return length
        return 0
