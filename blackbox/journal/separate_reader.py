"""A part of a shard that is read apart from all other shards, in a thread of its own."""

from __future__ import annotations

import logging
import time
from contextlib import closing, suppress
from queue import Empty, Full, Queue
from threading import Event, Thread

from confluent_kafka import KafkaException, Message

from blackbox.core.plan import Batch
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.message_conversion import leader_epochs, read_records
from blackbox.journal.partition_reader import PartitionReader
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.journal")

# A batch may have 16 MB, so few are read ahead.
BATCHES_AHEAD = 1
MOST_WITHOUT_CONTENT = 100
# The shard is read again later.
SILENCE_S = 3.0
LOOK_S = 0.2
# A shard that can be read in neither way is tried again and again.
FAILED_S = 1.0
CLOSE_S = 3.0


class SeparateReader:
    """Reads a shard from `position` on, to the end that it has at the start, or for about `longest_s`.

    `position` is the next offset of what was not taken yet. Only the thread that created it may use it.
    """

    def __init__(
        self, access: KafkaAccess, shard: Shard, position: int, *, longest_s: float
    ) -> None:
        self.position = position
        self._reader = PartitionReader(access, silence_s=SILENCE_S)
        self._shard = shard
        self._ends_s = time.monotonic() + longest_s
        self._found: Queue[Batch] = Queue(BATCHES_AHEAD)
        self._stopped = Event()
        self._thread = Thread(target=self._run, name=f"separate reader {shard}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it still has a thread and its clients."""
        return self._thread.is_alive()

    @property
    def is_over(self) -> bool:
        """Whether all that was read has been taken, and no more will be."""
        return not self.is_alive and self._found.empty()

    def take(self) -> Batch | None:
        """The next result, if there is one; does not wait."""
        try:
            batch = self._found.get_nowait()
        except Empty:
            return None
        self.position = batch.end
        return batch

    def stop(self) -> None:
        """End it; what was not taken is dropped."""
        self._stopped.set()

    def close(self) -> None:
        """The same, and wait for its thread, for 3 s at most."""
        self.stop()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            with closing(self._reader):
                self._read()
        except (RecoveryRequired, KafkaException) as error:
            # It is read together with others again, where an error that lasts is met as well.
            logger.warning("%s: cannot be read apart: %s", self._shard, error)
            self._stopped.wait(FAILED_S)

    def _read(self) -> None:
        position, end = self.position, self._reader.bounds(*self._shard).end
        waiting: list[Message] = []
        for messages, reached in self._reader.read_patiently(*self._shard, position, end):
            waiting += messages
            # Records without content come one by one, and each batch costs its owner a turn.
            has_content = any(message.error() is None for message in messages)
            is_over = self._stopped.is_set() or time.monotonic() > self._ends_s or reached >= end
            if has_content or is_over or len(waiting) >= MOST_WITHOUT_CONTENT:
                self._put(Batch(position, reached, read_records(waiting), leader_epochs(waiting)))
                position, waiting = reached, []
            if is_over:
                return

    def _put(self, batch: Batch) -> None:
        while not self._stopped.is_set():
            with suppress(Full):
                self._found.put(batch, timeout=LOOK_S)
                return
