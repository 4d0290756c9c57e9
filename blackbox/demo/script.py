"""The requests of the demo's three callers, and the expected outcome of each.

Pure: the same arguments give the same script. No two requests have the same value or message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

import orjson

from blackbox.records.request import Reason

SHARE_OF_SPECIAL = 1000
# When cancelled and replaced requests are due, as a share of the time: long after they have ended,
# so that neither a cancel nor a replacement is too late.
ENDED_DUE_SHARE = 0.75

Headers = tuple[tuple[str, bytes], ...]


class ExpectedOutcome(Enum):
    """The expected outcome of a record of the request topic."""

    DELIVERED = auto()
    CANCELLED = auto()
    REPLACED = auto()
    DEAD = auto()
    CANCEL = auto()


class ScriptedRecord(NamedTuple):
    """A record to write, and its expected result.

    `headers` are those of this record. `key` and `message` are those of the delivered record on
    `topic`, which has `more_headers` too.
    """

    caller: str
    value: bytes
    headers: Headers
    expected: ExpectedOutcome
    caller_id: str | None = None
    topic: str = ""
    key: bytes | None = None
    message: bytes = b""
    more_headers: Headers = ()
    countdown_ms: int = 0
    reason: Reason | None = None


class DemoCaller(NamedTuple):
    """A calling service: its name, its target topic, and how it composes a request."""

    name: str
    topic: str
    compose: Callable[[int], dict[str, Any]]


def _unpaid(number: int) -> dict[str, Any]:
    return {"message": {"order": number, "check": "is it paid?"}, "key": f"order-{number}"}


def _retry(number: int) -> dict[str, Any]:
    return {"message": f"charge invoice {number} again", "headers": {"attempt": "2"}}


def _push(number: int) -> dict[str, Any]:
    text = {"to": f"guest-{number}", "text": "Your table is ready at 19:00 ☕"}
    return {"message": text, "key": f"guest-{number}", "headers": {"channel": "push"}}


CALLERS = (
    DemoCaller("orders", "orders.unpaid", _unpaid),
    DemoCaller("billing", "billing.retry", _retry),
    DemoCaller("reminders", "reminders.push", _push),
)
TARGETS = tuple(caller.topic for caller in CALLERS)
# A typo, as callers make it: a valid name of a topic that does not exist.
UNKNOWN_TOPIC = "orders.unpiad"


def write_script(requests: int, seconds: float) -> list[ScriptedRecord]:
    """Write a script of `requests` requests with countdowns spread evenly over `seconds`, and a few cancels.

    Some requests are broken, cancelled, or replaced by a later one; these are spread among the others.
    """
    few = max(1, min(5, requests // SHARE_OF_SPECIAL))
    special = [*_broken(min(few, 3)), *_ended(few, round(seconds * 1000))]
    plain = requests - sum(line.expected is not ExpectedOutcome.CANCEL for line in special)
    script: list[ScriptedRecord] = []
    gap = plain // len(special)
    for number in range(plain):
        # A large prime: consecutive requests are due far apart.
        countdown_ms = int(number * 7919 % plain * seconds * 1000 / plain)
        script.append(_scripted_record(number, countdown_ms))
        if special and number % gap == gap - 1:
            script.append(special.pop(0))
    return script + special


def _scripted_record(
    number: int,
    countdown_ms: int,
    expected: ExpectedOutcome = ExpectedOutcome.DELIVERED,
    caller_id: str | None = None,
) -> ScriptedRecord:
    caller = CALLERS[number % len(CALLERS)]
    asked = caller.compose(number)
    message = asked["message"]
    identity = {"id": caller_id} if caller_id is not None else {}
    return ScriptedRecord(
        caller=caller.name,
        value=orjson.dumps(
            {"topic": caller.topic, "countdown": countdown_ms / 1000} | identity | asked
        ),
        headers=_headers(caller, number),
        expected=expected,
        caller_id=caller_id,
        topic=caller.topic,
        key=asked["key"].encode() if "key" in asked else None,
        message=message.encode() if isinstance(message, str) else orjson.dumps(message),
        more_headers=tuple((n, v.encode()) for n, v in asked.get("headers", {}).items()),
        countdown_ms=countdown_ms,
    )


def _broken(each: int) -> Iterator[ScriptedRecord]:
    for number in range(900_000, 900_000 + each):
        caller = CALLERS[number % len(CALLERS)]
        asked = {"topic": caller.topic, "message": f"broken {number}", "countdown": 1}
        for reason, value in (
            (Reason.NOT_JSON, orjson.dumps(asked)[:-2]),
            (Reason.UNKNOWN_TOPIC, orjson.dumps(asked | {"topic": UNKNOWN_TOPIC})),
            (Reason.BAD_DUE_TIME, orjson.dumps(asked | {"countdown": "soon"})),
            (Reason.BAD_TOPIC, orjson.dumps(asked | {"topic": "orders, unpaid"})),
        ):
            headers = _headers(caller, number)
            yield ScriptedRecord(caller.name, value, headers, ExpectedOutcome.DEAD, reason=reason)


def _ended(each: int, span_ms: int) -> Iterator[ScriptedRecord]:
    late_ms = round(span_ms * ENDED_DUE_SHARE)
    for number in range(800_000, 800_000 + 2 * each, 2):
        cancelled = _scripted_record(
            number, late_ms, ExpectedOutcome.CANCELLED, f"cancelled-{number}"
        )
        cancel = orjson.dumps({"id": cancelled.caller_id, "cancel": True})
        yield cancelled
        yield ScriptedRecord(
            cancelled.caller, cancel, (), ExpectedOutcome.CANCEL, cancelled.caller_id
        )
        # The replacement must come from the same caller: only one client's records keep their order.
        replaced, later = number + 100_000 * len(CALLERS), number + 200_000 * len(CALLERS)
        yield _scripted_record(replaced, late_ms, ExpectedOutcome.REPLACED, f"replaced-{number}")
        yield _scripted_record(later, late_ms, ExpectedOutcome.DELIVERED, f"replaced-{number}")


def _headers(caller: DemoCaller, number: int) -> Headers:
    return ("CALLER_SERVICE", caller.name.encode()), ("trace-id", b"%08x" % number)
