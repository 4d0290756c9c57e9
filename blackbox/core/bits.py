"""Sets of offsets as bitmaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

SEGMENT = 1 << 16
"""Requests per bitmap; a bitmap has at most 8 KiB."""


class Bits(Set[int]):
    """A set of offsets, as bitmaps of `SEGMENT` offsets each by segment number, in Redis' bit order."""

    def __init__(self, bitmaps: Mapping[int, bytes | bytearray] | None = None) -> None:
        self.bitmaps = dict(bitmaps or {})

    def __contains__(self, offset: object) -> bool:
        assert isinstance(offset, int)
        segment, bit = divmod(offset, SEGMENT)
        bitmap = self.bitmaps.get(segment, b"")
        return bit >> 3 < len(bitmap) and bool(bitmap[bit >> 3] & 0x80 >> (bit & 7))

    def __iter__(self) -> Iterator[int]:
        for segment, bitmap in sorted(self.bitmaps.items()):
            for at, byte in enumerate(bitmap):
                if byte:
                    first = segment * SEGMENT + 8 * at
                    yield from (first + bit for bit in range(8) if byte & 0x80 >> bit)

    def __len__(self) -> int:
        return sum(int.from_bytes(bitmap).bit_count() for bitmap in self.bitmaps.values())

    def changed(self, added: Iterable[int], removed: Iterable[int]) -> dict[int, bytes]:
        """The bitmaps that this change alters, in their new form; a bitmap without any bit is empty."""
        new: dict[int, bytearray] = {}
        for offsets, is_set in ((added, True), (removed, False)):
            for offset in offsets:
                segment, bit = divmod(offset, SEGMENT)
                if segment not in new:
                    new[segment] = bytearray(self.bitmaps.get(segment, b""))
                bitmap = new[segment]
                if len(bitmap) <= bit >> 3:
                    bitmap.extend(bytes((bit >> 3) + 1 - len(bitmap)))
                mask = 0x80 >> (bit & 7)
                bitmap[bit >> 3] = bitmap[bit >> 3] | mask if is_set else bitmap[bit >> 3] & ~mask
        return {segment: bytes(bitmap).rstrip(b"\0") for segment, bitmap in new.items()}
