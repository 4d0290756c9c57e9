"""When a recurring request is due next."""

from __future__ import annotations

import time
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.resources import files
from itertools import islice, pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import orjson
import pytest
from cronsim import CronSim, CronSimError
from hypothesis import given
from hypothesis import strategies as st

from blackbox.formats import Options, make_format
from blackbox.records.entry import Entry
from blackbox.records.recurrence import LOOKS_AHEAD_YEARS, cron, every, next_ms, next_request_value
from blackbox.records.request import Invalid, Record, Request

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


def test_a_time_that_daylight_saving_skips_is_due_right_after_it() -> None:
    assert times(cron("30 2 * * *", "Europe/Berlin", NOW_MS), "2027-03-27T02:30", 3) == [
        "2027-03-27T02:30:00+01:00",
        "2027-03-28T03:00:00+02:00",
        "2027-03-29T02:30:00+02:00",
    ]


def test_a_time_that_daylight_saving_repeats_is_due_once() -> None:
    assert times(cron("30 2 * * *", "Europe/Berlin", NOW_MS), "2027-10-30T02:30", 3) == [
        "2027-10-30T02:30:00+02:00",
        "2027-10-31T02:30:00+02:00",
        "2027-11-01T02:30:00+01:00",
    ]


def test_times_with_an_asterisk_are_left_out_when_daylight_saving_skips_them() -> None:
    assert times(cron("*/30 2 * * *", "Europe/Berlin", NOW_MS), "2027-03-27T02:30", 2) == [
        "2027-03-27T02:30:00+01:00",
        "2027-03-29T02:00:00+02:00",
    ]


def test_times_with_an_asterisk_are_due_twice_when_daylight_saving_repeats_them() -> None:
    assert times(cron("*/30 2 * * *", "Europe/Berlin", NOW_MS), "2027-10-31T02:00", 5) == [
        "2027-10-31T02:00:00+02:00",
        "2027-10-31T02:30:00+02:00",
        "2027-10-31T02:00:00+01:00",
        "2027-10-31T02:30:00+01:00",
        "2027-11-01T02:00:00+01:00",
    ]


def test_an_hourly_time_is_also_due_in_the_repeated_hour() -> None:
    found = times(cron("15 * * * *", "Europe/Berlin", NOW_MS), "2027-10-31T01:15", 5)
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
def test_every_keeps_its_grid_and_skips_missed_times(
    step_s: int, due_ms: int, late_ms: int
) -> None:
    now_ms = due_ms + late_ms
    found = next_ms(every(step_s, 10**6), due_ms, now_ms)
    assert (found - due_ms) % (step_s * 1000) == 0
    assert found > max(due_ms, now_ms)
    assert found - max(due_ms, now_ms) <= step_s * 1000


@given(st.integers(0, 4 * 10**12), st.integers(0, 10**10))
def test_the_next_cron_time_is_always_in_the_future(due_ms: int, late_ms: int) -> None:
    recurs = cron("*/20 * * * *", "America/New_York", NOW_MS)
    found = next_ms(recurs, due_ms, due_ms + late_ms)
    assert found > due_ms + late_ms - 1000
    assert datetime.fromtimestamp(found / 1000, UTC).minute % 20 == 0


