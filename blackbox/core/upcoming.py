"""The requests that records still in Kafka will end.

Recovery asks for them when Redis has no room to store these records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from blackbox.core.parsing import touched_by
from blackbox.core.plan import Carried, Change, Replacement, Touched


class Upcoming(NamedTuple):
    """The requests that records in Kafka end, by caller id and id; carried ones as (offset, previous, origin).

    `replacement` is the replacement by id after them, as (offset, id, caller id), if there is one.
    """

    touched: Touched
    carried: Sequence[tuple[int, int, int]]
    replacement: tuple[int, str, str | None] | None

    @property
    def ending(self) -> list[int]:
        """The records among them that end what has their caller id, or what they name."""
        return [*self.touched.holding, *([] if self.replacement is None else [self.replacement[0]])]


def upcoming(changes: Sequence[tuple[int, Change]]) -> Iterator[Upcoming]:
    """The requests that these changes replace, cancel or carry, before the changes can be stored."""
    # a replacement by id counts only if the request that it names is pending by then
    first = 0
    for at, (offset, change) in enumerate(changes):
        if type(change) is Replacement:
            yield _upcoming(changes[first:at], (offset, change.id, change.caller_id))
            first = at + 1
    yield _upcoming(changes[first:], None)


def _upcoming(
    changes: Sequence[tuple[int, Change]], replacement: tuple[int, str, str | None] | None
) -> Upcoming:
    others = [one for one in changes if type(one[1]) is not Carried]
    carried = [(o, c.previous, c.origin) for o, c in changes if type(c) is Carried]
    return Upcoming(touched_by(others), carried, replacement)
