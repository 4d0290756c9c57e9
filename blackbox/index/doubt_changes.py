"""Requests in doubt: the last owner may have delivered them, and that cannot be read yet."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping

from blackbox.index.guarded_index import MAX_CONTENTION
from blackbox.index.lookups import Lookups
from blackbox.records.receipt import Claim


class DoubtChanges(Lookups):
    """The beginning and the end of doubts."""

    def mark_doubtful(self, claims: Mapping[int, Claim]) -> None:
        """Record that it is not known whether these were delivered: until it is, nothing else ends them."""
        with self._lock:
            self._watch_positions(self._keys.state)
            every = {**self.doubtful, **claims}
            self._run_multi_while_opening(self._doubt(every), even_if_full=True)
            self.doubtful = every

    def end_if_undelivered(self, offsets: Collection[int]) -> None:
        """Record that something in Kafka ends these requests in doubt, if they were not delivered."""
        with self._lock:
            self._mark_while_opening(self._keys.unwanted, sorted(offsets))

    def end_doubt(self, offsets: Collection[int]) -> set[int]:
        """End the doubt about these requests, which are now known not to be delivered.

        Those that were ended while they were in doubt stay as they are, and are returned.
        """
        with self._lock:
            for _ in range(MAX_CONTENTION):
                found = self._watch_positions(self._keys.receipts, self._keys.unwanted)
                ended_in_doubt = set(self._scores(self._keys.unwanted, list(offsets)))
                left = without(self.doubtful, set(offsets) - ended_in_doubt)
                if self._exec_even_if_full(list(self._doubt(left)), found):
                    self.doubtful = left
                    return ended_in_doubt
            raise self._contended("resolving doubtful requests")


def without(claims: Mapping[int, Claim], offsets: Container[int]) -> dict[int, Claim]:
    """These claims but for those about some requests."""
    return {offset: claim for offset, claim in claims.items() if offset not in offsets}
