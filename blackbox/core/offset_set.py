"""The requests that have ended, in memory while an index is rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blackbox.core.bits import SEGMENT, Bits

_BYTES = SEGMENT // 8
_BITS = tuple(0x80 >> bit for bit in range(8))


class OffsetSet:
    """A growing set of offsets, one bit for each, in Redis' bit order."""

    def __init__(self) -> None:
        self._segments: dict[int, bytearray] = {}

    def add(self, offsets: Iterable[int]) -> int:
        """Add offsets; return how many there were."""
        # a rebuild reads forty million of them, so there is no function call for each
        segments, count = self._segments, 0
        for offset in offsets:
            count += 1
            bits = segments.get(offset >> 16)
            if bits is None:
                bits = segments[offset >> 16] = bytearray(_BYTES)
            bits[offset >> 3 & 0x1FFF] |= _BITS[offset & 7]
        return count

    def forget_from(self, first: int) -> None:
        """Remove all offsets from `first` on."""
        segment, byte = first >> 16, first >> 3 & 0x1FFF
        for at in [at for at in self._segments if at > segment]:
            del self._segments[at]
        if bits := self._segments.get(segment):
            bits[byte] &= ~(0xFF >> (first & 7)) & 0xFF
            bits[byte + 1 :] = bytes(_BYTES - byte - 1)

    def __iter__(self) -> Iterator[int]:
        return iter(Bits(self._segments))

    def __contains__(self, offset: object) -> bool:
        assert isinstance(offset, int)
        bits = self._segments.get(offset >> 16)
        return bits is not None and bool(bits[offset >> 3 & 0x1FFF] & _BITS[offset & 7])

    def bits_from(self, first: int) -> dict[int, bytes]:
        """The bitmaps of the offsets from `first` on, by segment, without empty ones."""
        found = {at: bytes(bits) for at, bits in self._segments.items() if at >= first // SEGMENT}
        below = Bits({at: bits for at, bits in found.items() if at == first // SEGMENT})
        found |= below.changed((), [offset for offset in below if offset < first])
        return {at: stripped for at, bits in found.items() if (stripped := bits.rstrip(b"\0"))}
