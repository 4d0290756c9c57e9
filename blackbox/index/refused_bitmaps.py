"""The key `refused`: which large requests were refused, and for which cause, as bitmaps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from blackbox.core.bits import SEGMENT, Bits
from blackbox.records.refusal_causes import CAUSES


def fields(offsets: Iterable[int], causes: Collection[str] = CAUSES) -> list[str]:
    """The fields that show whether these requests were refused for these causes."""
    segments = sorted({offset // SEGMENT for offset in offsets})
    return [f"{segment}:{cause}" for cause in causes for segment in segments]


def segment_of(field: bytes) -> int:
    return int(field.partition(b":")[0])


def by_cause(fields: Sequence[str], bitmaps: Sequence[bytes | None]) -> Mapping[str, Bits]:
    """The bitmaps in these fields, by cause."""
    found: dict[str, dict[int, bytes]] = {}
    for field, bitmap in zip(fields, bitmaps, strict=True):
        if bitmap:
            segment, _, cause = field.partition(":")
            found.setdefault(cause, {})[int(segment)] = bitmap
    return {cause: Bits(bitmaps) for cause, bitmaps in found.items()}


def causes_of(
    offsets: Iterable[int], fields: Sequence[str], bitmaps: Sequence[bytes | None]
) -> dict[int, str]:
    """The causes of those of these requests that were refused."""
    causes = by_cause(fields, bitmaps).items()
    return {offset: cause for offset in offsets for cause, bits in causes if offset in bits}
