"""The state of a shard owner while its shard is open, and the handover of a low-water mark to its thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Protocol

from blackbox.core.dispatch import Dispatch
from blackbox.core.intake import Intake
from blackbox.core.low_water import LowWater
from blackbox.core.plan import Positions
from blackbox.core.recovery import Recovered, Recovery
from blackbox.index.shard_index import ShardIndex
from blackbox.records.clock import ShardClock
from blackbox.records.errors import RecoveryRequired
from blackbox.records.receipt import Mark
from blackbox.records.request import Shard

logger = logging.getLogger("blackbox.engine.shard_owner")

WRITTEN_WITHIN_S = 60.0

# A walk takes longer than planned if the calls are slow. It may take this many times as long, or the time below.
LONGEST_WALK = 1.5
SHORT_WALK_S = 1.0


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ShardSession:
    """Everything that an owner holds between opening and closing a shard."""

    index: ShardIndex
    intake: Intake
    dispatch: Dispatch
    recovery: Recovery
    low_water: LowWater
    clock: ShardClock
    journal: Closable
    closing: tuple[Closable, ...]

    def note_recovered(self, recovered: Recovered) -> None:
        """Note the last mark, and what the shard belongs to."""
        self.low_water.last = recovered.mark
        self.low_water.topic_id = recovered.binding.topic_id
        self.low_water.group = recovered.binding.group
        self.dispatch.count_rates_in(recovered.binding.cluster_id)

    def close(self) -> None:
        """Close every part, even if closing another one fails."""
        for part in self.closing:
            try:
                part.close()
            except Exception:
                logger.exception("%s: closing failed; continuing", self.low_water.shard)


@dataclass(eq=False, repr=False)
class MarkHandover:
    """Hands what the caretaker's walk found to the owner's thread, which alone may use the producer."""

    shard: Shard
    wake_owner: Callable[[], None]
    _walked: tuple[ShardSession, Positions, int, Future[Mark]] | None = None

    def walk_and_wait(
        self, session: ShardSession, walk_s: float, should_stop: Callable[[float], bool]
    ) -> Mark:
        """Walk over the index, in about `walk_s`, and wait until the owner's thread has written the mark.

        `should_stop` waits for so many seconds. Raises RecoveryRequired when it has to be tried again.
        """
        # No mark is written while any request is in doubt (docs/recovery.md).
        if session.index.doubtful:
            raise RecoveryRequired(
                f"{self.shard}: cannot read yet whether some requests were delivered"
            )
        walk = session.index.walk()
        try:
            pause_s = walk_s / walk.slices()
            # A walk that ends early counts as far as it got, and the next one continues at its mark. Without a limit,
            # the end of a Spark window would void a long walk, each time.
            latest = time.monotonic() + max(SHORT_WALK_S, walk_s * LONGEST_WALK)
            while walk.slice() and time.monotonic() < latest:
                if should_stop(pause_s):
                    raise RecoveryRequired("the walk was abandoned because the shard was released")
        finally:
            walk.close()
        written: Future[Mark] = Future()
        self._walked = session, walk.positions, walk.lowest, written
        self.wake_owner()
        # Journals are trimmed below this mark, so the caller must not get it before it is in Kafka.
        try:
            return written.result(WRITTEN_WITHIN_S)
        except (TimeoutError, CancelledError):
            raise RecoveryRequired(f"{self.shard}: the mark was not written") from None

    def write(self, session: ShardSession) -> None:
        """Write the mark that a walk over this session's index found, in the owner's thread."""
        if self._walked is None:
            return
        (walked_in, positions, lowest, written), self._walked = self._walked, None
        # A walk counts only within the opening in which it began.
        if walked_in is session and written.set_running_or_notify_cancel():
            try:
                written.set_result(session.low_water.write(positions, lowest))
            except BaseException as error:
                written.set_exception(error)
                raise
        else:
            written.cancel()

    def cancel(self) -> None:
        """Leave the mark unwritten; the caretaker that waits for it walks again later."""
        walked, self._walked = self._walked, None
        if walked is not None:
            walked[3].cancel()