@pytest.mark.parametrize(
    "entry",
    [
        Entry("orders", b"hi", NOW_MS, caller_id="a", recurs=every(1.5, 10)),
        Entry("orders", b"\xff", NOW_MS, b"\xfe", caller_id="a", recurs=every("PT1H", 10**6)),
        Entry("orders", None, NOW_MS, b"k", caller_id="a", recurs=cron("0 8 * * *", None, NOW_MS)),
        Entry(
            "orders", b"hi", NOW_MS, None, [("x", b"1")], "shop", "a", NOW_MS + 2500,
            cron("0 8 * * MON-FRI", "Europe/Berlin", NOW_MS),
        ),
    ],
)  # fmt: skip
def test_the_request_for_the_next_time_is_the_same_but_for_its_time(entry: Entry) -> None:
    format = make_format(
        "countdown", Options(max_countdown_s=10**8, own_topics=lambda topic: False, topic="TB")
    )
    headers = [(name, value) for name, value in entry.headers if not isinstance(value, str)]
    callers = [("CALLER_SERVICE", b"shop")] if entry.caller else []
    value = next_request_value(entry, NOW_MS + 10)
    asked = format.parse(Record(9, NOW_MS + 20, None, value, callers + headers), NOW_MS + 30)
    assert isinstance(asked, Request), asked
    due_ms = next_ms(entry.recurs or "", NOW_MS, NOW_MS + 10)
    late_ms = None if entry.expires_ms is None else due_ms + 2500
    assert asked == Request(
        entry.target, entry.message, due_ms, entry.key, callers + headers, entry.caller, "a",
        late_ms, entry.recurs,
    )  # fmt: skip
    assert orjson.loads(value)["at"] == due_ms


def fields(low: int, high: int, *others: str) -> st.SearchStrategy[str]:
    """The values of a cron field: numbers, ranges, steps, and values that only this field may have."""
    numbers = st.integers(low, high).map(str)
    ranges = st.tuples(st.integers(low, high), st.integers(low, high)).map(
        lambda ends: f"{min(ends)}-{max(ends)}"
    )
    steps = st.integers(1, high).map("*/{}".format)
    special = [st.sampled_from(others)] if others else []
    terms = st.one_of(numbers, ranges, steps, *special)
    return st.one_of(st.just("*"), st.lists(terms, min_size=1, max_size=3).map(",".join))


NTH = [f"{weekday}{which}" for weekday in range(8) for which in ("#1", "#4", "#5", "L")]


@given(
    fields(0, 59), fields(0, 23), fields(1, 31, "L", "LW"), fields(1, 12), fields(0, 7, *NTH),
    st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe"]),
    st.integers(0, 2_000_000_000),
)  # fmt: skip
def test_cron_times_are_those_of_cronsim(
    minute: str, hour: str, day: str, month: str, weekday: str, zone: str, after_s: int
) -> None:
    expression = " ".join([minute, hour, day, month, weekday])
    began = datetime.fromtimestamp(after_s, ZoneInfo(zone))
    wanted: list[int] = []
    try:
        matches = (int(at.timestamp()) for at in CronSim(expression, began))
        wanted.extend(islice((at for at in matches if at > after_s), 3))
    except CronSimError:
        pass
    now_ms = after_s * 1000
    for at_s in wanted:
        if datetime.fromtimestamp(at_s, ZoneInfo(zone)).year > began.year + LOOKS_AHEAD_YEARS:
            break
        now_ms = next_ms(cron(expression, zone, now_ms), now_ms, now_ms)
        assert now_ms == at_s * 1000
    if not wanted:
        with pytest.raises(ValueError, match="cron expression of five fields"):
            cron(expression, zone, now_ms)


@pytest.mark.parametrize(
    "days",
    [
        "*/27 * 1#5",
        "31 2,4,6,9,11 *",
        "LW * */9",
        "*/28 2 0#5",  # on the 29th of February 2032, then in 28 years
    ],
)
def test_fields_that_never_match_are_refused_at_once(days: str) -> None:
    began_s, after_ms = time.process_time(), ms("2032-03-01T00:00")
    for minute in range(60):
        for hour in range(4):
            with pytest.raises(ValueError, match=r"within 10 years|Bad day-of-month"):
                cron(f"{minute} {hour} {days}", None, after_ms)
    assert time.process_time() - began_s < 1.0


def test_an_hour_that_daylight_saving_always_skips_is_refused() -> None:
    with pytest.raises(ValueError, match="within 10 years"):
        cron("*/59 2 * 3 7L", "Europe/Berlin", NOW_MS)


