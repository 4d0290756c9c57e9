"""The handling of a batch that brokers refused in part: each request waits, goes alone, or becomes a dead letter."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from blackbox.core.due_batch import (
    ALONE_SPREAD_MS,
    LONGEST_RETRY_MS,
    TOPIC_WIDE_REASONS,
    DueBatch,
    as_dead,
)
from blackbox.core.plan import Postponed
from blackbox.core.triage import Triage
from blackbox.records.entry import Entry
from blackbox.records.outgoing import FORMS, Refusal
from blackbox.records.request import MAY_COME_BACK, Reason

logger = logging.getLogger("blackbox.core.dispatch")


def postpone_refused(
    triage: Triage,
    batch: Mapping[int, Entry],
    suspects: Mapping[int, Refusal],
    parked: Mapping[int, str],
    now_ms: int,
    apart: Collection[int] = (),
    crowded: Collection[str] = (),
) -> dict[int, Postponed]:
    """Postpone what the broker refused: parked, later, alone, or as a dead letter.

    The requests `apart` were sent in record batches of their own. In the topics `crowded`, a record
    batch of several records was too large.
    """
    aside, one_by_one = DueBatch(), set[str]()
    unreachable = (o for o, why in suspects.items() if why[0] == Reason.UNREACHABLE)
    unavailable = triage.reported_unavailable({triage.destination(batch[o]) for o in unreachable})
    for count, (offset, refusal) in enumerate(suspects.items(), 1):
        entry = batch[offset]
        # then the refusal is its own fault
        is_alone = entry.alone or len(suspects) == 1 or offset in apart
        unavailable_now = unavailable.get(triage.destination(entry))
        if unavailable_now is not None and aside.park_if_possible(
            offset, entry, unavailable_now, parked
        ):
            continue
        # a dead letter, refused often enough for a reason that may be in its content
        has_tried = entry.reason is not None and entry.attempts >= triage.retries
        is_given_up = has_tried and refusal[0] not in TOPIC_WIDE_REASONS
        topics = {triage.destination(entry), *triage.follow_ups.topics(entry)}
        at_fault = topics.intersection(crowded)
        if refusal[0] == Reason.TOO_LARGE and at_fault and not is_alone:
            # all of them together may be too large, or all of their follow-ups
            one_by_one |= at_fault
            aside.postponed[offset] = now_ms + ALONE_SPREAD_MS, entry
        elif not is_alone and refusal[0] not in TOPIC_WIDE_REASONS:
            # one of them may be at fault: a transaction for each shows which
            later_ms = now_ms + ALONE_SPREAD_MS * count
            aside.postponed[offset] = later_ms, entry._replace(alone=True)
        elif refusal[0] in MAY_COME_BACK and not is_given_up:
            aside.retry_or_end(offset, entry, refusal, triage.retries, now_ms)
        else:
            aside.postponed[offset] = _as_letter(triage, offset, entry, refusal, now_ms)
    triage.targets.send_one_by_one(one_by_one)
    letters = [why for o, why in suspects.items() if batch[o].reason and why[0] in MAY_COME_BACK]
    if letters:
        triage.log_waiting_letters(len(letters), letters[0][1])
    return aside.postponed | {offset: (now_ms, entry) for offset, entry in aside.dead.items()}


def _as_letter(
    triage: Triage, offset: int, entry: Entry, refusal: Refusal, now_ms: int
) -> tuple[int, Entry]:
    """Handle a final refusal: a message becomes a dead letter, a dead letter takes a smaller form."""
    reason, detail = refusal
    if entry.reason is None:
        return now_ms, as_dead(entry, refusal)
    shortened = entry.shortened + 1
    # of a letter with follow-ups each form is sent again, beside smaller follow-ups
    if shortened == (2 * FORMS if triage.follow_ups.topics(entry) else FORMS):
        logger.error("%s: its dead letter stays pending: %s", triage.shard.source(offset), detail)
        return now_ms + LONGEST_RETRY_MS, entry
    if shortened == FORMS:
        return now_ms, entry._replace(shortened=shortened)
    detail_of_short_form = (
        f"shortened, because the broker refused the full letter ({reason}: {detail}); "
        f"{entry.detail}"
    )
    return now_ms, entry._replace(shortened=shortened, detail=detail_of_short_form)
