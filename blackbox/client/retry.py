"""Write a message that could not be processed as a schedule, to have it delivered again later."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TypedDict, cast

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from blackbox.formats.scheduler import EPOCH, TARGET_KEY, TARGET_TOPIC
from blackbox.records.request import Headers, Shard, placed

ATTEMPT = "retry-attempt"
ORIGINAL_TIMESTAMP = "retry-original-timestamp"
SCHEDULE_ID = "scheduler-key"
_DELIVERY_HEADERS = ("scheduler-", "blackbox-")
_NUMBER = re.compile(rb"[0-9]{1,18}")


class Exhausted(Exception):
    """A message has used all its attempts; the text says which message and how many."""


class ScheduleRecord(TypedDict):
    """A record of the format `scheduler`, as the arguments of a producer's `produce`."""

    topic: str
    key: bytes
    value: bytes
    headers: list[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class Retry:
    """Has messages delivered again to the topic they came from, through the schedule topic `topic`.

    Attempt n (the first is n = 1) comes `shortest` * `factor`**n after the failure, and `longest` at
    most. Raises ValueError for invalid settings.

    producer.produce(**Retry("schedules").schedule(message))
    """

    topic: str
    attempts: int = 50
    shortest: timedelta = timedelta(seconds=5)
    longest: timedelta = timedelta(hours=1)
    factor: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; wanted: 1 or more")
        if not timedelta() < self.shortest <= self.longest:
            given = f"shortest is {self.shortest} and longest {self.longest}"
            raise ValueError(f"{given}; wanted: more than 0, and shortest not longer than longest")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor is {self.factor}; wanted: a finite number of at least 1")

    def delay(self, attempt: int) -> timedelta:
        """How long after the failure this attempt comes; the first attempt is 1."""
        try:
            longer_by: float = self.factor**attempt
        except OverflowError:
            return self.longest
        # Factors are compared, not delays: a timedelta of more than 999,999,999 days overflows.
        if longer_by >= self.longest / self.shortest:
            return self.longest
        return self.shortest * longer_by

    def schedule(self, message: Message, now_s: float | None = None) -> ScheduleRecord:
        """The schedule record for a message that failed at `now_s` (unix seconds; default: now).

        Raises Exhausted after the last attempt, and ValueError for a message without a value.
        """
        shard, offset = _place(message)
        value = message.value()
        # A schedule without a value is a tombstone: it would cancel the retry.
        if value is None:
            raise ValueError(f"{shard.source(offset)} has no value; a schedule needs one")
        headers = cast(Headers, message.headers() or [])
        attempt = (_number(headers, ATTEMPT) or 0) + 1
        if attempt > self.attempts:
            used_up = f"{shard.source(offset)} has used {attempt - 1} of {self.attempts} attempts"
            raise Exhausted(f"{used_up}; write it to your own dead-letter topic")
        now_s = time.time() if now_s is None else now_s
        # Schedules have whole seconds; rounded down, a retry would come before its delay.
        epoch_s = math.ceil(now_s + self.delay(attempt).total_seconds())
        # At a first attempt this header, if there is one, is that of another message.
        original_s = _number(headers, ORIGINAL_TIMESTAMP) if attempt > 1 else None
        if original_s is None:
            original_s = _written_s(message, now_s)
        terms: Headers = [
            (ATTEMPT, b"%d" % attempt),
            (ORIGINAL_TIMESTAMP, b"%d" % original_s),
            (EPOCH, b"%d" % epoch_s),
            (TARGET_TOPIC, shard.topic.encode()),
        ]
        key = message.key()
        if key is not None:
            terms.append((TARGET_KEY, key))
        # One id for all attempts, the place of the first delivery: a retry can be found by it.
        schedule_id = _kept_id(headers, shard, offset, key) if attempt > 1 else None
        return ScheduleRecord(
            topic=self.topic,
            key=schedule_id or shard.source(offset).encode(),
            value=value,
            headers=[*_own(headers), *terms],
        )


def _place(message: Message) -> tuple[Shard, int]:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    if message.error() is not None or topic is None or partition is None or offset is None:
        raise ValueError(
            f"not a message read by a consumer: {message.error() or 'it has no place'}"
        )
    return Shard(topic, partition), offset


def _own(headers: Headers) -> Headers:
    """The original message's headers."""
    return [
        (name, held)
        for name, held in headers
        if not name.startswith(_DELIVERY_HEADERS) and name not in (ATTEMPT, ORIGINAL_TIMESTAMP)
    ]


def _kept_id(headers: Headers, shard: Shard, offset: int, key: bytes | None) -> bytes | None:
    """The schedule id of the earlier attempts; None if the headers are forged, or those of another message."""
    # Two messages under one schedule id would replace each other, so a copied id is not kept.
    first = dict(reversed(headers))
    is_its_own = first.get(TARGET_TOPIC) == shard.topic.encode() and first.get(TARGET_KEY) == key
    kept = first.get(SCHEDULE_ID) if is_its_own else None
    # Clients with write access to the target must not choose a schedule of others: no retry has an id that is not
    # a place in its topic. The partition may be another, because partitioners differ.
    found = placed((kept or b"").decode(errors="replace"))
    if found is None:
        return None
    there, first_offset = found
    is_spelt_so = there.source(first_offset).encode() == kept
    is_earlier = there != shard or first_offset < offset
    return kept if is_spelt_so and there.topic == shard.topic and is_earlier else None


def _number(headers: Headers, wanted: str) -> int | None:
    """The number in the first non-empty header of this name; None when it is not a number."""
    held = next((held for name, held in headers if name == wanted and held), b"")
    return int(held) if _NUMBER.fullmatch(held) else None


def _written_s(message: Message, now_s: float) -> int:
    kind, at_ms = message.timestamp()
    return int(now_s) if kind == TIMESTAMP_NOT_AVAILABLE else at_ms // 1000
