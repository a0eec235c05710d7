"""Server-sent events of /generate_stream."""

from __future__ import annotations


class EventDecoder:
    """Cuts a byte stream, split anywhere, into the payloads of its `data:` lines.

    Works on bytes and on "\\n" only: Triton writes generated text raw into the JSON, and a
    splitter of text lines would also cut at U+0085, U+2028 and U+2029.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by `data`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
