"""Where parked entries are in an index: after everything else, each target in a band of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from zlib import crc32

from blackbox.records.entry import Entry
from blackbox.records.request import END_OF_TIMES_MS

# Width of a band of scores in `due`. Scores below it are times.
BAND_MS = END_OF_TIMES_MS

LETTERS = ""
"""In place of a target: the entry waits for the dead-letter topic, whatever its name."""

# Scores are doubles, which hold whole numbers exactly up to 1024 bands.
BANDS = 1021
# Of these, a target has one of so many: one is free, even with hundreds of parked targets in a shard.
CHOICES = 32


def waits_for(entry: Entry) -> str:
    """The target that an entry is parked for, or LETTERS."""
    return entry.target if entry.reason is None else LETTERS


def bands_of(target: str) -> Iterator[int]:
    """The bands that a target can have, the preferred one first."""
    # crc32, not hash(): the same in every process
    first = crc32(target.encode())
    return (1 + (first + step) % BANDS for step in range(CHOICES))


def band_for(target: str, parked: Mapping[int, str]) -> int | None:
    """The band to park a target in while these are parked for; None: others have all that it can have."""
    # where its earlier requests are, even if the preferred band is free again: they come out in one order
    own = (band for band in bands_of(target) if parked.get(band) == target)
    free = (band for band in bands_of(target) if band not in parked)
    return next(chain(own, free), None)


def parked_at(band: int, due_ms: int) -> int:
    """The score of an entry in this band; due times before 1970 all get the first one, later than all times the last."""
    # a record that is read again is due by the timestamp that its writer chose, which may be anything
    return band * BAND_MS + min(max(0, due_ms), BAND_MS - 1)


def span(band: int) -> tuple[int, str]:
    """The scores of a band, from its first to before the next band's first."""
    return parked_at(band, 0), f"({parked_at(band + 1, 0)}"


def band_at(score_ms: int) -> int:
    """The band that a score is in; 0 for a time."""
    return score_ms // BAND_MS


def time_at(score_ms: int) -> int | None:
    """When an entry with this score is looked at next, epoch ms; None while it is parked."""
    return score_ms if score_ms < BAND_MS else None
