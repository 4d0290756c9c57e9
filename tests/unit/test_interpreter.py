"""A process gives back what it needed only for a while."""

from __future__ import annotations

import psutil

from blackbox import interpreter

PIECE = 1000
PIECES = 100_000


def test_what_was_freed_below_something_that_is_kept_goes_back_to_the_system() -> None:
    process = psutil.Process()
    interpreter.give_memory_back()
    before = process.memory_info().rss
    taken = [bytes(PIECE) for _ in range(PIECES)]
    kept = taken[:: PIECES // 100]
    del taken
    interpreter.give_memory_back()
    assert process.memory_info().rss - before < PIECE * PIECES / 10
    assert len(kept) == 100
