"""The common parts of all formats: refusals, allowed targets and ids, and how far ahead a request may be due."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from math import ceil
from pathlib import Path
from traceback import walk_tb
from typing import ClassVar

import orjson

from blackbox.records.recurrence import without_follows
from blackbox.records.request import (
    Cancel,
    Headers,
    Invalid,
    Reason,
    Record,
    Request,
    is_topic_name,
)

LONGEST_COUNTDOWN_S = 315_360_000
"""The largest BLACKBOX_MAX_COUNTDOWN_S: ten years."""

# Python code checks each of them, and Redis has a name and an encoding for each, even if it is empty.
MAX_HEADERS = 1000

MAX_ID_CHARS = 255
# Enough to notice a name that is too long: a character has four bytes at most.
MAX_NAME_BYTES = 4 * MAX_ID_CHARS + 4

CALLER_HEADER = "CALLER_SERVICE"
# Targets whose check is not repeated; callers choose the names, so there may be any number.
REMEMBERED = 4096
SHOWN_CHARS = 80

_RFC_3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:\.([0-9]{1,9}))?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)


class RefusedError(Exception):
    """The reason of a refusal: its word, and a detail that names the value and the remedy."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.invalid = Invalid(reason, detail)


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a deployment for the records of one request topic, `topic`.

    own_topics   -- whether a topic is blackbox's own and so cannot be a target; its answer for a
                    name that is allowed is remembered
    may_recur    -- whether a delivery and the request for the next one can be written together
    output_topic -- where messages go that name no target
    grace_s      -- how late a schedule may be to be delivered still; None: no limit
    """

    max_countdown_s: int
    own_topics: Callable[[str], bool]
    topic: str = ""
    may_recur: bool = True
    output_topic: str = ""
    grace_s: int | None = None


class Format(ABC):
    """One format. What cannot be understood becomes an Invalid, which says why."""

    is_written_by_blackbox: ClassVar[bool] = False
    """Whether blackbox can write a request again in this format, from what its index holds."""

    def __init__(self, options: Options) -> None:
        self._max_countdown_s = options.max_countdown_s
        self._own_topics = options.own_topics
        self._usual_targets: set[str] = set()

    @cached_property
    def of_accepted(self) -> Format:
        """The same format for requests that were accepted before: they may be due as far ahead as any."""
        # BLACKBOX_MAX_COUNTDOWN_S may have been lowered since
        unlimited = copy(self)
        unlimited._max_countdown_s = LONGEST_COUNTDOWN_S
        return unlimited

    def parse(self, record: Record, latest_ms: int) -> Request | Cancel | Invalid | None:
        """Read one record; never raises. A time in the past means at once.

        A timestamp that its writer set later than `latest_ms`, or none (negative), counts as
        `latest_ms`. None for a record that blackbox wrote itself, and that asks for nothing.
        """
        if len(record.headers) > MAX_HEADERS and (excess := _too_many(record)) is not None:
            return excess
        try:
            return self._read(record, latest_ms)
        except RefusedError as refused:
            return refused.invalid
        except MemoryError:  # not because of this record: it is read again
            raise
        except Exception as error:
            return parser_error(error)

    @abstractmethod
    def _read(self, record: Record, latest_ms: int) -> Request | Cancel | None:
        """Read one record. Raises RefusedError."""

    def _due_ms(self, at_ms: int, start_ms: int, given: str) -> int:
        """The due time, epoch ms, for an instant that `given` names: at once if it is past.

        Raises RefusedError if it is too far.
        """
        if at_ms - start_ms > self._max_countdown_s * 1000:
            raise self._too_far(given)
        return max(at_ms, start_ms)

    def _due_after_ms(self, seconds: object, start_ms: int, field: str) -> int:
        """The due time for the seconds in `field`: at once if negative. Raises RefusedError."""
        if type(seconds) is not int and type(seconds) is not float:
            detail = f"{field} is {shown(seconds)}; give a number of seconds such as 90 or 1.5"
            raise RefusedError(Reason.BAD_DUE_TIME, detail)
        # before the arithmetic, in which huge numbers overflow
        if seconds > self._max_countdown_s:
            raise self._too_far(f"{field} {shown(seconds)}")
        return start_ms + whole_ms(seconds) if seconds > 0 else start_ms

    def _too_far(self, given: str) -> RefusedError:
        limit = f"{self._max_countdown_s} s (BLACKBOX_MAX_COUNTDOWN_S) after the request"
        return RefusedError(Reason.TOO_FAR, f"{given} is later than {limit}; give an earlier time")

    def _target(self, topic: object, field: str = "topic") -> str:
        """Return the topic that `field` names. Raises RefusedError when no message may go there."""
        if isinstance(topic, str) and topic in self._usual_targets:
            return topic
        if not isinstance(topic, str) or not is_topic_name(topic):
            given = "missing" if topic is None else shown(topic)
            detail = (
                f"{field} is {given}; give 1 to 249 characters of A-Z a-z 0-9 . _ -, other than . "
                "and .."
            )
            raise RefusedError(Reason.BAD_TOPIC, detail)
        if topic.startswith("__") or self._own_topics(topic):
            detail = f"{field} {shown(topic)} belongs to Kafka or blackbox; use another topic"
            raise RefusedError(Reason.FORBIDDEN_TOPIC, detail)
        if len(self._usual_targets) < REMEMBERED:
            self._usual_targets.add(topic)
        return topic


def _too_many(record: Record) -> Invalid | None:
    """Why a request with so many headers is refused, unless it is allowed."""
    count = len(without_follows(record.headers))
    # without a value: it stores nothing, and may be a tombstone with the headers of a message
    if record.value is None or count <= MAX_HEADERS:
        return None
    detail = f"the record has {count} headers; give at most {MAX_HEADERS}"
    return Invalid(Reason.BAD_HEADERS, detail)


def parser_error(error: Exception) -> Invalid:
    """The refusal of a record at which the parser itself fails: else it would stop its shard for good."""
    frames = walk_tb(error.__traceback__)
    where = [f"{Path(frame.f_code.co_filename).name}:{line}" for frame, line in frames]
    detail = f"the parser failed: {type(error).__name__} at {where[-1]}; report it with the record"
    return Invalid(Reason.PARSER_ERROR, detail)


def shown(held: object) -> str:
    """A value for a detail: short, and without characters that could forge a log line."""
    if isinstance(held, dict | list):
        return "an object" if isinstance(held, dict) else "an array"
    if not isinstance(held, str | bytes):
        return orjson.dumps(held).decode()[:SHOWN_CHARS]
    text = repr(held[:SHOWN_CHARS])
    is_whole = len(held) <= SHOWN_CHARS and len(text) <= SHOWN_CHARS + 3
    return text if is_whole else text[:SHOWN_CHARS] + "…"


def start_ms(record: Record, latest_ms: int) -> int:
    """When a request was written: `latest_ms` if unknown, or if its writer set a later time."""
    # A later one of the broker holds: the local clocks are slow then, and a countdown that began
    # at their time would be early once they are set.
    is_known = record.has_broker_time or 0 <= record.timestamp_ms <= latest_ms
    return record.timestamp_ms if is_known else latest_ms


def whole_ms(seconds: float) -> int:
    """The first millisecond not before `seconds`; 1.1 s are 1100 ms, whatever 1.1 * 1000 is."""
    # the product may be off by one in either direction, as seconds are a float
    ms = ceil(seconds * 1000)
    if (ms - 1) / 1000 >= seconds:
        return ms - 1
    return ms if ms / 1000 >= seconds else ms + 1


def instant_ms(at: object, field: str) -> int:
    """An instant in epoch ms: RFC 3339 with an offset, rounded up, or whole ms. Raises RefusedError."""
    if type(at) is int:
        return at
    try:
        if type(at) is str and (parts := _RFC_3339.fullmatch(at)):
            second, fraction, offset = parts.groups(default="0")
            at_s = int(datetime.fromisoformat((second + offset).upper()).timestamp())
            # rounded up, so that nothing is early
            return at_s * 1000 + ceil(int(fraction.ljust(9, "0")) / 1_000_000)
        wrong = "neither RFC 3339 with an offset nor whole milliseconds"
    except ValueError as error:
        wrong = str(error)
    given = "missing" if at is None else f"{shown(at)}: {wrong}"
    example = 'give "2026-01-31T08:00:00+01:00" or 1769842800000'
    raise RefusedError(Reason.BAD_DUE_TIME, f"{field} is {given}; {example}")


def first_header(headers: Headers, wanted: str) -> bytes | None:
    """The value of the first header of this name; None if there is none, or if it has no value."""
    for name, held in headers:
        if name == wanted:
            return held
    return None


def header_text(headers: Headers, wanted: str) -> str | None:
    """The same as text; what is not UTF-8 is replaced, and so no topic name or instant."""
    held = first_header(headers, wanted)
    return None if held is None else held.decode(errors="replace")


def caller_of(headers: Headers) -> str | None:
    """The caller: the first header CALLER_SERVICE, if it can be a name."""
    return caller_name(first_header(headers, CALLER_HEADER))


def caller_name(held: bytes | None) -> str | None:
    """The name as text: 1 to 255 printable characters, UTF-8; None for anything else."""
    # names are shown to people and counted by, so none may be endless or pass for another
    try:
        name = (held or b"")[:MAX_NAME_BYTES].decode()
    except UnicodeDecodeError:
        return None
    return name if is_caller_id(name) else None


def caller_id_of(held: object, field: str = "id") -> str:
    """Return the id. Raises RefusedError for one that cannot be an id."""
    if is_caller_id(held):
        return str(held)
    detail = f"{field} is {shown(held)}; give 1 to {MAX_ID_CHARS} printable characters"
    raise RefusedError(Reason.BAD_ID, detail)


def is_caller_id(held: object) -> bool:
    return type(held) is str and 0 < len(held) <= MAX_ID_CHARS and held.isprintable()
