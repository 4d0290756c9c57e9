"""When a recurring request is due next, and the record that asks for that."""

from __future__ import annotations

from base64 import b64encode
from calendar import monthrange
from datetime import date, datetime, time, timedelta
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import orjson
from cronsim import CronSim, CronSimError
from pydantic import TypeAdapter, ValidationError

from blackbox.records.entry import Entry, HeaderValues
from blackbox.records.request import Headers

HEADER = "blackbox-follows"
"""The last header of a request for the next time; delivered messages never have it."""
AGAIN = "blackbox-again"
"""The same for a request that `rebind` has written again; names the earlier record."""

ENDS_TOO_LARGE = (
    "the recurrence ends, because its next request, with message, key and headers, is too large for "
    "the request topic; send a smaller one"
)
"""The detail of what `last_request_value` makes."""

LONGEST_CRON_CHARS = 200

# As far as the largest BLACKBOX_MAX_COUNTDOWN_S goes; the configured one may be shorter.
LOOKS_AHEAD_YEARS = 10

_EVERY, _CRON = "every", "cron"
_DURATION = TypeAdapter(timedelta)


def every(given: object, longest_s: int) -> str:
    """Parse an interval in seconds, or as an ISO 8601 duration without months and years.

    Raises ValueError, with what is expected, for anything else, for less than a second, and for
    more than `longest_s`.
    """
    # without months and years, which vary in length
    if (
        type(given) is str
        and given.startswith("P")
        and not set("YM") & set(given.partition("T")[0])
    ):
        try:
            given = _DURATION.validate_python(given).total_seconds()
        except ValidationError:
            given = None
    if not isinstance(given, int | float) or type(given) is bool or not 1 <= given <= longest_s:
        raise ValueError(
            f'give seconds, 1 to {longest_s} (BLACKBOX_MAX_COUNTDOWN_S), or a duration such as "PT90S"'
        )
    return f"{_EVERY} {round(given * 1000)}"


def cron(expression: object, zone: object, after_ms: int) -> str:
    """Parse five fields of cron, which match in this time zone (None: UTC).

    Raises ValueError, with what is expected, for anything else, and if they do not match within
    `LOOKS_AHEAD_YEARS` of this instant.
    """
    zone = "UTC" if zone is None else zone
    try:
        if type(zone) is not str or zone not in _zone_names():
            raise ZoneInfoNotFoundError
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            'timezone: give a name of the IANA time zone database, such as "Europe/Berlin"; other '
            "names depend on the host"
        ) from None
    if type(expression) is str and len(expression) > LONGEST_CRON_CHARS:
        raise ValueError(f"{len(expression)} characters; give at most {LONGEST_CRON_CHARS}")
    if type(expression) is not str or len(expression.split()) != 5:
        raise ValueError('give a cron expression of five fields, such as "0 8 * * MON-FRI"')
    recurs = f"{_CRON} {zone} {' '.join(expression.split())}"
    next_ms(recurs, after_ms, after_ms)
    return recurs


@cache
def _zone_names() -> frozenset[str]:
    # Not what the host has: its zone `localtime` differs from that of the next host, `right/Europe/Berlin` counts
    # leap seconds and is missing in most images, and some file systems accept any case.
    return frozenset(files("tzdata").joinpath("zones").read_text().split())


