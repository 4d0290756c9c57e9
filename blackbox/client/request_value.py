"""Values of request records in the format `countdown`."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Any

import orjson


def request_value(
    topic: str,
    message: Any,
    *,
    countdown_s: float | None = None,
    at: datetime | str | int | None = None,
    id: str | None = None,
    key: str | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    expires_after_s: float | None = None,
    every_s: float | None = None,
    cron: str | None = None,
    timezone: str | None = None,
) -> bytes:
    """The value of a request that has `message` delivered to `topic`.

    `message`: str and bytes are delivered unchanged, None as a tombstone, anything else as JSON.
    `at`: an aware datetime, RFC 3339, or epoch ms. With `every_s` or `cron` it is delivered
    repeatedly. Raises ValueError unless exactly one of the two times is given (a recurring request
    may have neither), and for a number that is not finite.
    """
    recurs = every_s is not None or cron is not None
    if countdown_s is not None and at is not None:
        raise ValueError("both countdown_s and at are given; give one of them")
    if countdown_s is None and at is None and not recurs:
        raise ValueError("neither countdown_s nor at is given; give one of them")
    optional = {
        "countdown": countdown_s,
        "at": instant(at),
        "id": id,
        "headers": dict(headers) if headers else None,
        "expires_after": expires_after_s,
        "every": every_s,
        "cron": cron,
        "timezone": timezone,
    }
    value: dict[str, Any] = {"topic": topic, "message": message}
    if isinstance(message, bytes):
        value |= {"message": b64encode(message).decode(), "encoding": "base64"}
    if isinstance(key, bytes):
        value |= _key(key)
    elif key is not None:
        value["key"] = key
    value |= {name: v for name, v in optional.items() if v is not None}
    written = orjson.dumps(value)
    # orjson writes NaN and infinity as null, which would deliver another message, or a tombstone. Only a value
    # with a null is searched for them: in Python, a search takes much longer than writing.
    is_safe = b"null" not in written or _is_finite(value)
    found = None if is_safe else _not_finite(value)
    if found is not None:
        place, number = found
        raise ValueError(
            f"{place.removeprefix('.')} is {number}, which JSON cannot express; give a finite number"
        )
    return written


def cancel_value(id: str) -> bytes:
    return orjson.dumps({"id": id, "cancel": True})


def _is_finite(held: object) -> bool:
    """Whether JSON can express all numbers in it; False also for what only `_not_finite` can judge."""
    # By exact types and without places: less than half of the time of that search.
    kind = type(held)
    if kind is float:
        return math.isfinite(held)  # type: ignore[arg-type]
    if kind is dict:
        return all(map(_is_finite, held.values()))  # type: ignore[attr-defined]
    if kind is list or kind is tuple:
        return all(map(_is_finite, held))  # type: ignore[call-overload]
    return kind is str or kind is int or kind is bool or held is None


def _not_finite(held: object) -> tuple[str, float] | None:
    """The first number in what orjson writes that JSON cannot express, with its place."""
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(held, Enum):
        parts = [("", held.value)]
    elif isinstance(held, float):
        return None if math.isfinite(held) else ("", held)
    elif isinstance(held, dict):
        parts = ((f".{name}", one) for name, one in held.items())
    elif isinstance(held, list | tuple):
        parts = ((f"[{number}]", one) for number, one in enumerate(held))
    elif is_dataclass(held):
        names = vars(held) if hasattr(held, "__dict__") else [one.name for one in fields(held)]
        # orjson leaves out private attributes
        parts = ((f".{name}", getattr(held, name)) for name in names if name[0] != "_")
    for place, one in parts:
        found = _not_finite(one)
        if found is not None:
            return place + found[0], found[1]
    return None


def _key(key: bytes) -> dict[str, str]:
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key": b64encode(key).decode(), "key_encoding": "base64"}


def instant(at: datetime | str | int | None) -> str | int | None:
    """`at` as the format accepts it. Raises ValueError for a datetime without a time zone."""
    if not isinstance(at, datetime):
        return at
    if at.tzinfo is None:
        raise ValueError(f"{at.isoformat()} is without a time zone; give an aware datetime")
    return at.isoformat()
