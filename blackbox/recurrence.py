"""When a recurring request is due next, and how it asks for that.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from base64 import b64encode
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import orjson
from cronsim import CronSim, CronSimError
from pydantic import TypeAdapter, ValidationError

from blackbox.entry import Entry, HeaderValues
from blackbox.request import Headers

HEADER = "blackbox-follows"
"""The last header of a request that blackbox wrote for the next time; no delivered message has it."""
AGAIN = "blackbox-again"
"""The same of a request that was asked for again, as its topic is another now: of which record."""

_EVERY, _CRON = "every", "cron"
_DURATION = TypeAdapter(timedelta)


def every(given: object, longest_s: int) -> str:
    """Each so many seconds, or each ISO 8601 duration without months and years.

    Raises ValueError, with what is wanted, for anything else, for less than a second, and for more
    than `longest_s`.
    """
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


def cron(expression: object, zone: object) -> str:
    """Each time that the five fields of cron match in this time zone (None: UTC).

    Raises ValueError, with what is wanted, for anything else.
    """
    zone = "UTC" if zone is None else zone
    try:
        if type(zone) is not str:
            raise ZoneInfoNotFoundError
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError('timezone: give a name such as "Europe/Berlin"') from None
    if type(expression) is not str or len(expression.split()) != 5:
        raise ValueError('give the five fields of cron, such as "0 8 * * MON-FRI"')
    recurs = f"{_CRON} {zone} {' '.join(expression.split())}"
    next_ms(recurs, 0, 0)
    return recurs


def next_ms(recurs: str, due_ms: int, now_ms: int) -> int:
    """The first time after the one that was due, and after now: what was missed is missed once.

    By seconds on the grid that began with the first due time, so that nothing drifts. By cron in
    local time, as Debian's does it: what a change of the clock leaves out comes right after it,
    what it repeats comes once, unless it comes each hour. Raises ValueError for what `every` and
    `cron` did not make.
    """
    kind, _, rest = recurs.partition(" ")
    if kind == _EVERY:
        step_ms = int(rest)
        return due_ms + step_ms * max(1, (now_ms - due_ms) // step_ms + 1)
    zone, _, expression = rest.partition(" ")
    return _next_match(expression, zone, max(due_ms, now_ms) // 1000) * 1000


def marked(headers: HeaderValues, source: str) -> list[tuple[str, bytes | str | None]]:
    """The headers of the record that asks for the next time: of which record it is the successor."""
    return [*headers, (HEADER, source)]


def follows(headers: HeaderValues) -> bool:
    """Whether a record asks for the next time of what recurs."""
    return bool(headers) and headers[-1][0] == HEADER


def without_mark(headers: Headers) -> Headers:
    """The headers as the caller wrote them."""
    return headers[:-1] if headers and headers[-1][0] in (HEADER, AGAIN) else headers


def asked_again(entry: Entry, now_ms: int) -> bytes:
    """The value of the record that asks for the next time, in the format `countdown`."""
    return asked_at(entry, next_ms(entry.recurs or "", entry.due_ms, now_ms))


def asked_at(entry: Entry, at_ms: int) -> bytes:
    """The value of a record that asks for the same at this time, in the format `countdown`."""
    kind, _, rest = (entry.recurs or "").partition(" ")
    asked: dict[str, Any] = {"topic": entry.target, "at": at_ms}
    if entry.caller_id is not None:
        asked["id"] = entry.caller_id
    if kind == _EVERY:
        asked[_EVERY] = int(rest) / 1000
    elif kind == _CRON:
        asked["timezone"], _, asked[_CRON] = rest.partition(" ")
    asked |= _as_text("message", "encoding", entry.message)
    if entry.key is not None:
        asked |= _as_text("key", "key_encoding", entry.key)
    if entry.expires_ms is not None:
        asked["expires_after"] = (entry.expires_ms - entry.due_ms) / 1000
    return orjson.dumps(asked)


def _as_text(name: str, encoding: str, held: bytes | None) -> dict[str, str | None]:
    try:
        return {name: None if held is None else held.decode()}
    except UnicodeDecodeError:
        return {name: b64encode(held or b"").decode(), encoding: "base64"}


@lru_cache(maxsize=1024)
def _next_match(expression: str, zone: str, after_s: int) -> int:
    try:
        matches = CronSim(expression, datetime.fromtimestamp(after_s, ZoneInfo(zone)))
        return next(int(at.timestamp()) for at in matches if at.timestamp() > after_s)
    except (CronSimError, StopIteration) as error:
        why = str(error) or "it never comes"
        raise ValueError(f"{why}; give five fields of cron, such as 0 8 * * MON-FRI") from None
