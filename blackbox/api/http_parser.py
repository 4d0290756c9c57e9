"""h11's parser, with limits on input that is short to send and long to parse.

All connections share one thread: what one of them sends delays the answers to all others, also those
to probes. h11 limits only the size of what has not arrived completely.
"""

from __future__ import annotations

from typing import NamedTuple

import h11

# h11 has no public place for such limits. Trailers of a body cost as much as a head, and only the
# buffer sees both before they are parsed.
from h11._receivebuffer import ReceiveBuffer

MOST_HEAD_BYTES = 16 << 10
MOST_HEADER_LINES = 100

# A chunk costs as much as a kilobyte of a body. Clients that send each request of a bulk in a chunk
# of its own send larger ones.
FREE_CHUNKS = 100
LEAST_CHUNK_BYTES = 32  # on average


class Refusal(NamedTuple):
    """Why input was not parsed."""

    status: int
    text: str


TOO_LONG = Refusal(
    431,
    f"the head of the request has more than {MOST_HEAD_BYTES} bytes; send fewer or shorter headers",
)
TOO_MANY = Refusal(431, f"more than {MOST_HEADER_LINES} header lines; send fewer headers")
TOO_SMALL = Refusal(
    400,
    f"more than {FREE_CHUNKS} chunks of less than {LEAST_CHUNK_BYTES} bytes on average; "
    "send larger chunks, or a Content-Length",
)


class Parser(h11.Connection):
    """h11's parser of what a client sends; `refusal` says which limit the client has exceeded."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEAD_BYTES)
        # With another h11, this fails here instead of leaving the limits out.
        assert type(self._receive_buffer) is ReceiveBuffer
        self._receive_buffer = self._buffer = _LimitedBuffer()

    @property
    def refusal(self) -> Refusal | None:
        return self._buffer.refusal


class _LimitedBuffer(ReceiveBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.refusal: Refusal | None = None
        self._chunks = self._body_bytes = 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """A head, or the trailers of a chunked body."""
        if refusal := _refusal_of(self._data):
            self._refuse(refusal)
        self._chunks = self._body_bytes = 0
        return super().maybe_extract_lines()

    def maybe_extract_next_line(self) -> bytearray | None:
        """The head of a chunk."""
        line = super().maybe_extract_next_line()
        if line is not None:
            if self._chunks > FREE_CHUNKS and self._body_bytes < LEAST_CHUNK_BYTES * self._chunks:
                self._refuse(TOO_SMALL)
            self._chunks += 1
        return line

    def maybe_extract_at_most(self, count: int) -> bytearray | None:
        """A part of a body, or the end of a chunk."""
        part = super().maybe_extract_at_most(count)
        self._body_bytes += len(part or b"")
        return part

    def _refuse(self, refusal: Refusal) -> None:
        self.refusal = refusal
        raise h11.RemoteProtocolError(refusal.text, error_status_hint=refusal.status)


def _refusal_of(held: bytearray) -> Refusal | None:
    """Why the lines at the start of `held` are not parsed; a body or further requests may follow them."""
    most_lines = MOST_HEADER_LINES + 2  # the first line of a request, and the empty one
    # Cheap, since a client may send a head byte by byte.
    if len(held) <= MOST_HEAD_BYTES and held.count(b"\n") <= most_lines:
        return None
    start = 0
    for _ in range(most_lines):
        end = held.find(b"\n", start, MOST_HEAD_BYTES)
        if end < 0:
            return TOO_LONG if len(held) > MOST_HEAD_BYTES else None
        if not held[start:end].removesuffix(b"\r"):
            return None
        start = end + 1
    return TOO_MANY
