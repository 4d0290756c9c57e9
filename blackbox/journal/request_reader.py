"""The live reader of request topics: all shards of a process, most of them with one consumer."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message

from blackbox.core.plan import Batch
from blackbox.journal.claimed_offsets import PlaceCheck, believed
from blackbox.journal.kafka_access import (
    FETCH_BYTES,
    KafkaAccess,
    explained,
    journal_error,
    read_right,
)
from blackbox.journal.message_conversion import leader_epochs, read_records
from blackbox.journal.request_client import RequestClient
from blackbox.records.errors import JournalLost, RecoveryRequired
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal")

FIRST_RECORD_S = 0.5
# The same while shards are read apart, and are asked in turn.
IN_TURN_S = 0.02
# How long nothing is read of a shard that is read apart before it is read together with the others again.
APART_S = 10.0
# The same if others wait for its turn, and how long that takes in any case.
TURN_S = 2.0
LOGGED_AGAIN_S = 600.0
# Each has a consumer of its own, with a few threads and connections.
MOST_APART = 4

# While an offset is looked up, no shard is read.
LOOK_UP_S = 2.0
LOOK_UP = {
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 20,
    "fetch.message.max.bytes": FETCH_BYTES,
    "queued.min.messages": 1,
    "fetch.queue.backoff.ms": 1,
}


class Lost(RecoveryRequired):
    """One shard can no longer be read at its position."""

    def __init__(self, shard: Shard, detail: str) -> None:
        super().__init__(f"{shard}: {detail}")
        self.shard = shard


@dataclass(slots=True)
class _Apart:
    """A shard that is read apart, and the times (monotonic, in s) at which this began, and records were read.

    `is_read`: all of it was read, as far as is known.
    """

    client: RequestClient
    began_s: float
    read_s: float
    is_read: bool = False

    def is_over(self, now_s: float, *, others_wait: bool) -> bool:
        if others_wait and (self.is_read or now_s > self.began_s + TURN_S):
            return True
        return now_s > self.read_s + APART_S


class RequestReader:
    """Reads the shards that were started, each from its own position on.

    Up to four shards are read apart, each by a consumer of its own: those of which nothing is fetched
    beside the others. If there are more, they take turns.

    `start`, `stop`, `pause` and `resume` may be called from any thread. They take effect at the start
    of the next `read`, so no batch comes from an abandoned position.
    """

    def __init__(self, access: KafkaAccess, *, most_records: int, gather_s: float) -> None:
        self._access = access
        self._together = RequestClient(access)
        self._apart: dict[Shard, _Apart] = {}
        self._is_there = PlaceCheck(lambda: access.consumer(**LOOK_UP), LOOK_UP_S)
        self._most = most_records
        self._gather_s = gather_s
        self._turn_ended_s: dict[Shard, float] = {}
        self._asked: deque[Callable[[], None]] = deque()
        self._paused = False

    def start(self, shard: Shard, offset: int) -> None:
        """Read this shard from `offset` on, also if it was being read from elsewhere."""
        self._asked.append(lambda: self._start(shard, offset))

    def stop(self, shard: Shard) -> None:
        self._asked.append(lambda: self._stop(shard))

    def pause(self) -> None:
        """Leave all requests in Kafka until `resume`."""
        self._asked.append(lambda: self._pause(True))

    def resume(self) -> None:
        self._asked.append(lambda: self._pause(False))

    def read(self, *, wait: bool = True) -> tuple[dict[Shard, Batch], list[Lost]]:
        """Wait up to 0.5 s for a record, then gather more for `gather_s`; up to about 16 MB of each consumer.

        Returns a batch per shard, and the shards that can no longer be read. Without `wait`, returns
        only records that are already fetched.
        """
        while self._asked:  # only this thread takes from it
            self._asked.popleft()()
        before = [(shard, at) for client in self._clients for shard, at in client.positions.items()]
        try:
            batches, lost = self._batches(self._messages(wait))
            self._rearrange()
        except BaseException as error:
            # Records that were taken and not returned are read again; what was asked for since comes later.
            self._asked.extendleft(partial(self._start, *one) for one in before)
            if isinstance(error, KafkaException):
                raise journal_error(error, "cannot read request topics") from None
            raise
        return batches, lost

    def close(self) -> None:
        self._is_there.close()
        for client in self._clients:
            client.close()

    @property
    def _clients(self) -> list[RequestClient]:
        return [self._together, *(apart.client for apart in self._apart.values())]

    def _messages(self, wait: bool) -> dict[Shard, list[Message]]:
        wait_s = IN_TURN_S if self._apart else FIRST_RECORD_S
        gather_s = self._gather_s if wait else 0
        found = _by_shard(self._together.read(self._most, wait_s if wait else 0, gather_s))
        if self._apart:
            # One at each call, so that others wait for at most one large batch; in turn.
            shard = next(iter(self._apart))
            apart = self._apart[shard] = self._apart.pop(shard)
            messages = apart.client.read(self._most, 0, 0)
            apart.is_read = not messages and apart.read_s > apart.began_s
            if messages:
                found[shard] = messages
                apart.read_s = time.monotonic()
        return found

    def _rearrange(self) -> None:
        """Choose which shards are read apart from now on. Their positions must be behind all that was read."""
        now_s, waiting = time.monotonic(), self._together.starved
        for shard, apart in list(self._apart.items()):
            if apart.is_over(now_s, others_wait=len(waiting) > MOST_APART - len(self._apart)):
                self._end_apart(shard)
        # In turn, also those of a broker that answers nobody.
        waiting_longest = sorted(waiting, key=lambda shard: self._turn_ended_s.get(shard, 0.0))
        for shard in waiting_longest[: MOST_APART - len(self._apart)]:
            self._set_apart(shard)

    def _set_apart(self, shard: Shard) -> None:
        if time.monotonic() > self._turn_ended_s.get(shard, float("-inf")) + LOGGED_AGAIN_S:
            logger.info("%s: nothing is fetched beside other shards; reading it apart", shard)
        client = RequestClient(self._access)
        client.pause(self._paused)
        client.start(shard, self._together.positions[shard])
        self._together.stop(shard)
        now_s = time.monotonic()
        self._apart[shard] = _Apart(client, now_s, now_s)

    def _end_apart(self, shard: Shard) -> None:
        client = self._apart.pop(shard).client
        self._turn_ended_s[shard] = time.monotonic()
        self._together.start(shard, client.positions[shard])
        client.close()

    def _batches(
        self, by_shard: dict[Shard, list[Message]]
    ) -> tuple[dict[Shard, Batch], list[Lost]]:
        batches: dict[Shard, Batch] = {}
        lost: list[Lost] = []
        for shard, found in by_shard.items():
            client = next((one for one in self._clients if shard in one.positions), None)
            if client is None:
                continue
            errors = [error for message in found if (error := message.error()) is not None]
            for error in errors:
                why = explained(error, read_right(error, shard.topic, self._access.group_id))
                logger.warning("%s: %s; continuing to read", shard, why)
            read = [m for m in found if m.error() is None] if errors else found
            position = client.positions[shard]
            if any(_is_final(error) for error in errors):
                lost.append(Lost(shard, errors[0].str()))
            elif (doubt := self._doubt(read, position)) is not None:
                lost.append(Lost(shard, doubt))
            elif read:
                records = read_records(read)
                # Not the first record's offset: transaction markers leave gaps before it.
                end = client.positions[shard] = records[-1].offset + 1
                batches[shard] = Batch(position, end, records, leader_epochs(read))
        return batches, lost

    def _doubt(self, read: Sequence[Message], position: int) -> str | None:
        """Why an opening must read these, which looks up each offset that is in doubt."""
        try:
            count = len(believed(read, position, self._is_there))
        except (KafkaException, JournalLost) as error:
            return f"cannot look up an offset: {error}"
        if count == len(read):
            return None
        return f"the record at {position + count} or behind it claims an offset that is not its own"

    def _start(self, shard: Shard, offset: int) -> None:
        self._stop(shard)
        self._together.start(shard, offset)

    def _stop(self, shard: Shard) -> None:
        self._together.stop(shard)
        self._turn_ended_s.pop(shard, None)
        if (apart := self._apart.pop(shard, None)) is not None:
            apart.client.close()

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        for client in self._clients:
            client.pause(paused)


def _by_shard(messages: Iterable[Message]) -> dict[Shard, list[Message]]:
    found: dict[Shard, list[Message]] = {}
    for message in messages:
        topic, partition = message.topic(), message.partition()
        if topic is not None and partition is not None:
            found.setdefault(Shard(topic, partition), []).append(message)
    return found


def _is_final(error: KafkaError) -> bool:
    return error.code() in (
        KafkaError._AUTO_OFFSET_RESET,
        KafkaError.OFFSET_OUT_OF_RANGE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        # An opening reads over it.
        KafkaError._BAD_COMPRESSION,
    )