def next_ms(recurs: str, due_ms: int, now_ms: int) -> int:
    """The first time after the one that was due, and after now: times that were missed are skipped.

    `cron` goes by local time, as Debian's does: a time that a clock change leaves out comes right
    after it, a time that it repeats comes once, unless it comes each hour. Raises ValueError for
    what `every` and `cron` did not make.
    """
    kind, _, rest = recurs.partition(" ")
    if kind == _EVERY:
        step_ms = int(rest)
        # on the grid that began with the first due time, so nothing drifts
        return due_ms + step_ms * max(1, (now_ms - due_ms) // step_ms + 1)
    zone, _, expression = rest.partition(" ")
    return _next_match(expression, zone, max(due_ms, now_ms) // 1000) * 1000


def next_request_headers(
    headers: HeaderValues, source: str
) -> list[tuple[str, bytes | str | None]]:
    return [*headers, (HEADER, source)]


def follows(headers: HeaderValues) -> bool:
    return bool(headers) and headers[-1][0] == HEADER


def without_follows(headers: Headers) -> Headers:
    """The headers as the caller wrote them."""
    return headers[:-1] if headers and headers[-1][0] in (HEADER, AGAIN) else headers


def next_request_value(entry: Entry, now_ms: int) -> bytes:
    """The value of the record that asks for the next time, in the format `countdown`."""
    return request_value_at(entry, next_ms(entry.recurs or "", entry.due_ms, now_ms))


def last_request_value(entry: Entry) -> bytes:
    """The value of the record that ends a recurrence: a request for the next time without a message."""
    return orjson.dumps({"topic": entry.target} | _terms(entry))


def request_value_at(entry: Entry, at_ms: int | None, now_ms: int = 0) -> bytes:
    """The value of a record that asks for the same request at this time, in the format `countdown`.

    None, of a recurring request: at the next time that its reader finds. It expires as long after its due
    time as the entry, or, if the entry was due before `now_ms`, when the entry does.
    """
    at = {} if at_ms is None else {"at": at_ms}
    asked = {"topic": entry.target} | at | _terms(entry)
    asked |= _as_text("message", "encoding", entry.message)
    if entry.key is not None:
        asked |= _as_text("key", "key_encoding", entry.key)
    if entry.expires_ms is not None:
        # relative, as the due time of this record is another
        since_ms = max(entry.due_ms, now_ms)
        asked["expires_after"] = max(0, entry.expires_ms - since_ms) / 1000
    return orjson.dumps(asked)


def _terms(entry: Entry) -> dict[str, Any]:
    kind, _, rest = (entry.recurs or "").partition(" ")
    asked: dict[str, Any] = {} if entry.caller_id is None else {"id": entry.caller_id}
    if kind == _EVERY:
        # anything else as it is: its reader refuses it
        asked[_EVERY] = int(rest) / 1000 if rest.isdecimal() else rest
    elif kind == _CRON:
        asked["timezone"], _, asked[_CRON] = rest.partition(" ")
    return asked


def _as_text(name: str, encoding: str, held: bytes | None) -> dict[str, str | None]:
    try:
        return {name: None if held is None else held.decode()}
    except UnicodeDecodeError:
        return {name: b64encode(held or b"").decode(), encoding: "base64"}


class _Cron(CronSim):
    """Searches by months, not from day to day, and gives up after `LOOKS_AHEAD_YEARS`."""

    # from day to day, fields that never match cost intake 20 ms

    def __init__(self, expression: str, after: datetime) -> None:
        super().__init__(expression, after)
        self._last_year = after.year + LOOKS_AHEAD_YEARS
        self._days_of: dict[tuple[int, int], int] = {}

    def advance_day(self) -> bool:
        """Go on to the first day that matches, or else to the next month; return whether it went on."""
        if self.dt.year > self._last_year:
            raise StopIteration
        today = self.dt.date()
        left = self._days_in(*monthrange(today.year, today.month)) >> today.day
        if left & 1:
            return False
        if left:
            lowest = (left & -left).bit_length() - 1
            day = today.replace(day=today.day + lowest)
        else:
            day = date(today.year + today.month // 12, today.month % 12 + 1, 1)
        self.dt = datetime.combine(day, time(), tzinfo=self.dt.tzinfo)
        return True

    def _days_in(self, first: int, length: int) -> int:
        """The days that match, as bits, in a month of this length that begins on the weekday `first`."""
        days = self._days_of.get((first, length))
        if days is None:
            by_date = by_weekday = 0
            for day in self.days:
                by_date |= _on_date(day, first, length)
            for weekday in self.weekdays:
                by_weekday |= _on_weekday(weekday, first, length)
            days = by_date & by_weekday if self.day_and else by_date | by_weekday
            self._days_of[first, length] = days
        return days


@cache
def _on_date(day: int, first: int, length: int) -> int:
    """The days that `13`, `L` or `LW` match, as CronSim has read it."""
    if day in (CronSim.LAST, CronSim.LAST_WEEKDAY):
        last_weekday = (first + length - 1) % 7
        return 1 << length - (max(0, last_weekday - 4) if day == CronSim.LAST_WEEKDAY else 0)
    return 1 << day if day <= length else 0


@cache
def _on_weekday(weekday: int | tuple[int, int], first: int, length: int) -> int:
    """The days that `WED`, `WED#2` or `WEDL` match, as CronSim has read it."""
    weekday, which = weekday if isinstance(weekday, tuple) else (weekday, None)
    days = range(1 + (weekday - 1 - first) % 7, length + 1, 7)
    if which is not None:
        days = days[-1:] if which == CronSim.LAST else days[which - 1 : which]
    return sum(1 << day for day in days)


def _next_match(expression: str, zone: str, after_s: int) -> int:
    try:
        found = _search(expression, zone, after_s)
    except CronSimError as error:
        why = str(error)
    else:
        if found is not None:
            return found
        why = f"it does not match within {LOOKS_AHEAD_YEARS} years"
    raise ValueError(f"{why}; give a cron expression of five fields, such as 0 8 * * MON-FRI")


@lru_cache(maxsize=1024)
def _search(expression: str, zone: str, after_s: int) -> int | None:
    matches = _Cron(expression, datetime.fromtimestamp(after_s, ZoneInfo(zone)))
    return next((int(at.timestamp()) for at in matches if at.timestamp() > after_s), None)
