"""The changes that outcomes make in an index, as a `Plan` has those of requests.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from blackbox.core.plan import Postponed
from blackbox.records.receipt import Mark


class Settlement(NamedTuple):
    """The requests that have ended, as offset -> caller id, by the receipts below `receipts`.

    `postpone` are pending entries to postpone in the same step, at `now_ms`. `counted` are the
    removals of callers whose pending requests are counted, `origins` the first records of those
    that promotion wrote. `recorded` are ignored records that are in a receipt now, `mark` is the
    low-water mark that it carries. `early` are replacements, still in Kafka, of what is removed
    here.
    """

    removals: Mapping[int, str | None]
    receipts: int
    postpone: Mapping[int, Postponed] = {}
    now_ms: int = 0
    counted: Mapping[str, Sequence[int]] = {}
    origins: Sequence[int] = ()
    recorded: Sequence[int] = ()
    mark: Mark | None = None
    early: Sequence[int] = ()
