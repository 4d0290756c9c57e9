"""All operations on a running blackbox, without access control."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal, TypeVar

from blackbox.admin.dead_letters import PutAway, put_away
from blackbox.admin.lookup import Registry
from blackbox.admin.pending import Found, Place, Wanted, page
from blackbox.client.asking import ACKNOWLEDGED_WITHIN_S, Asker, NotSent
from blackbox.client.moving import moved
from blackbox.client.request import cancel_value
from blackbox.config.settings import Settings
from blackbox.config.wiring import formats, kafka, rules, shared
from blackbox.core.plan import Positions
from blackbox.core.status import Fate, LimitReached
from blackbox.index.inspector import Standing
from blackbox.index.server import RedisServer, Room
from blackbox.journal.letterbox import MOST_SHOWN_BYTES, Letter, Letterbox
from blackbox.records.cancel import HEADER
from blackbox.records.request import (
    Cancel,
    Headers,
    Invalid,
    Reason,
    Record,
    Request,
    Shard,
    locate,
    placed,
    request_id,
)
from blackbox.support.logs import QUIET

T = TypeVar("T")

TAKEN_IN_WITHIN_S = 5.0
"""How long a change waits until intake has read what was written."""

LOOKED_FOR_S = 1.0
"""The same for a look-up, which can be repeated."""

LOOK_S = 0.02
COUNTED = 1_000
"""How many entries of each shard, the soonest first, are counted by caller and target."""

WRITTEN = "countdown"
"""The format of the requests that HTTP and the command line write."""

CLIENTS_MOST_BYTES = 1_000_000
HEADROOM_BYTES = 2_000
"""Reserved for key, headers and Kafka's overhead in the largest record that a client sends."""

Outcome = Literal["cancelled", "too-late", "asked", "unknown", "undetermined"]
NEWS: tuple[Outcome, ...] = ("undetermined", "asked", "too-late", "cancelled", "unknown")
"""Outcomes in order of importance: a cancel of several requests reports the first of these that occurred."""

