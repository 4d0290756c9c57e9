"""Models of the API's request and response bodies."""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_right
from typing import Annotated, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from blackbox.admin.changes import Cancelled
from blackbox.admin.pending import LAST_MS, FoundPending
from blackbox.core.request_status import RequestStatus
from blackbox.journal.dead_letter_topic import DeadLetter


class Failure(BaseModel):
    """An error."""

    error: str = Field(description="what was wrong, and what to do")


class PausedTarget(BaseModel):
    """A paused target, which gets no messages."""

    topic: str
    since_ms: int = Field(description="when it was paused, epoch ms")


class PausedTargets(BaseModel):
    """All paused targets."""

    paused: list[PausedTarget]


class RefusedRequest(BaseModel):
    """A request that was refused."""

    number: int = Field(description="its number in the body, from 0")
    reason: str = Field(description="a reason, as in dead letters")
    detail: str = Field(description="what was wrong, and what to do")


class NotTaken(Failure):
    """The answer to an invalid request; nothing was written."""

    refused: list[RefusedRequest] = Field([], description="each invalid request")


class Ids(BaseModel):
    """The ids of the requests that were written."""

    ids: list[str] = Field(description="in the order of the requests")


class PlaceInKafka(BaseModel):
    """The place of a record in Kafka."""

    topic: str
    partition: int
    offset: int


class RequestState(BaseModel):
    """A request and its state; fields that do not apply or are not known are left out."""

    id: str = Field(description="the id that blackbox gave")
    source: str = Field(description="the place of its record, such as TB/3@1234")
    state: str = Field(
        description="pending, delivered, dead, expired, invalid, ended (cancelled or replaced), "
        "unread, cancel, tombstone; over (no longer pending) or undetermined if the "
        "look-up reached its limit before it found the outcome, see `detail`"
    )
    caller: str | None = Field(None, description="its caller, by the header CALLER_SERVICE")
    caller_id: str | None = Field(None, description="the id that its caller chose")
    target: str | None = Field(None, description="the topic that its message goes to")
    due_ms: int | None = Field(None, description="when its message is due, epoch ms")
    next_try_ms: int | None = Field(
        None,
        description="when it is tried next, epoch ms; absent while its target is paused or has no "
        "leader",
    )
    attempts: int | None = Field(
        None, description="how often it was postponed: refused, or its target paused or unreachable"
    )
    at_ms: int | None = Field(
        None, description="when it was delivered or became a dead letter, epoch ms"
    )
    place: PlaceInKafka | None = Field(None, description="its message, or its dead letter")
    reason: str | None = Field(None, description="why it is, or will be, a dead letter")
    detail: str | None = Field(
        None,
        description="explains `reason`; without a reason, why the last try was postponed, or which "
        "request replaced it before the cancel",
    )
    is_cold: bool | None = Field(None, description="true while it waits in the cold tier")
    carried: str | None = Field(None, description="the record that carries it, such as TB/3@5678")

    @classmethod
    def of(cls, status: RequestStatus) -> RequestState:
        return cls.model_validate(status, from_attributes=True)

    @classmethod
    def of_pending(cls, found: FoundPending) -> RequestState:
        return cls.of(found.status())


class Page(BaseModel):
    """A page of pending requests, the soonest first."""

    requests: list[RequestState]
    next: str | None = Field(
        None, description="the cursor of the next page; absent on the last page"
    )


class CancelState(BaseModel):
    """The outcome of a cancel, and the request."""

    outcome: str = Field(
        description="cancelled; too-late: it was delivered or ended before; asked: written to "
        "Kafka, not yet read"
    )
    request: RequestState
    others: list[RequestState] | None = Field(
        None,
        description="requests with the same caller id in other partitions, for which this call tried a cancel as well",
    )

    @classmethod
    def of(cls, cancelled: Cancelled) -> CancelState:
        assert cancelled.request is not None
        others = [RequestState.of(other) for other in cancelled.others]
        request = RequestState.of(cancelled.request)
        return cls(outcome=cancelled.outcome, request=request, others=others or None)


class NewDueTime(BaseModel):
    """The new due time; exactly one field."""

    # strict: pydantic would otherwise take "60" and true for numbers.
    model_config = ConfigDict(extra="forbid", strict=True)

    countdown: float | None = Field(None, allow_inf_nan=False, description="seconds from now")
    at: str | int | None = Field(None, description="RFC 3339, or epoch ms")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.countdown is None) is (self.at is None):
            raise ValueError("give exactly one of countdown and at")
        if isinstance(self.at, int) and abs(self.at) > LAST_MS:
            raise ValueError("at is out of range")
        return self


class RescheduledState(BaseModel):
    """The outcome of a reschedule, and the request; once rescheduled, it has a new id."""

    outcome: str = Field(
        description="rescheduled; too-late: it was delivered or ended before; asked: written to "
        "Kafka, not yet read"
    )
    request: RequestState


class LetterState(BaseModel):
    """A dead letter. `value` and `key` are text, or base64 where `…_encoding` says so.

    Callers that may only read get neither.
    """

    place: str = Field(description="its place, to replay or discard it")
    at_ms: int = Field(description="when it was written, epoch ms")
    reason: str = Field(description="its header blackbox-reason")
    detail: str = Field(description="its header blackbox-detail")
    source: str = Field(description="the place of the request's record")
    caller: str | None = None
    target: str | None = Field(None, description="absent if the request is invalid")
    key: str | None = None
    key_encoding: str | None = None
    value: str | None = None
    value_encoding: str | None = None
    value_bytes: int = Field(description="the size of the whole value")
    became: str | None = Field(None, description="replayed or discarded; absent while open")

    @classmethod
    def of(
        cls, letter: DeadLetter, most_sent_bytes: int | None = None, *, with_record: bool = True
    ) -> LetterState:
        """`most_sent_bytes`: of key and value each, as JSON."""
        state = cls.model_validate(letter.without_content(), from_attributes=True)
        if with_record:
            state.key, state.key_encoding = _shown(letter.key, most_sent_bytes)
            state.value, state.value_encoding = _shown(letter.value, most_sent_bytes)
        return state


def _shown(held: bytes | None, most_bytes: int | None) -> tuple[str | None, str | None]:
    if held is None:
        return None, None
    try:
        text = held.decode()
    except UnicodeDecodeError:
        # Base64 makes four characters of three bytes.
        whole = None if most_bytes is None else most_bytes // 4 * 3
        return b64encode(held[:whole]).decode(), "base64"
    if most_bytes is not None and _sent_bytes(text) > most_bytes:
        # JSON takes one to six bytes for a character, so the cut is searched, not computed.
        cuts = range(1, len(text))
        text = text[: bisect_right(cuts, most_bytes, key=lambda end: _sent_bytes(text[:end]))]
    return text, None


def _sent_bytes(text: str) -> int:
    return len(orjson.dumps(text)) - 2  # the quotes


class Letters(BaseModel):
    """Dead letters, the newest first."""

    letters: list[LetterState]


class Places(BaseModel):
    """Dead letters."""

    model_config = ConfigDict(extra="forbid")

    places: list[Annotated[str, Field(max_length=300)]] = Field(
        min_length=1,
        max_length=1000,
        description="their places, such as blackbox.dead-letters/0@17",
    )


class PutAwayState(BaseModel):
    """The result of a change of dead letters."""

    done: list[str] = Field(description="the places of those that were replayed or discarded")
    left: dict[str, str] = Field(description="why others were not, by place")
