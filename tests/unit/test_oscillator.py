from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blackbox.engine.oscillator import BATCH, seconds_to_write

seconds = st.integers(0, 1 << 33)
clocks_ms = st.lists(st.integers(0, 100_000_000), min_size=1, max_size=50)


def test_a_second_is_due_as_soon_as_it_starts() -> None:
    assert list(seconds_to_write(17, 17_999)) == []
    assert list(seconds_to_write(17, 18_000)) == [18]


def test_a_gap_is_filled_in_batches() -> None:
    assert seconds_to_write(0, 25_000_000) == range(1, BATCH + 1)
    assert seconds_to_write(2 * BATCH, 25_000_000) == range(2 * BATCH + 1, 25_001)


@given(seconds, seconds)
def test_only_seconds_between_the_last_one_and_now_are_due(last: int, now: int) -> None:
    due = seconds_to_write(last, now * 1000)
    assert all(last < second <= now for second in due)
    assert bool(due) == (now > last)


@given(clocks_ms)
def test_seconds_are_written_once_and_in_order_whatever_the_clock_does(clock_ms: list[int]) -> None:
    first = clock_ms[0] // 1000
    written = [first]
    for now_ms in clock_ms:
        while due := seconds_to_write(written[-1], now_ms):
            written += due
    assert written == list(range(first, max(clock_ms) // 1000 + 1))
