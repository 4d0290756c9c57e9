"""When a recurring request is due next."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blackbox.entry import Entry
from blackbox.formats import make_format
from blackbox.recurrence import asked_again, cron, every, next_ms
from blackbox.request import Record, Request

BERLIN = ZoneInfo("Europe/Berlin")
NOW_MS = 1_800_000_000_000


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp() * 1000)


def times(recurs: str, first: str, count: int) -> list[str]:
    """The first time and those after it, local."""
    found = [ms(first)]
    while len(found) < count:
        found.append(next_ms(recurs, found[-1], found[-1] + 1))
    return [datetime.fromtimestamp(at / 1000, BERLIN).isoformat() for at in found]


def test_what_a_change_of_the_clock_leaves_out_comes_right_after_it() -> None:
    assert times(cron("30 2 * * *", "Europe/Berlin"), "2027-03-27T02:30", 3) == [
        "2027-03-27T02:30:00+01:00",
        "2027-03-28T03:00:00+02:00",
        "2027-03-29T02:30:00+02:00",
    ]


def test_what_a_change_of_the_clock_repeats_comes_once() -> None:
    assert times(cron("30 2 * * *", "Europe/Berlin"), "2027-10-30T02:30", 3) == [
        "2027-10-30T02:30:00+02:00",
        "2027-10-31T02:30:00+02:00",
        "2027-11-01T02:30:00+01:00",
    ]


def test_what_comes_each_hour_comes_in_the_repeated_one_as_well() -> None:
    found = times(cron("15 * * * *", "Europe/Berlin"), "2027-10-31T01:15", 5)
    gaps = {
        datetime.fromisoformat(b) - datetime.fromisoformat(a) for a, b in pairwise(found)
    }  # fmt: skip
    assert {gap.total_seconds() for gap in gaps} == {3600}
    assert len({one[:16] for one in found}) == 4


@given(
    st.integers(1, 10**6),
    st.integers(0, 10**13),
    st.integers(-(10**10), 10**10),
)
def test_each_so_often_stays_on_its_grid_and_misses_once(
    step_s: int, due_ms: int, late_ms: int
) -> None:
    now_ms = due_ms + late_ms
    found = next_ms(every(step_s, 10**6), due_ms, now_ms)
    assert (found - due_ms) % (step_s * 1000) == 0
    assert found > max(due_ms, now_ms)
    assert found - max(due_ms, now_ms) <= step_s * 1000


@given(st.integers(0, 4 * 10**12), st.integers(0, 10**10))
def test_cron_is_always_ahead(due_ms: int, late_ms: int) -> None:
    recurs = cron("*/20 * * * *", "America/New_York")
    found = next_ms(recurs, due_ms, due_ms + late_ms)
    assert found > due_ms + late_ms - 1000
    assert datetime.fromtimestamp(found / 1000, UTC).minute % 20 == 0


@pytest.mark.parametrize(
    "entry",
    [
        Entry("orders", b"hi", NOW_MS, caller_id="a", recurs=every(1.5, 10)),
        Entry("orders", b"\xff", NOW_MS, b"\xfe", caller_id="a", recurs=every("PT1H", 10**6)),
        Entry("orders", None, NOW_MS, b"k", caller_id="a", recurs=cron("0 8 * * *", None)),
        Entry(
            "orders", b"hi", NOW_MS, None, [("x", b"1")], "shop", "a", NOW_MS + 2500,
            cron("0 8 * * MON-FRI", "Europe/Berlin"),
        ),
    ],
)  # fmt: skip
def test_the_request_for_the_next_time_is_the_same_but_for_its_time(entry: Entry) -> None:
    contract = make_format(
        "countdown", max_countdown_s=10**8, own_topics=lambda topic: False, topic="TB"
    )
    headers = [(name, value) for name, value in entry.headers if not isinstance(value, str)]
    callers = [("CALLER_SERVICE", b"shop")] if entry.caller else []
    value = asked_again(entry, NOW_MS + 10)
    asked = contract.parse(Record(9, NOW_MS + 20, None, value, callers + headers), NOW_MS + 30)
    assert isinstance(asked, Request), asked
    due_ms = next_ms(entry.recurs or "", NOW_MS, NOW_MS + 10)
    late_ms = None if entry.expires_ms is None else due_ms + 2500
    assert asked == Request(
        entry.target, entry.message, due_ms, entry.key, callers + headers, entry.caller, "a",
        late_ms, entry.recurs,
    )  # fmt: skip
    assert orjson.loads(value)["at"] == due_ms
