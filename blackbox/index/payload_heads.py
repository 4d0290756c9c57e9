"""Reads of payloads without their messages: the line of JSON is at the start, and enough for most questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

HEAD_BYTES = 1024
LONG_HEAD_BYTES = 65_536
# The most that Redis stores in a string: such a payload is read whole.
WHOLE_BYTES = 512 << 20
# How much of a payload is read, and of how many payloads at once: 16 MB, if none has more than a megabyte.
_STEPS = ((HEAD_BYTES, 1000), (LONG_HEAD_BYTES, 250), (WHOLE_BYTES, 16))


def read_heads(
    names: Sequence[bytes],
    read: Callable[[Sequence[bytes], int], Sequence[bytes]],
    most_bytes: int = WHOLE_BYTES,
) -> Iterator[tuple[bytes, bytes]]:
    """The start of each of these payloads, with its whole line of JSON, as (name, start); in any order.

    `read` returns the first so many bytes of each payload, b"" of one that is missing. A line that is longer than
    `most_bytes` is cut. To be used one by one: the line has the headers, which can be as long as a message.
    """
    left = list(names)
    for length, together in _STEPS:
        longer: list[bytes] = []
        for first in range(0, len(left), together):
            chunk = left[first : first + together]
            for name, start in zip(chunk, read(chunk, length), strict=True):
                if len(start) == length < most_bytes and b"\n" not in start:
                    longer.append(name)
                else:
                    yield name, start
        left = longer
