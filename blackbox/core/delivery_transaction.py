"""The delivery of one batch: what its transaction sends, and the receipt that names it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, islice

from blackbox.core.due_batch import DueBatch, as_dead, is_in_kafka
from blackbox.core.letter_record import stand_in
from blackbox.core.plan import Postponed
from blackbox.core.ports import Writer
from blackbox.core.receipt_room import ReceiptRoom
from blackbox.core.triage import Triage
from blackbox.records.entry import Entry
from blackbox.records.errors import RecoveryRequired, Refused
from blackbox.records.outgoing import FORMS, Outgoing, Refusal, dead_letters, deliveries
from blackbox.records.receipt import Places, Receipt, topic_of
from blackbox.records.request import MAY_COME_BACK, UNDELIVERABLE, Reason, Record
from blackbox.records.topic_limits import NO_LIMITS, RecordBatches

logger = logging.getLogger("blackbox.core.dispatch")

# Delay of what a strict topic takes only in a later transaction: other messages go before it.
PART_LATER_MS = 50
UNFIT_LATER_MS = 60_000
# After 1, 2 and 4 s.
MOST_WAITS_FOR_INTAKE = 3


class DeliveryTransaction:
    """The content of one transaction; the caller begins and commits it.

    It is aborted here before Refused is raised, and if something was superseded; else by the caller.

    `ready` and `dead` are the requests that it ends; a message that the client refuses is in both.
    `known` is the position `requests` of the index. `left_out` are requests of the batch that stay
    where they are in the index, because the receipt has no room for them.
    """

    def __init__(
        self, writer: Writer, triage: Triage, batch: DueBatch, known: int, now_ms: int
    ) -> None:
        self._writer, self._triage, self._batch = writer, triage, batch
        self._known, self._now_ms = known, now_ms
        self.ready, self.dead = dict(batch.ready), dict(batch.dead)
        # now, not within the transaction, which could time out
        self._originals = self._read_originals(batch.dead)
        self._places: Places = {}
        self._letters: Places = {}
        self._follow_ups: Places = {}
        self._beside = self._make_follow_ups()
        topics = {entry.target for entry in self.ready.values()} | {triage.dead_letter_topic}
        topics |= {forms[0].topic for beside in self._beside.values() for forms in beside}
        self._limits = triage.targets.limits(topics)
        self._parts = RecordBatches(self._limits)
        self.left_out: set[int] = set()
        self._room = ReceiptRoom()
        self._suspects: dict[int, Refusal] = {}

    @property
    def apart(self) -> Collection[int]:
        """The requests that were sent in record batches of their own."""
        return self._parts.apart

    @property
    def crowded(self) -> Collection[str]:
        """The topics in which a record batch was too large that may have held several records."""
        # As they were sent: another shard of the process may have asked for one by one since.
        limits = self._limits
        return {t for t in self._writer.crowded if not limits.get(t, NO_LIMITS).one_by_one}

    def send(self) -> bool:
        """Send messages, dead letters and their follow-ups; postpone those for a later transaction.

        Return whether anything was sent. Raises Refused, after an abort, if the topic of a follow-up may take
        it later.
        """
        # messages first: those that the client refuses become dead letters of this transaction
        later = self._send_messages()
        refused_now = {o: e for o, e in self.dead.items() if o not in self._batch.dead}
        self._originals |= self._read_originals(refused_now)
        later |= self._send_dead_letters()
        for offset, (wait_ms, entry) in later.items():
            self.ready.pop(offset, None)
            at_ms = self._now_ms + wait_ms
            self._batch.postponed[offset] = at_ms, refused_now.get(offset, entry)
        # also from the batch: what is read ahead begins with them
        for part in (self.ready, self.dead, self._batch.ready, self._batch.dead):
            for offset in self.left_out & part.keys():
                del part[offset]
        self._take_back(self._suspects)
        return bool(self.ready or self.dead)

    def flush(self) -> Mapping[int, Refusal]:
        """Wait until the brokers have all of it; return what is given up, as its target is unavailable."""
        return self._writer.flush(self._hopeless)

    def abort_if_superseded(self) -> Mapping[int, Refusal]:
        """Abort if a later record asks for some of it again, or cancels it; return these requests.

        Raises Refused instead if one of them has waited for intake too often.
        """
        # without a transaction nothing can be taken back: all of it would be sent twice
        if not self._follow_ups or not self._writer.exactly_once:
            return {}
        follow_ups, ended = self._triage.follow_ups, self.ready | self.dead
        superseded = follow_ups.superseded(self._known, ended, self._follow_ups)
        follow_ups.note_contended([ended[offset] for offset in superseded], self._now_ms)
        # Intake cannot store the later record, perhaps because Redis is full: recovery applies it.
        if any(ended[offset].waits >= MOST_WAITS_FOR_INTAKE for offset in superseded):
            self._take_back(superseded)
        if superseded:
            self._writer.abort()
        return superseded

    def receipt(self, dead: Mapping[int, Entry]) -> Receipt:
        """The receipt of what was sent; `dead` are the dead letters that the brokers have."""
        undeliverable = [o for o, entry in dead.items() if entry.reason in UNDELIVERABLE]
        expired = [o for o, entry in dead.items() if entry.reason == Reason.EXPIRED]
        others = {*undeliverable, *expired}
        # tombstones ask for nothing
        asks_again = self._triage.follow_ups.history_topic is None
        following = self._follow_ups if asks_again else {}
        topics = {topic_of(at) for at in (*self._places, *self._letters, *following)}
        return Receipt(
            at_ms=self._now_ms,
            delivered=self._places,
            dead=undeliverable,
            expired=expired,
            # also a replacement that came too late: like an invalid record, it ended nothing
            invalid=[offset for offset in dead if offset not in others],
            letters=self._letters,
            next=following,
            topics=dict(self._triage.targets.ids(topics)),
            read=self._known,
        )

    def _make_follow_ups(self) -> dict[int, list[Sequence[Outgoing]]]:
        """The follow-ups of each request, each in all of its forms; a copy is for a message only."""
        follow_ups, ended = self._triage.follow_ups, self.ready | self.dead
        made: dict[int, list[Sequence[Outgoing]]] = {}
        if follow_ups.has_some(ended.values()):
            requests = follow_ups.requests(ended, self._now_ms)
            for message in chain(requests, follow_ups.copies(self.ready)):
                forms = follow_ups.forms(message, ended[message.offset])
                made.setdefault(message.offset, []).append(forms)
        return made

    def _follow_ups_of(self, offset: int) -> Iterator[tuple[Outgoing, list[Outgoing]]]:
        """The follow-ups of a request, each with the forms that its topic takes, the largest first."""
        for forms in self._beside.get(offset, ()):
            largest = forms[0]
            # a message that the client refused is a dead letter now, and not copied
            if offset not in self.dead or largest.topic == self._triage.shard.topic:
                limits = self._limits.get(largest.topic, NO_LIMITS)
                yield largest, [form for form in forms if limits.refusal(form) is None]

    def _send_follow_ups(self, offset: int) -> None:
        """Send the follow-ups of a request, each in the largest form that is accepted, or not at all."""
        for largest, forms in self._follow_ups_of(offset) if self._beside else ():
            topic = largest.topic
            # receipts do not name copies
            places = self._follow_ups if topic == self._triage.shard.topic else {}
            refusal = self._limits.get(topic, NO_LIMITS).refusal(largest)
            for form in forms:
                refusal = self._writer.send(form, places)
                if refusal is None or refusal[0] in MAY_COME_BACK:
                    break
            if refusal is None:
                continue
            if refusal[0] in MAY_COME_BACK:
                self._suspects[offset] = refusal
                continue
            # it would be refused each time, and the request could never end
            where = self._triage.shard.source(offset)
            logger.error("%s: ends without its record in %s: %s", where, topic, refusal)

    def _read_originals(self, dead: Mapping[int, Entry]) -> dict[int, Record]:
        """The records of entries that Redis does not hold whole, as far as Kafka still has them."""
        offsets = [offset for offset, entry in dead.items() if is_in_kafka(entry)]
        return self._triage.originals(offsets, self._batch.records)

    def _send_messages(self) -> dict[int, Postponed]:
        """Send the messages; return those for a later transaction, each with its delay in ms."""
        later: dict[int, Postponed] = {}
        targets = [entry.target for entry in self.ready.values()]
        asks = bool(self._beside) or self._parts.has_limits or not self._room.take_all(targets)
        for message in deliveries(self._triage.shard, self.ready):
            if not asks or self._has_place(message, later):
                refusal = self._writer.send(message, self._places)
                if refusal is None:
                    self._send_follow_ups(message.offset)
                else:
                    self.dead[message.offset] = as_dead(self.ready[message.offset], refusal)
        return later

    def _send_dead_letters(self) -> dict[int, Postponed]:
        """Send the dead letters; return those for a later transaction, each with its delay in ms."""
        shard = self._triage.shard
        limits = self._limits.get(self._triage.dead_letter_topic, NO_LIMITS)
        later: dict[int, Postponed] = {}
        unfit: list[Refusal] = []
        for offset, entry in self.dead.items():
            forms = self._forms(offset, entry)
            refusals = [limits.refusal(form) for form in forms]
            fitting = [form for form, why in zip(forms, refusals, strict=True) if why is None]
            if not fitting:
                unfit += [why for why in refusals[-1:] if why is not None]
                # written again: its payload must outlive the wait
                later[offset] = UNFIT_LATER_MS, entry
            # if the client refuses a form that the topic would take, the next smaller one is sent
            elif self._has_place(fitting[0], later):
                if all(self._writer.send(form, self._letters) is not None for form in fitting):
                    raise RecoveryRequired(
                        f"{shard.source(offset)}: no form of its dead letter can be sent"
                    )
                self._send_follow_ups(offset)
        if unfit:
            self._triage.log_waiting_letters(len(unfit), unfit[0][1])
        for offset in later:
            del self.dead[offset]
        return later

    def _forms(self, offset: int, entry: Entry) -> list[Outgoing]:
        """The forms of a dead letter that the broker has not refused, the largest first."""
        triage = self._triage
        record, detail = self._originals.get(offset), entry.detail or ""
        if record is None:
            record, detail = stand_in(triage.shard, offset, entry, triage.follow_ups.format)
        topic, reason = triage.dead_letter_topic, entry.reason or ""
        forms = dead_letters(triage.shard, topic, record, reason, detail)
        return list(islice(forms, entry.shortened % FORMS, None))

    def _has_place(self, message: Outgoing, later: dict[int, Postponed]) -> bool:
        """Whether a message goes into this transaction with its follow-ups, if need be after a flush.

        If not, add it to `later`, or to `left_out`.
        """
        # the receipt also names the next request of a recurring one
        following = [self._triage.shard.topic] if message.offset in self._beside else []
        if not self._room.take(message.topic, *following):
            self.left_out.add(message.offset)
            return False
        follow_ups = self._follow_ups_of(message.offset) if self._beside else ()
        place = self._parts.place(message, *(form for _, forms in follow_ups for form in forms[:1]))
        if place == "later":
            later[message.offset] = PART_LATER_MS + len(later), None  # in this order
        elif place == "next":
            self.flush()
        return place != "later"

    def _hopeless(self) -> dict[int, Refusal]:
        """The messages that no broker has yet because their target cannot take anything any more."""
        arrived = {offset for pairs in self._places.values() for offset, _ in pairs}
        arrived |= self.dead.keys()
        waiting = {o: e.target for o, e in self.ready.items() if o not in arrived}
        # a cached answer may be from before the target became unavailable
        refusals = self._triage.reported_unavailable(set(waiting.values()), refresh=True)
        return {offset: refusals[to] for offset, to in waiting.items() if to in refusals}

    def _take_back(self, suspects: Mapping[int, Refusal]) -> None:
        if suspects:
            self._writer.abort()
            raise Refused(dict(suspects))
