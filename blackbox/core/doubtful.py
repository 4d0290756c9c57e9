"""Requests in doubt: the last owner may have delivered them, and its messages cannot be read yet."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from blackbox.core.ports import Journal, SettlingIndex, Writer
from blackbox.core.settling import apply_outcomes
from blackbox.records.receipt import confirmation, one_incarnation

logger = logging.getLogger("blackbox.core.dispatch")

# Between two checks; each pause is twice as long as the one before.
FIRST_PAUSE_MS, MOST_PAUSE_MS = 500, 10_000


@dataclass(slots=True)
class Doubtful:
    """The check of the claims in doubt, which is due again from `check_at_ms` on."""

    index: SettlingIndex
    writer: Writer
    journal: Journal
    check_at_ms: int = 0
    _checks: int = 0

    def check(self, now_ms: int, known: int) -> None:
        """Settle the requests whose messages can be read now, and release those without one.

        `known` is the position `requests` of the index. Raises RecoveryRequired.
        """
        claims = list(self.index.doubtful.values())
        # without patience: the due messages of the shard wait for this check
        missing, unread = self.journal.check(claims, 0)
        absent = set(missing)
        found = one_incarnation(c for c in claims if c not in unread and c not in absent)
        if unread:
            logger.warning(
                "%s: cannot read yet whether %d requests were delivered; they wait: %s",
                self.index.shard, len(unread), next(iter(unread.values())),
            )  # fmt: skip
        if found or missing:
            not_delivered = sorted(claim.offset for claim in missing)
            self.writer.begin()
            # the receipt first: after a crash, the next owner takes both from it
            position = self.writer.commit(
                replace(confirmation(found, now_ms, known), void=not_delivered)
            )
            ended_in_doubt = self.index.end_doubt(not_delivered)
            apply_outcomes(
                self.index, [*(claim.offset for claim in found), *ended_in_doubt], position
            )
        # soon again after a success: one receipt may not have had room for all that was found
        checks = self._checks = 0 if found or missing else self._checks + 1
        self.check_at_ms = now_ms + min(FIRST_PAUSE_MS << min(checks, 5), MOST_PAUSE_MS)
