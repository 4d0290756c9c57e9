"""The decisions of the callers' rules about the requests of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from blackbox.core.interpret import refused_entry
from blackbox.core.plan import Change, Replacement, View
from blackbox.records.entry import Entry
from blackbox.records.recurrence import follows
from blackbox.records.refusal_causes import BrokenRule
from blackbox.records.request import Record, Request, Shard
from blackbox.rules.rules import QuotaRequest, Rules

OverQuota = Callable[
    [Shard, int, Sequence[QuotaRequest], str | None, tuple[int, int]], Mapping[int, BrokenRule]
]
"""The quotas that a shard's requests below an offset exceed, by offset of the request.

Last: the topic's id, and the leader epochs of the first and the last record of their batch.
"""


@dataclass(slots=True)
class BatchRulings:
    """The rules of one moment, and what they say about a batch; not for two threads.

    `_refused` maps places in the batch to the dead letters of requests that are not admitted.
    `_asked` are the requests that count against a quota.
    """

    rules: Rules
    exceeding: OverQuota
    _: KW_ONLY
    _refused: dict[int, Change] = field(default_factory=dict)
    _asked: list[QuotaRequest] = field(default_factory=list)

    def see(
        self, place: int, record: Record, asked: Request, change: Change, start_ms: int
    ) -> None:
        """Look at the request at a place of the batch, which was written at `start_ms`."""
        broken = self.rules.broken_by(asked, start_ms)
        name, rule = self.rules.of(asked.caller)
        if broken is not None:
            self._refused[place] = _not_admitted(record, asked, change, broken, start_ms)
        elif rule.has_quota and _counts(change, asked, record):
            self._asked.append(QuotaRequest(place, name, record, asked, start_ms))

    def without_refusals(self) -> BatchRulings:
        """The same rules, for a batch whose requests they do not judge again."""
        return BatchRulings(self.rules, self.exceeding)

    def over_quota(
        self, shard: Shard, end: int, epochs: tuple[int, int], view: View
    ) -> Mapping[int, BrokenRule]:
        """The quotas that new requests exceed, by offset of the request. Raises IndexFull."""
        new = [
            one
            for one in self._asked
            if one.record.offset >= view.judged and one.record.offset not in view.skipped
        ]
        return self.exceeding(shard, end, new, view.topic_id, epochs) if new else {}

    def applied(
        self, changes: Sequence[tuple[int, Change]], over: Mapping[int, BrokenRule], judged: int
    ) -> Sequence[tuple[int, Change]]:
        """The changes, with dead letters for what is refused."""
        if not self._refused and not over:
            return changes
        ruled = list(changes)
        for place, letter in self._refused.items():
            offset, _ = ruled[place]
            # requests below it were judged before the index was lost
            if offset >= judged:
                ruled[place] = offset, letter
        for place, _, record, request, start_ms in self._asked:
            if record.offset in over:
                offset, change = ruled[place]
                letter = _not_admitted(record, request, change, over[offset], start_ms)
                ruled[place] = offset, letter
        return ruled

    def counted_of(
        self, puts: Mapping[int, Request | Entry]
    ) -> Mapping[str, Sequence[tuple[int, int]]]:
        return self.rules.counted_of(puts) if self.rules.counted else {}

    def name_of(self, caller: str | None) -> str:
        """The name under which a caller is counted."""
        return self.rules.of(caller)[0]


def _counts(change: Change, request: Request, record: Record) -> bool:
    """Whether a request counts against a quota; not one that replaces, or that blackbox wrote itself."""
    is_next = request.recurs is not None and follows(record.headers)
    return type(change) is not Replacement and not is_next


def _not_admitted(
    record: Record, request: Request, change: Change, broken: BrokenRule, due_ms: int
) -> Change:
    """The dead letter of a request that is not admitted."""
    letter = refused_entry(record, broken.refusal, due_ms, request.caller, request.caller_id)
    if letter.left_bytes:
        # Redis keeps only the rule
        letter = letter._replace(detail=broken.in_general.detail)
    # a refused request still replaces: its caller has declared the earlier one obsolete
    return change._replace(content=letter) if type(change) is Replacement else letter