WAITING = ("pending", "unread")
_UNTOLD: dict[str, Literal["unknown", "undetermined"]] = {
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

    outcome: Outcome
    request: Fate | None
    others: tuple[Fate, ...] = ()


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The outcome of a reschedule, as of a cancel; rescheduled: `request` has replaced it, under a new id."""

    outcome: Literal["rescheduled", "too-late", "asked", "unknown", "undetermined"]
    request: Fate | None


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request is refused: its number among those given, from 0, the reason word, and the detail."""

    number: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of all shards.

    `callers` and `targets` count the soonest entries of each shard, `counted` in all. `profile` has
    the number of entries whose next try is from each given instant to before the next one.
    """

    shards: dict[Shard, Standing]
    callers: Counter[str]
    targets: Counter[str]
    counted: int
    profile: Sequence[int]


class Admin:
    """Finds, lists, counts, writes, cancels and reschedules requests; handles dead letters and paused targets.

    Safe to use from many threads. Methods raise JournalLost or IndexLost when Kafka or Redis does not
    answer, NotSent when Kafka does not accept a request.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._formats = formats(settings)
        self._rules = rules(settings)
        self._shared = shared(settings)
        self._redis = RedisServer(settings.redis_url.get_secret_value())
        self._has_room = Room(self._redis)
        self._lock = Lock()
        self._writing = Lock()
        self._putting_away = Lock()
        """Separate from `_writing`: this takes a second among many letters, and no request waits for it."""
        self._made: Registry | None = None
        self._askers: dict[str, Asker] = {}
        own = settings.kafka_settings().get("message.max.bytes", str(CLIENTS_MOST_BYTES))
        self._most_bytes = int(own) - HEADROOM_BYTES

    def find(self, text: str) -> Fate | None:
        """The request with this id, or the newest pending one under this caller id; None: there is none.

        If a caller id is not found, waits up to a second for intake to read the latest requests, and may
        miss them. It does not wait while Redis is full, because intake is stopped then.
        """
        places = self._places(text, LOOKED_FOR_S)
        if not places:
            return None
        fate = self._registry().fate(*places[0])
        return None if fate.state == "unknown" else fate

    def page(
        self,
        wanted: Wanted,
        after: Place | None,
        limit: int,
        topics: Collection[str] | None = None,
        *,
        whole: bool = False,
    ) -> tuple[list[Found], Place | None]:
        """A page of pending requests, of these request topics or of all, as `admin.pending.page`."""
        registry = self._registry()
        shards = [shard for shard in registry.shards() if topics is None or shard.topic in topics]
        return page(registry.inspector, shards, wanted, after, limit, whole=whole)

    def each(
        self,
        topics: Collection[str],
        wanted: Wanted | None = None,
        at_once: int = 1000,
    ) -> Iterator[Found]:
        """All pending requests of these request topics, read page by page."""
        after: Place | None = None
        while True:
            found, after = self.page(wanted or Wanted(), after, at_once, topics)
            yield from found
            if after is None:
                return

    def ask(
        self, values: Sequence[bytes], caller: str | None, topic: str | None = None
    ) -> list[str] | list[Refused]:
        """Write these requests, in the format `countdown`; returns their ids, or why none was written."""
        topic = topic or self._written_topic()
        now_ms = time.time_ns() // 1_000_000
        headers: Headers = [("CALLER_SERVICE", caller.encode())] if caller else []
        asked = [self._asked(topic, value, headers, now_ms) for value in values]
        refused = [
            Refused(number, *_why(one))
            for number, one in enumerate(asked)
            if not isinstance(one, Request)
        ]
        if refused:
            return refused
        keys = [one.caller_id if isinstance(one, Request) else None for one in asked]

        def write(asker: Asker) -> list[str]:
            pairs = zip(values, keys, strict=True)
            written = [asker.ask(value, key=key, headers=headers) for value, key in pairs]
            asker.wait_for(written)
            return [one.id for one in written]

        return self._write(topic, write)

    def _asked(
        self, topic: str, value: bytes, headers: Headers, now_ms: int
    ) -> Request | Cancel | Invalid | None:
        """Parse and check a request as intake will, except for quotas."""
        if len(value) > self._most_bytes:
            return Invalid(
                Reason.TOO_LARGE,
                f"the request has {len(value)} bytes; at most {self._most_bytes} are allowed",
            )
        asked = self._formats[topic].parse(Record(0, now_ms, None, value, headers), now_ms)
        if self._rules is not None and isinstance(asked, Request):
            refusal = self._rules.rules().refusal(asked, now_ms)
            if refusal is not None:
                return Invalid(Reason(refusal[0]), refusal[1])
        return asked

    def cancel(self, text: str) -> Cancelled:
        """Cancel the request with this id, or all pending ones under this caller id; returns the outcome."""
        done = [self._cancel(place, text) for place in self._places(text)]
        if not done:
            return Cancelled("unknown", None)
        worst = min(done, key=lambda one: NEWS.index(one.outcome))
        others = tuple(one.request for one in done if one is not worst and one.request is not None)
        return replace(worst, others=others)

    def _cancel(self, place: tuple[Shard, int], text: str) -> Cancelled:
        registry = self._registry()
        since, fate = self._look(place)
        deadline = time.monotonic() + TAKEN_IN_WITHIN_S
        while fate.state in WAITING and fate.reason is None:
            shard, offset = _now_at(place, fate)
            name = text if text == fate.caller_id else None
            cancel = self._write_cancel(shard, offset, fate, name)
            if not _wait_taken_in(registry, shard, cancel, offset, deadline):
                return Cancelled("asked", fate)
            before, pending_at = fate, since
            since, fate = self._look(place, before, since)
            if fate.state == "ended":
                return self._ended(fate, (shard, offset), pending_at, cancel, deadline)
            if fate.carried == before.carried and fate.state in WAITING:
                return Cancelled("asked", fate)
        return Cancelled(_UNTOLD.get(fate.state, "too-late"), fate)

    def _ended(
        self,
        fate: Fate,
        place: tuple[Shard, int],
        since: Positions | None,
        cancel: int,
        deadline: float,
    ) -> Cancelled:
        """The outcome for an ended request: cancelled, unless it was replaced after `since` by a request
        that was not cancelled.
        """
        if since is not None and since.requests >= cancel:  # no record came before the cancel
            return Cancelled("cancelled", fate)
        registry, (shard, offset), left = self._registry(), place, fate
        try:
            while left.state == "ended":
                there = registry.replaced_by(shard, offset, since)
                if there is None:
                    return Cancelled("cancelled", fate)
                if not _wait_taken_in(registry, shard, cancel, there, deadline):
                    return Cancelled("asked", fate)
                offset, left = there, registry.fate(shard, there, since)
        except LimitReached:
            detail = (
                "whether it was cancelled or replaced could not be determined: it is too far back"
            )
            return Cancelled("too-late", replace(fate, state="over", detail=detail))
        return Cancelled("too-late", replace(fate, detail=f"replaced by {left.id}"))

    def _look(
        self, place: tuple[Shard, int], before: Fate | None = None, since: Positions | None = None
    ) -> tuple[Positions | None, Fate]:
        """The fate of a request, and positions; if it is pending, its outcome will come after them.

        `before` is an earlier fate, found together with the positions `since`.
        """
        registry, was_at = self._registry(), None
        positions = registry.inspector.positions(place[0])
        if before is not None and before.state == "pending":
            was_at = _now_at(place, before)
        fate = registry.fate(*place) if was_at is None else registry.fate(*was_at, since)
        if was_at is not None and was_at != place:
            fate = fate.told_of(*place)
        after = registry.inspector.positions(place[0])
        if positions is None or after is None:
            return None, fate
        # The lower ones: Redis may have gone back in between, and then shows ended requests as pending.
        return Positions(*map(min, positions, after)), fate

    def reschedule(
        self, text: str, *, countdown_s: float | None = None, at: str | int | None = None
    ) -> Rescheduled:
        """Change the due time of the pending request with this id or caller id; returns the outcome.

        If several are pending under a caller id, the newest is rescheduled and the others are
        cancelled. Raises ValueError for an invalid time, for a request in another format than
        `countdown`, and when Kafka no longer keeps its record.
        """
        places = self._places(text)
        if not places:
            return Rescheduled("unknown", None)
        done = self._reschedule(places[0], countdown_s, at)
        if done.outcome in ("rescheduled", "asked"):
            for other in places[1:]:
                # By its own id: the rescheduled request has the same caller id.
                self._cancel(other, request_id(*other))
        return done

    def _reschedule(
        self, place: tuple[Shard, int], countdown_s: float | None, at: str | int | None
    ) -> Rescheduled:
        registry = self._registry()
        since, fate = self._look(place)
        deadline = time.monotonic() + TAKEN_IN_WITHIN_S
        while fate.state in WAITING and fate.reason is None:
            shard, offset = _now_at(place, fate)
            new = self._write_moved(shard, offset, countdown_s, at)
            is_taken_in = _wait_taken_in(registry, shard, new, new, deadline)
            asked = registry.fate(shard, new)
            if not is_taken_in:
                return Rescheduled("asked", asked)
            if asked.reason != Reason.TOO_LATE:
                return Rescheduled("rescheduled", asked)
            before = fate
            since, fate = self._look(place, before, since)
            if fate.carried == before.carried:
                break
        return Rescheduled(_UNTOLD.get(fate.state, "too-late"), fate)

    def _write_moved(
        self, shard: Shard, offset: int, countdown_s: float | None, at: str | int | None
    ) -> int:
        if self._settings.topics[shard.topic] != WRITTEN:
            raise ValueError(
                f"{shard.topic} has the format {self._settings.topics[shard.topic]}, which cannot "
                "be rescheduled here; write the request to it again, with the same key or id"
            )
        record = self._registry().record(shard, offset)
        if record is None:
            raise ValueError(f"{shard.source(offset)} is no longer in Kafka")
        contract = self._formats[shard.topic]
        new = moved(shard, record, contract, countdown_s=countdown_s, at=at)
        now_ms = time.time_ns() // 1_000_000
        asked = self._asked(shard.topic, new.value, new.headers, now_ms)
        if not isinstance(asked, Request):
            raise ValueError(": ".join(_why(asked)))
        return self._write(shard.topic, lambda asker: asker.ask_to_move(shard, new).place[1])

    def letters(
        self,
        reason: str | None = None,
        *,
        is_open: bool = True,
        limit: int | None = None,
        most_bytes: int = MOST_SHOWN_BYTES,
    ) -> list[Letter]:
        """The dead letters with this reason (None: any), the newest first; only open ones, or all.

        With a `limit`, reading stops once that many are found. Keys and values are cut to `most_bytes`
        while reading: together they may take gigabytes.
        """

        def wanted(letter: Letter) -> Letter | None:
            is_wanted = reason in (None, letter.reason) and not (is_open and letter.became)
            return letter if is_wanted else None

        box = Letterbox(
            self._registry().access, self._settings.dead_letter_topic, self._settings.topics
        )
        return box.newest(
            wanted, limit, keep=lambda one: one.glance(self._target_of(one), most_bytes)
        )

    def _target_of(self, letter: Letter) -> str | None:
        """The target of the letter's message; None when its request cannot be parsed."""
        topic = letter.source.rpartition("/")[0]
        if topic not in self._formats:
            return None
        record = Record(0, letter.at_ms, letter.key, letter.value, letter.headers)
        asked = self._formats[topic].parse(record, letter.at_ms)
        return asked.target if isinstance(asked, Request) else None

    def put_away(self, places: Sequence[str], *, again: bool) -> PutAway:
        """Discard or replay dead letters, as `admin.dead_letters.put_away`."""
        with self._putting_away:  # concurrent transactions would fence each other
            return put_away(
                self._registry().access,
                self._settings.dead_letter_topic,
                places,
                request_topics=self._settings.topics,
                again=again,
            )

    def paused(self) -> dict[str, int]:
        """The paused targets, and since when, epoch ms."""
        return self._shared.paused(self._registry().shards())

    def pause(self, topic: str) -> dict[str, int]:
        """Stop delivery to this target within a second; returns all paused targets.

        The target is not among them while no request topic exists.
        """
        self._shared.pause(topic, time.time_ns() // 1_000_000, self._registry().shards())
        return self.paused()

    def resume(self, topic: str) -> dict[str, int]:
        """Resume delivery to this target, paused or not; returns the targets that are still paused."""
        self._shared.resume(topic, self._registry().shards())
        return self.paused()

    def stats(self, now_ms: int, edges_ms: Sequence[int]) -> Stats:
        """Statistics of all shards, and how much will be due between these instants."""
        registry = self._registry()
        shards = list(registry.shards())
        callers: Counter[str] = Counter()
        targets: Counter[str] = Counter()
        counted = 0
        for shard in shards:
            found, _ = page(registry.inspector, [shard], Wanted(), None, COUNTED)
            counted += len(found)
            held = [one.pending.entry for one in found if one.pending.entry is not None]
            callers.update(entry.caller or "" for entry in held)
            targets.update(entry.target for entry in held)
        profiles = [registry.inspector.counts(shard, edges_ms) for shard in shards]
        return Stats(
            shards={shard: registry.inspector.standing(shard, now_ms) for shard in shards},
            callers=callers,
            targets=targets,
            counted=counted,
            profile=[sum(column) for column in zip(*profiles, strict=True)],
        )

    def close(self) -> None:
        with self._writing:
            for asker in self._askers.values():
                asker.close()
        self._shared.close()
        self._redis.close()
        with self._lock:
            if self._made is not None:
                self._made.close()

    def _registry(self) -> Registry:
        with self._lock:
            if self._made is None:
                self._made = Registry(self._settings)
        self._made.count_partitions()
        return self._made

    def _places(self, text: str, within_s: float = TAKEN_IN_WITHIN_S) -> list[tuple[Shard, int]]:
        """The place of the request with this id, or of those pending under this caller id, the newest first.

        All shards are searched for a caller id: its partition changes when partitions are added. If
        none is found and the text is a place such as TB/3@1234, that place. Otherwise waits up to
        `within_s` for intake to read what was written by now.
        """
        try:
            return [locate(text, list(self._settings.topics))]
        except ValueError:
            pass
        registry = self._registry()
        place = placed(text)
        if place is not None and place[0].topic in self._settings.topics:
            return registry.holders(text) or [place]
        found = registry.holders(text)
        is_short = within_s < TAKEN_IN_WITHIN_S
        if found or (is_short and not self._has_room()):
            return found
        return self._holders_once_read(registry, text, within_s)

    def _holders_once_read(
        self, registry: Registry, text: str, within_s: float
    ) -> list[tuple[Shard, int]]:
        """The holders of a caller id once intake has read what was written by now, or after `within_s`."""
        ends = {shard: registry.request_end(shard) for shard in registry.shards()}
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            positions = {shard: registry.inspector.positions(shard) for shard in ends}
            if all(one is not None and one.requests >= ends[s] for s, one in positions.items()):
                break
            time.sleep(LOOK_S)
        return registry.holders(text)

    def _write_cancel(self, shard: Shard, offset: int, fate: Fate, name: str | None) -> int:
        """Write a cancel; returns its offset. With `name`, the caller id, it also ends the recurrence.

        With `name` it also goes to the partition that the key maps to now. That differs from the
        request's if partitions were added since, and a later request under `name` may wait there, unread.
        """
        key: str | None = None
        value: bytes | None = None
        headers: list[tuple[str, bytes]] = []
        if shard.topic in self._settings.schedule_topics:  # compacted: a record needs its key
            key = fate.caller_id
        elif name is not None and self._settings.topics[shard.topic] == WRITTEN:
            key, value = name, cancel_value(name)
        else:
            headers = [(HEADER, request_id(shard, offset).encode())]

        def write(asker: Asker) -> int:
            if name is not None and key is not None:
                there, at = asker.ask(value, key=key, headers=headers).place
                if there == shard:
                    return at
            asked = asker.ask(value, key=key, headers=headers, partition=shard.partition)
            return asked.place[1]

        return self._write(shard.topic, write)

    def _write(self, topic: str, write: Callable[[Asker], T]) -> T:
        if not self._writing.acquire(timeout=ACKNOWLEDGED_WITHIN_S):
            raise NotSent(
                "nothing was written: Kafka has not acknowledged the previous records; try again"
            )
        try:
            if topic not in self._askers:
                access = kafka(self._settings, QUIET)
                self._askers[topic] = Asker(
                    access.bootstrap_servers, request_topic=topic, kafka_settings=access.settings
                )
            return write(self._askers[topic])
        finally:
            self._writing.release()

    def _written_topic(self) -> str:
        for topic, contract in self._settings.topics.items():
            if contract == WRITTEN:
                return topic
        raise NotSent(
            f"BLACKBOX_REQUEST_TOPICS={self._settings.request_topics}: none has the format "
            f"{WRITTEN}, the only one that can be written here"
        )


def _wait_taken_in(
    registry: Registry, shard: Shard, written: int, offset: int, deadline: float
) -> bool:
    """Wait until intake has read the record `written` and the request at `offset` is not in flight.

    Returns False at the deadline.
    """
    while True:
        position = registry.inspector.positions(shard)
        is_read = position is not None and position.requests > written
        if is_read and not registry.inspector.is_in_flight(shard, offset):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)


def _why(asked: object) -> tuple[str, str]:
    if isinstance(asked, Invalid):
        return asked.reason, asked.detail
    assert isinstance(asked, Cancel)
    return Reason.BAD_CANCEL, "cancels are not accepted here; use DELETE /requests/{id}"


def _now_at(place: tuple[Shard, int], fate: Fate) -> tuple[Shard, int]:
    """Where the request is now: the record that carries it on, if there is one."""
    return place if fate.carried is None else placed(fate.carried) or place
