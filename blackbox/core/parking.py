"""Where parked entries are in an index: after everything else, each target in a band of its own."""

from __future__ import annotations

from zlib import crc32

from blackbox.records.entry import Entry

# Width of a band of scores in `due`. Scores below it are times, up to the year 2248.
BAND_MS = 1 << 43

LETTERS = ""
"""In place of a target: the entry waits for the dead-letter topic, whatever its name."""

# Scores are doubles, which hold whole numbers exactly up to 1024 bands.
BANDS = 1021


def waits_for(entry: Entry) -> str:
    """The target that an entry is parked for, or LETTERS."""
    return entry.target if entry.reason is None else LETTERS


def band_of(target: str) -> int:
    """The band of a target. Targets that share one must not be parked together."""
    # crc32, not hash(): the same in every process
    return 1 + crc32(target.encode()) % BANDS


def parked_at(band: int, due_ms: int) -> int:
    """The score of an entry in this band; due times before 1970 all get the same one."""
    return band * BAND_MS + max(0, due_ms)


def band_at(score_ms: int) -> int:
    """The band that a score is in; 0 for a time."""
    return score_ms // BAND_MS


def time_at(score_ms: int) -> int | None:
    """When an entry with this score is looked at next, epoch ms; None while it is parked."""
    return score_ms if score_ms < BAND_MS else None
