"""The meaning of the stored fields of an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import orjson

from blackbox.core.plan import Positions
from blackbox.records import entry as entries
from blackbox.records.entry import Entry
from blackbox.records.errors import ForeignIndex
from blackbox.records.receipt import Claim
from blackbox.records.request import Shard

FORMAT = b"10"
# Formats of earlier versions: such an index is emptied, and rebuilt from the journals.
OLDER = (b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9")


def positions_of(
    shard: Shard, state: Sequence[bytes | None], receipts: bytes | None
) -> Positions | None:
    """The positions, from (format, requests, …) and receipts as Redis has them; None if there are none.

    None also for an index of an earlier version, which counts as empty. Raises ForeignIndex for one
    of a later version.
    """
    version, requests, *_ = state
    if version == FORMAT and requests is not None and receipts is not None:
        return Positions(int(requests), int(receipts))
    if version not in (None, FORMAT, *OLDER):
        raise ForeignIndex(
            f"the index of {shard} in Redis has format {version.decode(errors='replace')!r}, but "
            f"this version reads {FORMAT.decode()}; run the version of blackbox that wrote it"
        )
    return None  # there is none, or it is being emptied between the two reads


def claims_of(stored: bytes | None) -> dict[int, Claim]:
    """The claims that the state lists as in doubt."""
    return {one[0]: Claim(*one) for one in orjson.loads(stored or b"[]")}


def stretch_of(stored: bytes | None) -> tuple[int, int] | None:
    """The first offset of a stretch, and the one behind it."""
    if stored is None:
        return None
    first, end = orjson.loads(stored)
    return first, end


def in_flight(named: Sequence[bytes] | Mapping[bytes, bytes]) -> Iterator[bytes]:
    """The members that owners marked as in flight, from the whole key, flat or as a mapping."""
    every = named.values() if isinstance(named, Mapping) else named[1::2]
    # A member has 16 digits.
    return (names[at : at + 16] for names in every for at in range(0, len(names), 16))


def as_entry(stored: bytes | None) -> Entry | None:
    """Decode an entry; None if it is gone or cannot be read: dispatch reads it again from Kafka."""
    try:
        return entries.decode(stored or b"")
    except ValueError:
        return None