def test_the_29th_of_february_is_found_across_a_century_without_one() -> None:
    before_ms = ms("2096-03-01T00:00")
    found_ms = next_ms(cron("0 0 29 2 *", "Europe/Berlin", before_ms), before_ms, before_ms)
    assert found_ms == ms("2104-02-29T00:00")


def test_a_long_cron_expression_or_timezone_is_refused_before_it_is_parsed() -> None:
    longest = ",".join(["0"] * 96) + " 8 * * *"
    assert len(longest) == 199
    cron(longest, None, NOW_MS)
    with pytest.raises(ValueError, match="201 characters; give at most 200"):
        cron("0," + longest, None, NOW_MS)
    for zone in ("a" * 900_000, "/".join("a" * 5_000)):
        with pytest.raises(ValueError, match="timezone: give a name"):
            cron("0 8 * * *", zone, NOW_MS)


@pytest.fixture
def host_zones(tmp_path: Path) -> Iterator[None]:
    """A host whose time zone database has more than that of IANA, as Debian's has."""
    berlin = files("tzdata").joinpath("zoneinfo", "Europe", "Berlin").read_bytes()
    for name in HOSTS_OWN:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(berlin)
    zoneinfo.reset_tzpath([tmp_path])
    ZoneInfo.clear_cache()
    yield
    zoneinfo.reset_tzpath()
    ZoneInfo.clear_cache()


HOSTS_OWN = (
    "localtime",
    "posixrules",
    "right/Europe/Berlin",
    "posix/Europe/Berlin",
    "europe/berlin",
)


@pytest.mark.parametrize("zone", HOSTS_OWN)
@pytest.mark.usefixtures("host_zones")
def test_a_timezone_that_depends_on_the_host_is_refused(zone: str) -> None:
    assert ZoneInfo(zone).key == zone
    with pytest.raises(
        ValueError, match=r"timezone: give a name of the IANA .* depend on the host"
    ):
        cron("0 8 * * *", zone, NOW_MS)


@pytest.mark.parametrize("zone", ["UTC", "US/Pacific", "Etc/GMT+5", "America/Argentina/Ushuaia"])
def test_a_timezone_of_the_iana_database_is_accepted(zone: str) -> None:
    assert cron("0 8 * * *", zone, NOW_MS) == f"cron {zone} 0 8 * * *"


def test_a_cron_whose_times_are_too_far_apart_is_refused_though_its_first_time_is_near() -> None:
    """The request for its second time would be refused, and the recurrence would end."""
    january_ms = ms("2028-01-15T00:00")
    format = make_format(
        "countdown", Options(400 * 86_400, own_topics=lambda topic: False, topic="TB")
    )
    for days, is_taken in (("29 2 *", False), ("28 2 *", True)):
        asked = {"topic": "orders", "message": "m", "id": "a", "cron": f"0 0 {days}"}
        read = format.parse(Record(0, january_ms, None, orjson.dumps(asked), []), january_ms)
        assert isinstance(read, Request if is_taken else Invalid), read


def test_the_last_time_that_is_near_enough_is_delivered_before_a_recurrence_ends() -> None:
    """From 1 May to 1 June it is a day longer than a request may wait: the request for May is one of blackbox's own."""
    format = make_format(
        "countdown", Options(30 * 86_400, own_topics=lambda topic: False, topic="TB")
    )
    april_ms = ms("2027-04-01T00:00")
    asked = {"topic": "orders", "message": "m", "id": "a", "cron": "0 0 1 * *"}
    value = orjson.dumps(asked | {"timezone": "Europe/Berlin", "at": ms("2027-05-01T00:00")})

    own = Record(9, april_ms, None, value, [("blackbox-follows", b"TB/0@7")])
    read = format.parse(own, april_ms)

    assert isinstance(read, Request), read
    assert isinstance(format.parse(Record(9, april_ms, None, value, []), april_ms), Invalid)
