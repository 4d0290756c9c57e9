"""How requests are read while an index is rebuilt, even if outcomes of some of them are gone.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from blackbox.core.interpret import refused_entry
from blackbox.core.offset_set import OffsetSet
from blackbox.core.parsing import Parsed
from blackbox.core.plan import Batch, Carried, Change, Replacement
from blackbox.records.carried import original_if_carried
from blackbox.records.entry import Entry
from blackbox.records.request import OUTCOME_UNKNOWN, Invalid, Reason, Record, Request


class Rebuild(NamedTuple):
    """How requests are read while an index is rebuilt.

    `ended` have an outcome. Replacements by id in `too_late` ended nothing. A request that was due
    before `unknown_before_ms`, or a replacement by id that was written before it, may have had an
    outcome that is gone.
    """

    ended: OffsetSet
    unknown_before_ms: int | None = None
    too_late: Container[int] = frozenset()


def outcome_unknown(batch: Batch, parsed: Parsed, before_ms: int) -> Parsed:
    """Put dead letters in place of what may have been delivered, or may have been too late to replace."""
    records = {record.offset: record for record in batch.records}
    changes = [(o, _unknown_if_due(records[o], change, before_ms)) for o, change in parsed.changes]
    rulings = None if parsed.rulings is None else parsed.rulings.without_refusals()
    return parsed._replace(changes=changes, rulings=rulings)


def _unknown_if_due(record: Record, change: Change, before_ms: int) -> Change:
    """The change that a record makes, as a dead letter if its request may have had an outcome."""
    content = change.content if isinstance(change, Carried | Replacement) else change
    due_ms = content.due_ms if isinstance(content, Request | Entry) else None
    is_old_replacement = type(change) is Replacement and record.timestamp_ms <= before_ms
    is_valid = isinstance(content, Request) or (isinstance(content, Entry) and not content.reason)
    if not (is_valid and due_ms is not None and due_ms <= before_ms) and not is_old_replacement:
        return change
    letter = Invalid(Reason.OUTCOME_UNKNOWN, OUTCOME_UNKNOWN)
    if isinstance(content, Request | Entry) and content.recurs is not None:
        # the request's own fields, not the record: the next time is asked for from these
        unknown = Entry(*content)._replace(reason=letter.reason, detail=letter.detail)
    else:
        # as its caller wrote it: a replay of the letter must not count as the promotion of a request
        original = original_if_carried(record)
        unknown = refused_entry(original, letter, due_ms or record.timestamp_ms)
        unknown = unknown._replace(caller_id=change.caller_id)
    return (
        change._replace(content=unknown) if isinstance(change, Carried | Replacement) else unknown
    )
