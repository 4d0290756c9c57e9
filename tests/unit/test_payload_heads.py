"""How many bytes of payloads are read at once."""

from __future__ import annotations

from collections.abc import Sequence

from blackbox.index.payload_heads import HEAD_BYTES, LONG_HEAD_BYTES, read_heads

MEGABYTE = b"h" * 1_000_000 + b"\n"


def test_thousands_of_long_heads_are_read_a_few_megabytes_at_once() -> None:
    sizes = list[int]()

    def read(names: Sequence[bytes], count: int) -> list[bytes]:
        found = [MEGABYTE[:count] for _ in names]
        sizes.append(sum(map(len, found)))
        return found

    names = [b"%d" % number for number in range(4000)]
    seen = [name for name, start in read_heads(names, read) if start == MEGABYTE]

    assert sorted(seen) == sorted(names)
    assert max(sizes) <= 17_000_000


def test_a_head_is_read_no_further_than_asked() -> None:
    payloads = {
        b"short": b"{}\nmessage",
        b"long": b"h" * HEAD_BYTES + b"\nmessage",
        b"longer": b"h" * LONG_HEAD_BYTES + b"\nmessage",
        b"none": b"",
    }

    def read(names: Sequence[bytes], count: int) -> list[bytes]:
        return [payloads[name][:count] for name in names]

    starts = dict(read_heads(list(payloads), read, LONG_HEAD_BYTES))

    assert starts == payloads | {b"longer": b"h" * LONG_HEAD_BYTES}
