"""Recurring requests, on real servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from confluent_kafka import Message

from tests.service.conftest import Serve
from tests.support.world import World, both_engines_at_length, until
from tests.support.year import DAY_MS, HOUR_MS, Year

pytestmark = pytest.mark.service

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture
def year(world: World) -> Iterator[Year]:
    year = Year(world, horizon_s=0)
    yield year
    year.forget()
    year.client.close()


def dues(messages: list[Message]) -> list[int]:
    """Their due times, in the order of delivery."""
    found = sorted(messages, key=lambda message: message.offset() or 0)
    return [int(dict(message.headers() or [])["blackbox-due-ms"] or 0) for message in found]


def fired(year: Year) -> list[str]:
    return [
        datetime.fromtimestamp(due_ms / 1000, BERLIN).isoformat()
        for due_ms in sorted(dues(year.messages()))
    ]


def at_ms(local: str) -> int:
    return int(datetime.fromisoformat(local).replace(tzinfo=BERLIN).timestamp() * 1000)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("2027-03-26T02:30", ["26T02:30:00+01:00", "27T02:30:00+01:00", "28T03:00:00+02:00", "29T02:30:00+02:00"]),
        ("2027-10-29T02:30", ["29T02:30:00+02:00", "30T02:30:00+02:00", "31T02:30:00+02:00", "01T02:30:00+01:00"]),
    ],
)  # fmt: skip
def test_cron_delivers_once_a_day_across_a_daylight_saving_change(
    year: Year, first: str, expected: list[str]
) -> None:
    began_ms = at_ms(first)
    year.ask("daily", began_ms, id="d", cron="30 2 * * *", timezone="Europe/Berlin")
    for step in range(-1, 4 * 4):
        year.pass_to(began_ms + step * 6 * HOUR_MS)
    assert [one[8:] for one in fired(year)] == expected


def test_cron_delivers_once_for_two_missed_hours_and_continues(year: Year) -> None:
    began_ms = at_ms("2027-05-01T10:00")
    year.ask("often", began_ms, id="o", cron="*/10 * * * *")
    for minute in (0, 10, 20):
        year.pass_to(began_ms + minute * 60_000)
    for minute in (145, 150, 155, 160):
        year.pass_to(began_ms + minute * 60_000)
    assert [one[11:16] for one in fired(year)] == [
        "10:00",
        "10:10",
        "10:20",
        "10:30",
        "12:30",
        "12:40",
    ]


@pytest.mark.proof
def test_a_series_continues_after_the_index_is_lost(year: Year) -> None:
    began_ms = at_ms("2027-05-01T10:00")
    year.ask("daily", began_ms, id="d", every="P1D")
    for day in range(4):
        year.forget()
        year.pass_to(began_ms + day * DAY_MS)
    year.cancel("d")
    for day in range(4, 8):
        year.forget()
        year.pass_to(began_ms + day * DAY_MS)
    assert sorted(dues(year.messages())) == [began_ms + day * DAY_MS for day in range(4)]


@both_engines_at_length
def test_every_delivers_on_its_grid_until_it_is_cancelled(world: World, serve: Serve) -> None:
    service = serve()
    asked = {"topic": world.targets[0], "message": "tick", "every": 1, "id": "ticks", "key": "k"}
    service.post("/requests", json=asked | {"headers": {"a": "b"}}).raise_for_status()
    came = until(
        "it is delivered three times", lambda: m if len(m := world.received()) >= 3 else None
    )
    first = dues(came)[0]
    assert dues(came) == [first + 1000 * n for n in range(len(came))]
    assert {(m.key(), m.value(), dict(m.headers() or [])["a"]) for m in came} == {
        (b"k", b"tick", b"b")
    }
    # too-late: the delivery that was due at that moment was made, and no other follows (docs/api.md)
    assert service.delete("/requests/ticks").json()["outcome"] in ("cancelled", "too-late")
    count = len(world.received())
    until("two seconds have passed", lambda: time.time() * 1000 > first + 1000 * (count + 2), 10)
    assert len(world.received()) == count
    assert service.get("/requests").json() == {"requests": []}


@pytest.mark.proof
def test_no_time_of_a_series_is_delivered_twice_although_its_owner_is_killed(world: World) -> None:
    now = datetime.now(BERLIN).replace(microsecond=0)
    for number in range(50):
        asked = {
            "topic": world.targets[0], "message": str(number), "id": f"r{number}", "every": 1,
            "at": (now - timedelta(seconds=10)).isoformat(),
        }  # fmt: skip
        world.send_raw(json.dumps(asked), key=b"k", partition=number % 4)
    world.flush()
    for _ in range(3):
        before = len(world.received())
        service = world.start_service().wait_ready()
        until("it delivers", lambda b=before: len(world.received()) > b + 100)  # type: ignore[misc]
        service.kill()
    world.start_service().wait_ready()
    before = len(world.received())
    until("it delivers again", lambda: len(world.received()) > before + 100)
    of_each: dict[bytes | None, list[int]] = {}
    for message in world.received(world.targets[0]):
        of_each.setdefault(message.value(), []).extend(dues([message]))
    assert len(of_each) == 50
    assert all(len(set(times)) == len(times) for times in of_each.values())
    assert len({due_ms % 1000 for times in of_each.values() for due_ms in times}) == 1
