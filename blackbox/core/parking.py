"""Where in an index stands what waits for its target: behind everything else, each target in a band of its own.

There it costs nothing however long it waits, and comes out in the order of its due times. Pure: no I/O.
"""

from __future__ import annotations

from zlib import crc32

from blackbox.records.entry import Entry

BAND_MS = 1 << 43
"""Of the scores of `due`: those below are times, up to the year 2248. Each band is as wide."""

LETTERS = ""
"""In the place of a target: what waits for the topic of dead letters, whatever that is called."""

BANDS = 1021
"""Scores are doubles, which hold whole numbers up to 1024 bands."""


def waits_for(entry: Entry) -> str:
    """The target that an entry is parked for, or LETTERS."""
    return entry.target if entry.reason is None else LETTERS


def band_of(target: str) -> int:
    """The same in every process. Targets that share one must not be parked together: only one would come out."""
    return 1 + crc32(target.encode()) % BANDS


def parked_at(band: int, due_ms: int) -> int:
    """The score of an entry in this band; due times before 1970 are all one."""
    return band * BAND_MS + max(0, due_ms)


def band_at(score_ms: int) -> int:
    """The band that a score is in; 0 for a time."""
    return score_ms // BAND_MS


def time_at(score_ms: int) -> int | None:
    """When an entry with this score will be looked at, epoch ms; None while it is parked."""
    return score_ms if score_ms < BAND_MS else None
