"""The status of a request according to the two journals of its shard."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from blackbox.core.journal_search import JournalSearch
from blackbox.core.own_record import OwnRecord, read_own_record
from blackbox.core.request_status import RequestStatus


@dataclass(frozen=True, slots=True)
class JournalLookup(JournalSearch):
    """Finds the statuses of requests of one shard, by its journals alone; raises what a search raises."""

    def status(self, offset: int) -> RequestStatus:
        """The status by the journals alone: a request is pending if no receipt or later record has ended it.

        So a cancel or a replacement counts once it is written. One that a service has not read when
        the message is due comes too late, and the status is `delivered` then.
        """
        own = self.own_record(offset)
        # before the receipts are read: a request that has an outcome by now is in one of them
        bounds = self.journal.request_bounds()
        if own.status.state == "unknown" and offset < bounds.start:
            # it may have been carried on: the record in its place names it
            there = self.carried_to(own, 0)
            return own.status if there is None else self._status_of_carried(own, there, bounds.end)
        if own.status.state != "unread":
            return own.status
        return self._by_both_journals(own, bounds.end)

    def own_record(self, offset: int) -> OwnRecord:
        return read_own_record(
            self.shard, self.journal, self.format, offset, self.now_ms, self.limit.left_s
        )

    def replaced_by(self, own: OwnRecord, since: int) -> int | None:
        """The record, not below `since`, that took the place of an ended request; None: it was cancelled."""
        position, end = self._offsets_after(own, since)
        while (change := self.next_change(own, position, end)) is not None:
            at, is_carried = change
            there = self.own_record(at)
            if there.status.state == "cancel":
                return None
            if is_carried:
                own = there
            elif not self._was_invalid(at):
                return at
            position = at + 1
        return None

    def explained(self, status: RequestStatus) -> RequestStatus:
        """The same with the reason and detail of its dead letter, if that still exists."""
        if status.place is None or status.state == "delivered":
            return status
        place = status.place
        letter = self.journal.record_at(place.topic, place.partition, place.offset)
        about = dict(letter.headers) if letter is not None else {}
        reason_and_detail: dict[str, Any] = {
            name: held.decode(errors="replace")
            for name in ("reason", "detail")
            if (held := about.get(f"blackbox-{name}"))
        }
        return replace(status, **reason_and_detail)

    def _by_both_journals(self, own: OwnRecord, end: int) -> RequestStatus:
        return self.outcome(own) or self._by_later_records(own, end)

    def _by_later_records(self, own: OwnRecord, end: int) -> RequestStatus:
        """The status, by the records up to `end`, of a request that no receipt names."""
        pending = replace(own.status, state="pending")
        if own.status.reason is not None:  # only its dead letter ends it
            return pending
        position = own.offset
        while True:
            change = self.next_change(own, position + 1, end)
            if change is None:
                return pending
            position, is_carried = change
            if is_carried:
                return self._status_of_carried(own, position, end)
            if not self._was_invalid(position):
                return replace(pending, state="ended")

    def _status_of_carried(self, own: OwnRecord, there: int, end: int) -> RequestStatus:
        return self._by_both_journals(self.own_record(there), end).for_request(
            self.shard, own.offset
        )

    def _was_invalid(self, offset: int) -> bool:
        """Whether the service's own limits refused a request; such a request replaces nothing."""
        outcome = self.outcome(self.own_record(offset))
        return outcome is not None and outcome.state == "invalid"
