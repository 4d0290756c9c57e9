"""The live reader of request topics: all shards of a process, most of them with one consumer."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message

from blackbox.core.plan import Batch
from blackbox.journal.claimed_offsets import believed
from blackbox.journal.kafka_access import (
    KafkaAccess,
    explained,
    journal_error,
    read_right,
)
from blackbox.journal.message_conversion import leader_epochs, read_records
from blackbox.journal.offset_lookup import OffsetLookup
from blackbox.journal.polled_messages import OUT_OF_RANGE, is_unreadable
from blackbox.journal.request_client import RequestClient
from blackbox.journal.separate_reader import SeparateReader
from blackbox.records.errors import JournalLost, RecoveryRequired
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal")

FIRST_RECORD_S = 0.5
# The same while shards are read apart, because the same loop takes what those have read.
IN_TURN_S = 0.02
# How long a shard is read apart before it is read together with the others again.
TURN_S = 2.0
LOGGED_AGAIN_S = 600.0
# Each such shard has a thread and two or three clients, with threads and connections of their own.
MOST_APART = 4

# While an offset is looked up, no shard is read.
LOOK_UP_S = 0.5


class Lost(RecoveryRequired):
    """One shard can no longer be read at its position."""

    def __init__(self, shard: Shard, detail: str) -> None:
        super().__init__(f"{shard}: {detail}")
        self.shard = shard


class RequestReader:
    """Reads the shards that were started, each from its own position on.

    Most are read together, with one consumer. A shard is read apart, by a thread of its own, when nothing
    of it is fetched beside the others, or when it must be read with care: a batch that cannot be read, an
    offset in doubt. Up to four are read apart at once, and the others wait for their turn.

    `start`, `stop`, `pause` and `resume` may be called from any thread. They take effect at the start
    of the next `read`, so no batch comes from an abandoned position.
    """

    def __init__(self, access: KafkaAccess, *, most_records: int, gather_s: float) -> None:
        self._access = access
        self._together = RequestClient(access)
        self._apart: dict[Shard, SeparateReader] = {}
        # the shards that wait to be read apart; with a position if they cannot be read with others until then
        self._in_line: dict[Shard, int | None] = {}
        # they have been stopped, and their threads are about to end
        self._ending: list[SeparateReader] = []
        self._lookup = OffsetLookup(access, LOOK_UP_S)
        self._most = most_records
        self._gather_s = gather_s
        self._logged_s: dict[Shard, float] = {}
        self._asked: deque[Callable[[], None]] = deque()
        self._paused = False

    def start(self, shard: Shard, offset: int) -> None:
        """Read this shard from `offset` on, even if it was being read from elsewhere."""
        self._asked.append(lambda: self._start(shard, offset))

    def stop(self, shard: Shard) -> None:
        self._asked.append(lambda: self._stop(shard))

    def pause(self) -> None:
        """Leave all requests in Kafka until `resume`."""
        self._asked.append(lambda: self._pause(True))

    def resume(self) -> None:
        self._asked.append(lambda: self._pause(False))

    def read(self, *, wait: bool = True) -> tuple[dict[Shard, Batch], list[Lost]]:
        """Wait up to 0.5 s for a record, then gather more for `gather_s`; up to about 16 MB of each client.

        Returns a batch per shard, and the shards that can no longer be read. Without `wait`, returns
        only records that are already fetched.
        """
        while self._asked:  # only this thread takes from it
            self._asked.popleft()()
        before = self._positions()
        try:
            batches, lost = self._batches(self._messages(wait))
            if not self._paused:
                batches |= self._read_apart()
            self._rearrange()
        except BaseException as error:
            # Records that were taken and not returned are read again; what was asked for since comes later.
            self._asked.extendleft(partial(self._start, *one) for one in before.items())
            if isinstance(error, KafkaException):
                raise journal_error(error, "cannot read request topics") from None
            raise
        return batches, lost

    def close(self) -> None:
        self._lookup.close()
        self._together.close()
        readers = [*self._apart.values(), *self._ending]
        for reader in readers:
            reader.stop()
        for reader in readers:
            reader.close()

    def _positions(self) -> dict[Shard, int]:
        apart = {shard: reader.position for shard, reader in self._apart.items()}
        waiting = {shard: at for shard, at in self._in_line.items() if at is not None}
        return self._together.positions | waiting | apart

    def _messages(self, wait: bool) -> dict[Shard, list[Message]]:
        wait_s = IN_TURN_S if self._apart else FIRST_RECORD_S
        gather_s = self._gather_s if wait else 0
        return _by_shard(self._together.read(self._most, wait_s if wait else 0, gather_s))

    def _batches(
        self, by_shard: dict[Shard, list[Message]]
    ) -> tuple[dict[Shard, Batch], list[Lost]]:
        batches: dict[Shard, Batch] = {}
        lost: list[Lost] = []
        for shard, found in by_shard.items():
            if (position := self._together.positions.get(shard)) is None:
                continue  # stopped since
            errors = [error for message in found if (error := message.error()) is not None]
            for error in errors:
                why = explained(error, read_right(error, shard.topic, self._access.group_id))
                logger.warning("%s: %s; continuing to read", shard, why)
            read = [m for m in found if m.error() is None] if errors else found
            if any(map(is_unreadable, errors)) or self._is_in_doubt(found, position):
                self._in_line[shard] = position
                self._set_aside(shard)
            elif any(_is_final(error) for error in errors):
                lost.append(Lost(shard, errors[0].str()))
            elif read:
                records = read_records(read)
                # Not the first record's offset: transaction markers leave gaps before it.
                end = self._together.positions[shard] = records[-1].offset + 1
                batches[shard] = Batch(position, end, records, leader_epochs(read))
        return batches, lost

    def _is_in_doubt(self, read: Sequence[Message], position: int) -> bool:
        """Whether these must be read with care, because a record may claim an offset that is not its own."""
        try:
            return len(believed(read, position, self._lookup.is_there)) < len(read)
        except (KafkaException, JournalLost) as error:
            logger.warning("cannot look up the offset of a request: %s", error)
            return True

    def _read_apart(self) -> dict[Shard, Batch]:
        found = ((shard, reader.take()) for shard, reader in self._apart.items())
        return {shard: batch for shard, batch in found if batch is not None}

    def _rearrange(self) -> None:
        """Choose which shards are read apart from now on. Their positions must be past all that was read."""
        for shard, reader in list(self._apart.items()):
            if reader.is_over:
                del self._apart[shard]
                self._together.start(shard, reader.position)
        for shard in self._together.starved:
            self._in_line.setdefault(shard)
        self._ending = [reader for reader in self._ending if reader.is_alive]
        while self._in_line and not self._paused and self._has_room:
            shard = next(iter(self._in_line))
            position = self._in_line.pop(shard)
            if position is None:
                if shard not in self._together.starved:
                    continue
                position = self._together.positions[shard]
                self._set_aside(shard)
            self._apart[shard] = SeparateReader(self._access, shard, position, longest_s=TURN_S)

    @property
    def _has_room(self) -> bool:
        return len(self._apart) + len(self._ending) < MOST_APART

    def _set_aside(self, shard: Shard) -> None:
        """Do not read this shard together with the others."""
        now_s = time.monotonic()
        if now_s > self._logged_s.get(shard, -math.inf) + LOGGED_AGAIN_S:
            logger.info("%s: it cannot be read together with others now; reading it apart", shard)
            self._logged_s[shard] = now_s
        self._together.stop(shard)

    def _start(self, shard: Shard, offset: int) -> None:
        self._stop(shard)
        self._together.start(shard, offset)

    def _stop(self, shard: Shard) -> None:
        self._together.stop(shard)
        self._in_line.pop(shard, None)
        if (reader := self._apart.pop(shard, None)) is not None:
            reader.stop()
            self._ending.append(reader)

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        if paused:
            for shard, reader in list(self._apart.items()):
                self._stop(shard)
                self._in_line[shard] = reader.position
        self._together.pause(paused)


def _by_shard(messages: Iterable[Message]) -> dict[Shard, list[Message]]:
    found: dict[Shard, list[Message]] = {}
    for message in messages:
        topic, partition = message.topic(), message.partition()
        if topic is not None and partition is not None:
            found.setdefault(Shard(topic, partition), []).append(message)
    return found


def _is_final(error: KafkaError) -> bool:
    return error.code() in (
        *OUT_OF_RANGE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    )
