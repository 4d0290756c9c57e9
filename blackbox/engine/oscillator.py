"""A record for each second, on a topic of its own, written by the owner of the first shard."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event, Thread

from blackbox.config.settings import Settings
from blackbox.engine.metrics import Metrics
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.oscillator_topic import PARTITION, OscillatorTopic, WrittenSecond
from blackbox.records.clock import CLOCKS_APART_MS, Clock
from blackbox.records.errors import RecoveryRequired
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.engine.oscillator")

# The most seconds in one transaction; only a gap after an outage has as many.
BATCH = 10_000

TURN_CHECKED_EVERY_S = 0.2

RETRIED_AFTER_S = 1.0

# How long after a last second that is wrong the topic is read again.
READ_AGAIN_AFTER_S = 60.0


def seconds_to_write(last: int, now_ms: int) -> range:
    """The seconds to write next, behind the last one written."""
    return range(last + 1, now_ms // 1000 + 1)[:BATCH]


@dataclass(eq=False, repr=False)
class Oscillator:
    """Writes every second once, from `start` to `stop`, while this process owns the first shard.

    That is partition 0 of the request topic that is first by name. Does nothing without an oscillator
    topic. `shards` are those that this process owns.
    """

    settings: Settings
    access: KafkaAccess
    metrics: Metrics
    clock: Clock
    shards: Callable[[], Collection[Shard]]

    def __post_init__(self) -> None:
        self._topic = self.settings.oscillator_topic
        # The group gives a shard to one process at a time: this one elects the writer.
        self._first_shard = Shard(min(self.settings.topics), 0)
        self._last: int | None = None
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="oscillator", daemon=True)

    def start(self) -> None:
        if self._topic is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop writing once the transaction in flight has ended."""
        self._stopping.set()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _lag_s(self) -> int:
        """How many seconds have begun and are not written."""
        now = self.clock.earliest_ms() // 1000
        return 0 if self._last is None else max(0, now - self._last)

    def _is_ours(self) -> bool:
        return not self._stopping.is_set() and self._first_shard in self.shards()

    def _run(self) -> None:
        assert self._topic is not None
        while not self._stopping.is_set():
            if not self._is_ours():
                self.metrics.oscillator_lag(self._topic, None)
                self._last = None
                self._stopping.wait(TURN_CHECKED_EVERY_S)
                continue
            try:
                self._write_while_ours(self._topic)
            except RecoveryRequired as reason:
                if not self._stopping.is_set():
                    logger.warning("%s; retrying in %g s", reason, RETRIED_AFTER_S)
            except Exception:
                logger.exception(
                    "%s: unexpected error; retrying in %g s", self._topic, RETRIED_AFTER_S
                )
            self._stopping.wait(RETRIED_AFTER_S if self._is_ours() else 0)

    def _write_while_ours(self, topic: str) -> None:
        # A new one for each attempt: it is unusable after its first error.
        seconds = OscillatorTopic(self.access, topic)
        try:
            # Fences the previous writer, then reads where that one ended. The state is in the topic
            # itself, because a position in Redis could be rolled back.
            last = seconds.open(self.clock.earliest_ms())
            # An empty topic begins with the second of the first attempt.
            first = self._last or self.clock.earliest_ms() // 1000 - 1
            is_wrong = last is not None and self._is_wrong(last)
            # A wrong second may be a record of somebody else: the lag shows that nothing is written.
            self._last = first if last is None or is_wrong else last.second
            self.metrics.oscillator_lag(topic, self._lag_s)
            if last is not None and is_wrong:
                self._wait_for_another(topic, last)
                return
            logger.info(
                "%s: writing seconds; the last is %s", topic, last.second if last else "none yet"
            )
            self._write_on(topic, seconds)
        finally:
            seconds.close()

    def _write_on(self, topic: str, seconds: OscillatorTopic) -> None:
        """Write the seconds behind the last one, while the topic is ours and the last one is not ahead."""
        assert self._last is not None
        while self._is_ours() and not self._is_ahead(self._last):
            now_ms = self.clock.earliest_ms()
            if due := seconds_to_write(self._last, now_ms):
                seconds.write(due)
                self._last = due[-1]
                self.metrics.oscillated(topic, len(due))
            else:
                self._stopping.wait(1 - now_ms % 1000 / 1000)

    def _is_ahead(self, second: int) -> bool:
        """Whether a second has not begun by any clock, even if clocks are apart."""
        return second * 1000 > self.clock.latest_ms() + CLOCKS_APART_MS

    def _is_wrong(self, last: WrittenSecond) -> bool:
        return last.second < last.lowest or self._is_ahead(last.second)

    def _wait_for_another(self, topic: str, last: WrittenSecond) -> None:
        """Log that nothing is written behind this second, and wait for a minute: then the topic is read again."""
        place = f"the record at partition {PARTITION}, offset {last.offset} has the second {last.second}"
        remedy = "append one with the last correct second as its key and the value 1; blackbox continues from there"
        if last.second < last.lowest:
            logger.error(
                "%s: no second is written: %s, which is much too low; %s", topic, place, remedy
            )
        else:
            logger.error(
                "%s: no second is written before %s: %s, which is %d s ahead. If a clock was ahead, wait. "
                "If another program wrote the record, %s",
                topic, datetime.fromtimestamp(last.second, UTC).isoformat(), place,
                last.second - self.clock.latest_ms() // 1000, remedy,
            )  # fmt: skip
        until_s = time.monotonic() + READ_AGAIN_AFTER_S
        while self._is_ours() and self._is_wrong(last) and time.monotonic() < until_s:
            self._stopping.wait(TURN_CHECKED_EVERY_S)
