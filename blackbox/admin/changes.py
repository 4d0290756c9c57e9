"""Cancel and reschedule requests: write to Kafka, and wait until intake has read it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from blackbox.admin.lookup import StatusLookup, wait_until
from blackbox.admin.pending import WAITING, is_changeable
from blackbox.admin.request_topics_writer import WRITE_FORMAT, RequestTopicsWriter
from blackbox.client.request_value import cancel_value
from blackbox.client.request_writer import RequestWriter
from blackbox.client.rescheduling import replacement_of
from blackbox.config.settings import Settings
from blackbox.core.journal_search import LimitReached
from blackbox.core.plan import Positions
from blackbox.core.request_status import RequestStatus
from blackbox.records.cancel import HEADER
from blackbox.records.request import Invalid, Reason, Shard, placed, request_id

READ_WITHIN_S = 5.0
"""How long a change waits until intake has read what was written."""

OUTCOME_ORDER = ("undetermined", "asked", "too-late", "cancelled", "unknown")
"""By importance: a cancel of several requests reports the first of these outcomes that occurred."""

_NOT_FOUND: dict[str, Literal["unknown", "undetermined"]] = {
    "unknown": "unknown",
    "undetermined": "undetermined",
}


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The outcome of a cancel.

    cancelled -- the request was pending and is not any more
    too-late  -- it was delivered, is a dead letter, or was cancelled or replaced before
    asked     -- the cancel is in Kafka, and its effect is not known yet
    unknown   -- there is no such request
    undetermined -- nothing was written: its state was not found within the limit of a look-up

    `request` is the request that the outcome is about; `others` are further requests under the same
    caller id for which a cancel was tried too.
    """

    outcome: Literal["cancelled", "too-late", "asked", "unknown", "undetermined"]
    request: RequestStatus | None
    others: tuple[RequestStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The outcome of a reschedule, as of a cancel; rescheduled: `request` has replaced it, under a new id."""

    outcome: Literal["rescheduled", "too-late", "asked", "unknown", "undetermined"]
    request: RequestStatus | None


@dataclass(frozen=True, slots=True)
class Changes:
    settings: Settings
    lookup: StatusLookup
    writer: RequestTopicsWriter

    def cancel(self, places: Sequence[tuple[Shard, int]], text: str) -> Cancelled:
        """Cancel the requests at these places, which `text` names: an id, or a caller id."""
        done = [self._cancel(place, text) for place in places]
        if not done:
            return Cancelled("unknown", None)
        first = min(done, key=lambda one: OUTCOME_ORDER.index(one.outcome))
        others = tuple(one.request for one in done if one is not first and one.request is not None)
        return replace(first, others=others)

    def reschedule(
        self, places: Sequence[tuple[Shard, int]], countdown_s: float | None, at: str | int | None
    ) -> Rescheduled:
        """Change the due time of the request at the first place, and cancel the others."""
        if not places:
            return Rescheduled("unknown", None)
        done = self._reschedule(places[0], countdown_s, at)
        if done.outcome in ("rescheduled", "asked"):
            for other in places[1:]:
                # By its own id: the rescheduled request has the same caller id.
                self._cancel(other, request_id(*other))
        return done

    def _cancel(self, place: tuple[Shard, int], text: str) -> Cancelled:
        since, status = self._status_and_positions(place)
        deadline = time.monotonic() + READ_WITHIN_S
        # Promotion may carry the request to another record before the cancel is read. The cancel
        # then names a record that is not pending, and is written again for the new one.
        while is_changeable(status):
            shard, offset = _current_place(place, status)
            # By caller id only if that was asked for: it also ends a later request under the id.
            name = text if text == status.caller_id else None
            cancel = self._write_cancel(shard, offset, status, name)
            if not self._wait_until_read(shard, cancel, offset, deadline):
                return Cancelled("asked", status)
            before, pending_at = status, since
            since, status = self._status_and_positions(place, before, since)
            if status.state == "ended":
                return self._ended(status, (shard, offset), pending_at, cancel, deadline)
            if status.carried == before.carried and status.state in WAITING:
                return Cancelled("asked", status)
        return Cancelled(_NOT_FOUND.get(status.state, "too-late"), status)

    def _ended(
        self,
        status: RequestStatus,
        place: tuple[Shard, int],
        since: Positions | None,
        cancel: int,
        deadline: float,
    ) -> Cancelled:
        """The outcome for an ended request: cancelled, unless one that is not cancelled replaced it after `since`."""
        # Pending when intake had read all up to the cancel: no other record can have ended it.
        if since is not None and since.requests >= cancel:
            return Cancelled("cancelled", status)
        (shard, offset), left = place, status
        try:
            # The cancel may also have ended the replacement, or its replacement.
            while left.state == "ended":
                there = self.lookup.replaced_by(shard, offset, since)
                if there is None:
                    return Cancelled("cancelled", status)
                if not self._wait_until_read(shard, cancel, there, deadline):
                    return Cancelled("asked", status)
                offset, left = there, self.lookup.status(shard, there, since)
        except LimitReached:
            detail = (
                "whether it was cancelled or replaced could not be determined: it is too far back"
            )
            return Cancelled("too-late", replace(status, state="over", detail=detail))
        return Cancelled("too-late", replace(status, detail=f"replaced by {left.id}"))

    def _status_and_positions(
        self,
        place: tuple[Shard, int],
        before: RequestStatus | None = None,
        since: Positions | None = None,
    ) -> tuple[Positions | None, RequestStatus]:
        """The status of a request, and positions; if it is pending, its outcome will come after them.

        `before` is an earlier status, found together with the positions `since`.
        """
        # Before and after the status: the request was pending at some position in between.
        positions = self.lookup.inspector.positions(place[0])
        if before is not None and before.state == "pending":
            was_at = _current_place(place, before)
            status = self.lookup.status(*was_at, since)
            if was_at != place:
                status = status.for_request(*place)
        else:
            status = self.lookup.status(*place)
        after = self.lookup.inspector.positions(place[0])
        if positions is None or after is None:
            return None, status
        # The lower ones: Redis may have gone back in between, and then shows ended requests as
        # pending.
        return Positions(*map(min, positions, after)), status

    def _reschedule(
        self, place: tuple[Shard, int], countdown_s: float | None, at: str | int | None
    ) -> Rescheduled:
        since, status = self._status_and_positions(place)
        deadline = time.monotonic() + READ_WITHIN_S
        while is_changeable(status):
            shard, offset = _current_place(place, status)
            new = self._write_replacement(shard, offset, countdown_s, at)
            is_read = self._wait_until_read(shard, new, new, deadline)
            replacement = self.lookup.status(shard, new)
            if not is_read:
                return Rescheduled("asked", replacement)
            if replacement.reason != Reason.TOO_LATE:
                return Rescheduled("rescheduled", replacement)
            # Too late for this record; promotion may have carried the request to another one.
            before = status
            since, status = self._status_and_positions(place, before, since)
            if status.carried == before.carried:
                break
        return Rescheduled(_NOT_FOUND.get(status.state, "too-late"), status)

    def _write_replacement(
        self, shard: Shard, offset: int, countdown_s: float | None, at: str | int | None
    ) -> int:
        format_name = self.settings.topics[shard.topic]
        if format_name != WRITE_FORMAT:
            raise ValueError(
                f"{shard.topic} has the format {format_name}, whose requests cannot be rescheduled here; "
                "cancel the request, and write a new one to the topic"
            )
        record = self.lookup.record(shard, offset)
        if record is None:
            raise ValueError(f"{shard.source(offset)} is no longer in Kafka")
        format = self.lookup.formats[shard.topic]
        new = replacement_of(shard, record, format, countdown_s=countdown_s, at=at)
        # Otherwise intake would refuse it, and its caller would find only a dead letter.
        checked = self.writer.check(shard.topic, new.value, new.headers)
        if isinstance(checked, Invalid):
            raise ValueError(f"{checked.reason}: {checked.detail}")
        return self.writer.with_writer(
            shard.topic, lambda asker: asker.write_replacement(shard, new).place[1]
        )

    def _write_cancel(
        self, shard: Shard, offset: int, status: RequestStatus, name: str | None
    ) -> int:
        """Write a cancel; returns its offset. By caller id (`name`) it ends the recurrence too."""
        key: str | None = None
        value: bytes | None = None
        headers: list[tuple[str, bytes]] = []
        # The topic is compacted, and Kafka refuses records without a key there.
        if shard.topic in self.settings.schedule_topics:
            key = status.caller_id
        elif name is not None and self.settings.topics[shard.topic] == WRITE_FORMAT:
            key, value = name, cancel_value(name)
        else:
            headers = [(HEADER, request_id(shard, offset).encode())]

        def write(writer: RequestWriter) -> int:
            # If partitions were added since, the key maps to another partition than the request's.
            # A later request under `name` may wait there, unread.
            if name is not None and key is not None:
                there, at = writer.write(value, key=key, headers=headers).place
                if there == shard:
                    return at
            written = writer.write(value, key=key, headers=headers, partition=shard.partition)
            return written.place[1]

        return self.writer.with_writer(shard.topic, write)

    def _wait_until_read(self, shard: Shard, written: int, offset: int, deadline: float) -> bool:
        inspector = self.lookup.inspector

        def is_done() -> bool:
            position = inspector.positions(shard)
            is_read = position is not None and position.requests > written
            # While a batch is in flight, its outcome is unknown: the cancel may be too late.
            return is_read and not inspector.is_in_flight(shard, offset)

        return wait_until(is_done, deadline)


def _current_place(place: tuple[Shard, int], status: RequestStatus) -> tuple[Shard, int]:
    """Where the request is now: the record that carries it on, if there is one."""
    return place if status.carried is None else placed(status.carried) or place
