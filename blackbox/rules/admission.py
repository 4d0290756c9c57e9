"""Admission: which requests exceed a caller's quotas."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

from blackbox.core.plan import UNKNOWN_EPOCH
from blackbox.records.errors import IndexLost
from blackbox.records.refusal_causes import BrokenRule
from blackbox.records.request import Second, Shard
from blackbox.rules.file import RulesFile
from blackbox.rules.rules import OTHERS, CallerCounts, CallerRule, QuotaRequest, Rules
from blackbox.rules.rulings import BatchRulings
from blackbox.rules.target_rates import SILENT_FOR_S

# Other services admit requests of the caller in the same time, so its quota is approximate.
PENDING_KNOWN_FOR_S = 1.0


logger = logging.getLogger("blackbox.rules")


class _Counted(NamedTuple):
    """Up to where a shard's requests are counted, and the refusals of the last batch.

    `epoch` is the leader epoch of the last record of that batch.
    """

    topic_id: str | None
    epoch: int = UNKNOWN_EPOCH
    end: int = 0
    refused: Mapping[int, BrokenRule] = {}

    def is_of(self, topic_id: str | None, epoch: int) -> bool:
        """Whether it says something about a batch that begins with a record of this leader epoch."""
        # A topic that was created again begins at offset 0. In a log that lost its end, records of a
        # later leader have taken the offsets of lost ones; those that are read again have their epoch.
        is_later = epoch > self.epoch != UNKNOWN_EPOCH
        return self.topic_id == topic_id and not is_later


class CallerAdmission:
    """Judges requests that are read for the first time. Safe from any thread.

    `shards` are those in which a caller's pending requests are counted.
    """

    def __init__(
        self, file: RulesFile, counts: CallerCounts, shards: Callable[[], Iterable[Shard]]
    ) -> None:
        self._file = file
        self._counts = counts
        self._shards = shards
        self._pending: dict[str, tuple[float, int]] = {}
        self._counted: dict[Shard, _Counted] = {}
        self._lock = Lock()
        self._is_silent = False
        self._ask_at_s = -math.inf

    def rules(self) -> Rules:
        return self._file.rules()

    def rulings(self) -> BatchRulings:
        return BatchRulings(self.rules(), self.over_quota)

    def over_quota(
        self,
        shard: Shard,
        end: int,
        asked: Sequence[QuotaRequest],
        topic_id: str | None = None,
        epochs: tuple[int, int] = (UNKNOWN_EPOCH, UNKNOWN_EPOCH),
    ) -> dict[int, BrokenRule]:
        """The quotas that requests below `end` exceed, by offset of the request.

        `topic_id` is Kafka's id of the request topic, `epochs` are those of the first and the last record
        of the batch. Raises IndexFull when Redis has no room.
        """
        rules = self.rules()
        with self._lock:
            first = min((one.record.offset for one in asked), default=end)
            counted = self._counted.get(shard)
            if counted is None or not counted.is_of(topic_id, epochs[0]):
                counted = _Counted(topic_id)
            by_caller: defaultdict[str, list[QuotaRequest]] = defaultdict(list)
            for one in asked:
                # a batch that is stored again is not counted again
                if one.record.offset >= counted.end:
                    by_caller[one.caller].append(one)
            refused: dict[int, BrokenRule] = {}
            for caller, theirs in by_caller.items():
                # quotas are approximate: if the Redis that counts does not answer, they are not applied
                if time.monotonic() < self._ask_at_s:
                    break
                rule = rules.others if caller == OTHERS else rules.of(caller)[1]
                try:
                    refused |= self._too_fast(caller, rule, theirs)
                    left = [one for one in theirs if one.record.offset not in refused]
                    refused |= self._too_many(caller, rule, left)
                    self._is_silent = False
                except IndexLost as silent:
                    self._note_silence(silent)
            again = {o: why for o, why in counted.refused.items() if o >= first}
            self._counted[shard] = _Counted(
                topic_id, max(counted.epoch, epochs[1]), max(counted.end, end), again | refused
            )
            return {o: why for o, why in (again | refused).items() if o < end}

    def _note_silence(self, why: IndexLost) -> None:
        # Each question waits for seconds in vain, and all shards wait for intake.
        self._ask_at_s = time.monotonic() + SILENT_FOR_S
        if not self._is_silent:
            logger.warning("cannot count quotas, so they are not enforced until it can: %s", why)
        self._is_silent = True

    def _too_fast(
        self, caller: str, rule: CallerRule, asked: Sequence[QuotaRequest]
    ) -> dict[int, BrokenRule]:
        most = rule.requests_per_second
        if most is None:
            return {}
        seconds: defaultdict[Second, list[int]] = defaultdict(list)
        for one in asked:
            # the second in which it was written: a backlog that is read at once is not a burst
            seconds[Second("requests", caller, one.start_ms // 1000)].append(one.record.offset)
        before = self._counts.count({second: len(found) for second, found in seconds.items()})
        why = f"CALLER_SERVICE {caller!r} has already sent {most} requests in this second"
        return {
            offset: BrokenRule(
                "requests_per_second", f"{why} (requests_per_second); send it again later"
            )
            for second, offsets in seconds.items()
            for offset in offsets[max(0, most - before[second]) :]
        }

    def _too_many(
        self, caller: str, rule: CallerRule, asked: Sequence[QuotaRequest]
    ) -> dict[int, BrokenRule]:
        most = rule.most_pending
        if most is None:
            return {}
        known_s, pending = self._pending.get(caller, (float("-inf"), 0))
        if time.monotonic() - known_s > PENDING_KNOWN_FOR_S:
            known_s, pending = time.monotonic(), self._counts.pending(caller, self._shards())
        admitted = max(0, min(len(asked), most - pending))
        self._pending[caller] = known_s, pending + admitted
        why = f"CALLER_SERVICE {caller!r} has {most} requests pending (most_pending)"
        return {
            one.record.offset: BrokenRule("most_pending", f"{why}; send it again later")
            for one in asked[admitted:]
        }
