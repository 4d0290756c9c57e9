"""Bugs in `blackbox/core`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "remove-before-commit",
        "Dispatch removes the entries of a batch from the index before it commits the Kafka transaction.",
        (
            Change(
                "core/dispatch.py",
                "            position = self.writer.commit(delivery.receipt(dead), latest_ms)\n",
                "            gone = {offset: entry.caller_id for offset, entry in ended.items()}\n"
                "            self.index.settle(Settlement(gone, self.index.positions.receipts))\n"
                "            position = self.writer.commit(delivery.receipt(dead), latest_ms)\n",
            ),
        ),
        ("crash after D3", "reply to EndTxn lost"),
    ),
    Bug(
        "receipts-before-fence",
        "A new owner reads the end of the receipts before it fences the earlier owner.",
        (
            Change(
                "core/recovery.py",
                "        self.confirm()  # R1\n",
                "        before = self.journal.receipt_bounds().end\n        self.confirm()\n",
            ),
            Change(
                "core/recovery.py",
                "        outcomes = self._outcomes(start, position)",
                "        outcomes = self._outcomes(start, before)",
            ),
        ),
        ("service frozen past its session", "one of two services killed"),
    ),
    Bug(
        "the-last-receipt-is-believed",
        "Recovery does not check whether the messages of the last receipt exist.",
        (
            Change(
                "core/barrier.py",
                "        missing, unread = journal.check(claims, PATIENCE_S)\n",
                "        missing, unread = [], {}  # type: ignore[var-annotated]\n",
            ),
        ),
        ("coordinator torn",),
    ),
    Bug(
        "open-before-read",
        "Recovery does not read the request topic to its end before dispatch starts.",
        (Change("core/recovery.py", "        self._catch_up(outcomes)  # R5\n", ""),),
        ("from after a cancel",),
    ),
    Bug(
        "early-forgotten",
        "Recovery removes a replaced request early, but does not record its replacement in `early`. The replacement is then too late.",
        (
            Change(
                "core/settling.py",
                "index.positions.receipts, early=[offset]))",
                "index.positions.receipts))",
            ),
        ),
        (),
    ),
    Bug(
        "ended-by-id-forgotten",
        "Intake does not record a cancel by the first id of a cold request.",
        (
            Change(
                "core/resolve.py",
                "            plan.cancelled_cold[original] = by\n",
                "            pass\n",
            ),
        ),
        (),
    ),
    Bug(
        "ignored-not-told",
        "The receipt of a mark does not name the conditional records that did not count.",
        (Change("core/low_water.py", "ignored=ignored", "ignored=[]"),),
        ("crash after a promotion was committed",),
    ),
    Bug(
        "receipts-of-the-last-pair",
        "A mark takes its receipts offset from the last pair, even if receipts below it are still needed.",
        (
            Change(
                "core/low_water.py",
                "*(pair[1] for pair in behind)",
                "*(pair[1] for pair in pairs)",
            ),
        ),
        ("Redis emptied after a trim",),
    ),
    Bug(
        "jump-to-the-start",
        "An index whose position is below the start of a journal is kept, and continues at the start.",
        (
            Change(
                "core/index_preparation.py",
                "if is_behind and (kept.is_rebuilding or self._mark_covers_pending(requests, binding)):",
                "if is_behind and kept.is_rebuilding:",
            ),
        ),
        ("Redis put back to before a trim",),
    ),
    Bug(
        "unknown-believed",
        "A carried record without a recorded verdict counts, even if the request that it carries is not pending.",
        (
            Change(
                "core/plan.py",
                "return offset < below and offset not in self.ignored",
                "return offset not in self.ignored",
            ),
        ),
        ("crash after a promotion was committed",),
    ),
    Bug(
        "cut-not-heard",
        "The outcomes of requests that the log lost end the new requests at the same offsets.",
        (
            Change(
                "core/outcomes.py",
                "            self._forget_from(first)\n",
                "            pass\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "too-late-forgotten",
        "A replacement by id that was too late counts if the named request is pending when it is read again.",
        (
            Change(
                "core/resolve.py",
                "is_in_time = not was_too_late and _end_named(",
                "is_in_time = _end_named(",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "early-leaves-a-holder",
        "If Redis has no room for a replacement, recovery keeps the pending request with its caller id.",
        (
            Change(
                "core/settling.py",
                "own = [] if caller_id is None else [caller_id]",
                "own: list[str] = []",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "fenced-for-nothing",
        "Recovery does not check the index before it fences. A service that cannot open a shard fences a running rebind.",
        (
            Change(
                "core/recovery.py",
                "        preparation.load()  # `blackbox rebind` may be running, and would be fenced for nothing\n",
                "",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "unknown-recurs-no-more",
        "A recurring request ends when its outcome becomes unknown.",
        (
            Change(
                "core/rebuild.py",
                "if isinstance(content, Request | Entry) and content.recurs is not None:",
                "if False:",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "first-id-not-looked-for",
        "The check of follow-ups does not find a cancel by the first id of a carried request.",
        (
            Change(
                "core/follow_ups.py",
                "names = (offset, entry.origin, entry.caller_id)",
                "names = (offset, entry.caller_id)",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "recurrence-ends-without-a-letter",
        "A recurring request whose next time cannot be computed ends with a line in the log, and without a dead letter.",
        (
            Change(
                "core/follow_ups.py",
                "                        value = request_value_at(entry, None)\n",
                "                        continue\n",
            ),
        ),
        (),
        (
            "tests/unit/test_follow_ups.py"
            "::test_a_recurring_request_without_a_next_time_ends_as_a_dead_letter",
        ),
    ),
    Bug(
        "backlog-remembered-whole",
        "The check of follow-ups keeps the names in all records of the backlog in memory, without a limit.",
        (
            Change(
                "core/follow_ups.py",
                "has_room = is_next and len(self._hashes) < MOST_REMEMBERED",
                "has_room = is_next",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "not-looked-for-beyond",
        "The check of follow-ups does not find a cancel in a very long backlog. The recurring request continues.",
        (
            Change(
                "core/follow_ups.py",
                "elif name in self._wanted:",
                "elif False:",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "waits-for-a-follow-up-that-never-fits",
        "A request waits for a follow-up that its topic refuses each time, and each attempt opens the shard again.",
        (
            Change(
                "core/delivery_transaction.py",
                "            if refusal is None or refusal[0] in MAY_COME_BACK:\n",
                "            if True:\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "waits-for-a-follow-up-that-brokers-refuse",
        "A request waits for a follow-up that the brokers refuse, and that blackbox could not check before.",
        (
            Change(
                "core/follow_ups.py",
                "        return (smaller,) if entry.shortened >= FORMS else (message, smaller)\n",
                "        return (message, smaller)\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "opened-again-for-each-later-record",
        "A shard is opened again whenever a later record ends a request in delivery. One busy id stops the shard.",
        (
            Change(
                "core/delivery_transaction.py",
                "        if any(ended[offset].waits >= MOST_WAITS_FOR_INTAKE for offset in superseded):\n",
                "        if True:\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "a-busy-id-holds-up-others",
        "A request whose id was superseded is sent with the others again, and takes them back again.",
        (
            Change(
                "core/follow_ups.py",
                "            if self._contended.get(hash(entry.caller_id), 0) > now_ms:\n",
                "            if False:\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_superseded_ids.py::test_an_id_that_was_superseded_does_not_abort_the_others_again",
        ),
    ),
    Bug(
        "busy-ids-hold-up-others",
        "After an id was superseded, the others wait for the next check, in which the next id is superseded.",
        (
            Change(
                "core/dispatch.py",
                "        for part in self.triage.follow_ups.parts(sent, superseded):\n",
                "        did.is_full = True\n        for part in ():\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_superseded_ids.py::test_ids_that_are_each_written_again_hold_up_no_other_request",
        ),
    ),
    Bug(
        "busy-ids-abort-whole-batches",
        "The others are sent again together. While ids are written again in each transaction, none is delivered.",
        (
            Change(
                "core/follow_ups.py",
                "        half = (len(others) + 1) // 2\n",
                "        half = len(others)\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_superseded_ids.py::test_while_each_transaction_is_superseded_by_another_id_the_others_are_delivered",
        ),
    ),
    Bug(
        "a-busy-id-is-read-ahead",
        "A request that is sent after the others is read ahead while they are delivered, and is delivered twice.",
        (
            Change(
                "core/dispatch.py",
                "            is_whole = not batch.alone and not later\n",
                "            is_whole = not batch.alone\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "recovery-never-helps-intake",
        "A request waits without end for a later record that intake cannot store, because Redis is full.",
        (
            Change(
                "core/delivery_transaction.py",
                "            self._take_back(superseded)\n",
                "            pass\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "lost-end-unseen",
        "After a change of leader, intake does not check whether the last record that it read still exists.",
        (
            Change(
                "core/intake.py",
                "                if is_again or view.tail.may_be_lost(parsed.epoch):\n",
                "                if False:\n",
            ),
        ),
        (),
        ("tests/unit/test_intake.py", "tests/service/test_rebind.py"),
    ),
    Bug(
        "refused-records-kept",
        "Redis stores large refused records completely.",
        (
            Change(
                "core/interpret.py",
                "    if size <= MOST_REFUSED_BYTES and len(encode(whole)) <= MOST_REFUSED_BYTES:\n",
                "    if True:\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "refused-records-measured-unstored",
        "Redis stores small refused records completely, even if their stored form is large.",
        (Change("core/interpret.py", " and len(encode(whole)) <= MOST_REFUSED_BYTES:\n", ":\n"),),
        (),
        ("tests/contract/test_refused_requests.py",),
    ),
    Bug(
        "refused-read-at-once",
        "Dispatch reads the large records of all dead letters of a batch from Kafka at once.",
        (
            Change(
                "core/due_batch.py",
                "            if read_bytes > MOST_LETTER_BYTES and offset != near[0]:\n",
                "            if False:\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "scattered-letters-read-at-once",
        "Dispatch reads the records of dead letters whose offsets are far apart before it sends the messages of a batch.",
        (
            Change(
                "core/due_batch.py",
                "            elif offset - start > MOST_LETTER_SPAN:\n",
                "            elif False:\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "invalid-records-read-at-once",
        "Dispatch reads the records of all invalid requests of a batch from Kafka at once.",
        (
            Change(
                "core/triage.py",
                "self.journal.first_records(near, MOST_LETTER_BYTES)\n",
                "self.journal.first_records(near, 1 << 62)\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "refused-then-admitted",
        "A request over a quota, of which Redis keeps only a bit, is delivered when its record is read again.",
        (
            Change(
                "core/lost_payload.py",
                "    if cause is not None and cause in BROKEN_RULES:\n        _, asked",
                "    if False:\n        _, asked",
            ),
        ),
        (),
        ("tests/unit/test_lost_payload.py",),
    ),
    Bug(
        "was-invalid-only-if-a-request-by-now",
        "The dead letter of a large invalid replacement says `payload-lost` if it is valid when it is read again. If its record cancels by then, the shard stays closed.",
        (
            Change(
                "core/lost_payload.py",
                "    if cause is not None:\n        # A reason",
                "    if cause is not None and isinstance(change, Request):\n        # A reason",
            ),
        ),
        (),
        (
            "tests/unit/test_lost_payload.py::test_what_was_invalid_has_a_reason_of_its_own_whatever_its_record_is_by_now",
        ),
    ),
    Bug(
        "parked-with-a-payload",
        "While the dead-letter topic is missing, each large refused request gets a payload in Redis.",
        (
            Change(
                "core/due_batch.py",
                "        is_bare = offset in self.without_payload\n",
                "        is_bare = False\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "stamp-not-compared",
        "Dispatch commits a transaction although Kafka's timestamp is before a due time of the batch.",
        (
            Change(
                "core/dispatch.py",
                "        latest_ms = min(max(due_ms, default=0), now_ms)\n",
                "        latest_ms = 0\n",
            ),
        ),
        (),
        ("tests/unit/dispatch", "tests/service/test_clocks.py"),
    ),
    Bug(
        "oldest-starves",
        "In a backlog, dispatch skips requests that arrived later and are due earlier until the backlog ends.",
        (
            Change(
                "core/due_reader.py",
                "        self._has_skipped = due.left_out > 0\n",
                "        self._has_skipped = False\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "cancels-read-ahead",
        "Dispatch reads ahead after cancels of requests that are in flight, and skips others in their place.",
        (
            Change(
                "core/due_reader.py",
                "        if self.index.gone(before.offsets(), self.removed):\n",
                "        if False:\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_deliveries.py::test_cancels_during_a_batch_do_not_change_the_order_of_those_behind_it",
        ),
    ),
    Bug(
        "read-ahead-twice",
        "Under load, each batch that dispatch of the Spark engine has read ahead is read a second time.",
        (
            Change(
                "core/due_reader.py",
                "        if ahead is not None and not self.index.gone(ahead[1].offsets(), self.removed):\n",
                "        if ahead is not None and self.index.removed == self.removed:\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_deliveries.py::test_each_payload_is_read_once_while_another_process_stores_requests",
        ),
    ),
    Bug(
        "a-target-crowds-follow-ups",
        "If a record batch of a target was too large, follow-ups in other topics are also sent one by one, for ten minutes.",
        (
            Change(
                "core/refused_batch.py",
                "at_fault = topics.intersection(crowded)",
                "at_fault = topics",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_records_that_follow.py::test_a_too_large_batch_of_a_target_leaves_the_batches_of_follow_ups_as_they_are",
        ),
    ),
    Bug(
        "too-large-tried-together-for-ever",
        "Messages too large for several targets are sent together again, also if no other message goes with them.",
        (
            Change(
                "core/delivery_transaction.py",
                "return {t for t in self._writer.crowded if not limits.get(t, NO_LIMITS).one_by_one}",
                "return self._writer.crowded",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_records_that_follow.py::test_messages_with_follow_ups_that_are_too_large_for_their_targets_become_dead_letters",
        ),
    ),
    Bug(
        "crowded-by-another-shard",
        "What a shard sent together goes out alone if another shard has noted the small limit first.",
        (
            Change(
                "core/delivery_transaction.py",
                "        limits = self._limits\n",
                "        limits = self._triage.targets.limits(self._writer.crowded)\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_refused_messages.py::test_records_go_one_by_one_in_one_transaction_also_if_another_shard_noted_that_first",
        ),
    ),
    Bug(
        "crowded-unknown-at-least-once",
        "At least once, the request topic gets follow-ups together again after their batch was too large.",
        (
            Change(
                "core/dispatch.py",
                "apart, crowded = delivery.apart, delivery.crowded",
                "apart, crowded = delivery.apart, delivery.crowded if self.writer.exactly_once else ()",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_records_that_follow.py::test_a_follow_up_batch_that_is_too_large_repeats_messages_once_at_least_once",
        ),
    ),
    Bug(
        "receipts-without-a-bound",
        "A batch ends only at its limits, even if its receipt is larger than Kafka accepts.",
        (
            Change(
                "core/receipt_room.py",
                "        return self._used_bytes <= MOST_RECEIPT_BYTES\n",
                "        return True\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "follow-ups-in-one-batch",
        "Copies and other follow-ups are sent to a topic with a small limit in one record batch.",
        (
            Change(
                "core/delivery_transaction.py",
                "        place = self._parts.place(message, *(form for _, forms in follow_ups for form in forms[:1]))\n",
                "        place = self._parts.place(message)\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_records_that_follow.py::test_copies_too_large_for_one_batch_are_sent_in_parts_of_one_transaction",
        ),
    ),
    Bug(
        "backlog-read-ahead",
        "Dispatch reads ahead while it releases parked requests, and skips due requests for other targets.",
        (
            Change(
                "core/due_reader.py",
                "        return not self._has_released and not self._release(now_ms) and not self._has_skipped\n",
                "        return not self._release(now_ms) and not self._has_skipped\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "backlog-overtaken",
        "Requests that become due for a target are delivered before its parked requests.",
        (
            Change(
                "core/due_batch.py",
                "        for part in (self.ready, self.alone) if due.backlogs else ():\n",
                "        for part in ():\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "what-cannot-be-read-is-sent-again",
        "Recovery delivers requests again whose messages cannot be read yet.",
        (
            Change(
                "core/recovery.py",
                "            self.index.mark_doubtful(outcomes.doubtful)\n",
                "            pass\n",
            ),
        ),
        (),
        ("tests/contract/test_shard_machine.py", "tests/service/test_torn_transaction.py"),
    ),
    Bug(
        "a-doubt-is-forgotten-with-redis",
        "The barrier does not list requests in doubt. A rebuild delivers them again.",
        (Change("core/barrier.py", "void=void, doubtful=list(unread), group", "void=void, group"),),
        (),
        ("tests/contract/test_shard_machine.py", "tests/service/test_torn_transaction.py"),
    ),
    Bug(
        "a-doubt-is-replaced",
        "A replacement counts although the request that it replaces is in doubt.",
        (
            Change(
                "core/resolve.py",
                "        if by is None:\n            plan.ended_in_doubt.add(offset)\n        return False\n",
                "        return by is not None\n",
            ),
        ),
        (),
        ("tests/unit/test_doubtful.py",),
    ),
    Bug(
        "a-doubt-for-ever",
        "Dispatch checks requests in doubt only once, after the shard is opened.",
        (
            Change(
                "core/dispatch.py",
                "        if self.index.doubtful and now_ms >= self._doubtful.check_at_ms:\n",
                "        if self.index.doubtful and not self._doubtful.check_at_ms:\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "a-rate-is-overtaken",
        "Under a rate, messages that become due take the places of the backlog.",
        (
            Change(
                "core/due_batch.py",
                "                waits = not entry.expires_ms or to in limited\n",
                "                waits = not entry.expires_ms and to not in limited\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "what-is-known-is-doubted-again",
        "A rebuild puts a request in doubt although a later receipt declares its outcome void.",
        (
            Change(
                "core/outcomes.py",
                "            self._doubtful.pop(offset, None)\n",
                "            pass\n",
            ),
        ),
        (),
        ("tests/unit/test_doubtful.py",),
    ),
    Bug(
        "letters-tried-for-ever",
        "Dead letters whose topic is missing are retried instead of parked.",
        (
            Change(
                "core/due_batch.py",
                "    return refusal[0] == Reason.UNREACHABLE or (to == LETTERS and refusal[0] in TOPIC_WIDE_REASONS)\n",
                "    return refusal[0] == Reason.UNREACHABLE and to != LETTERS\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "cold-by-value-alone",
        "Whether a request may be cold depends on the size of its value alone.",
        (
            Change(
                "core/interpret.py",
                "is_far_ahead and record_bytes(record) <= MOST_COLD_BYTES",
                'is_far_ahead and len(record.value or b"") <= MOST_COLD_BYTES',
            ),
        ),
        (),
        ("tests/unit/test_interpret.py",),
    ),
    Bug(
        "letter-of-the-carried-record",
        "The dead letter of a promoted request of unknown outcome is the record that promotion wrote.",
        (
            Change(
                "core/rebuild.py",
                "        original = original_if_carried(record)\n",
                "        original = record\n",
            ),
        ),
        (),
        ("tests/unit/test_rebuild.py",),
    ),
    Bug(
        "carried-records-that-a-transaction-hides",
        "Promotion ignores what a caller's open transaction hides: records of an earlier run, and cancels.",
        (
            Change(
                "core/promotion.py",
                "self.journal.uncommitted(stable, end):",
                "self.journal.uncommitted(stable, stable):",
            ),
        ),
        (),
        ("tests/unit/test_promotion.py",),
    ),
    Bug(
        "removed-cold-requests-stay",
        "Promotion does not end cold requests that Kafka has removed.",
        (
            Change(
                "core/promotion.py",
                "in chain(self._removed(start), self._readable(start, now_ms)):",
                "in self._readable(start, now_ms):",
            ),
        ),
        (),
        ("tests/unit/test_promotion.py",),
    ),
    Bug(
        "cold-by-a-fast-clock",
        "A request with a caller's timestamp in the future is cold, so its due time is determined again at its promotion.",
        (
            Change(
                "core/interpret.py",
                "    if not record.has_broker_time and record.timestamp_ms > latest_ms + WRITER_AHEAD_MS:\n",
                "    if False:\n",
            ),
        ),
        (),
        ("tests/unit/test_interpret.py",),
    ),
    Bug(
        "a-shard-takes-a-whole-rate",
        "The shard that looks first in a second always gets the whole rate of a target, and others wait without limit.",
        (
            Change(
                "core/rate_limit.py",
                '    return second * 1000 + crc32(f"{shard} {second}".encode()) % TURNS_MS\n',
                "    return second * 1000 + shard.partition\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "backlogs-use-their-rates-once",
        "Messages that wait for the rate of their target come out only when something else is due.",
        (
            Change(
                "core/dispatch.py",
                "            did.next_due_ms = min(turn_ms, did.next_due_ms or turn_ms)\n",
                "            pass\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "marker-counts-as-a-receipt",
        "If Kafka removed all receipts of a quiet shard, requests that are due become dead letters at the next start.",
        (
            Change(
                "core/index_preparation.py",
                "            is_at_marker = self.has_markers and positions.receipts > 0\n",
                "            is_at_marker = False\n",
            ),
        ),
        (),
        ("tests/unit/test_rebuild.py",),
    ),
    Bug(
        "gone-is-not-kept",
        "If the first opening after a removal by retention fails, the removed requests are never reported.",
        (
            Change(
                "core/index_preparation.py",
                "positions, gone = kept.positions, kept.gone",
                "positions, gone = kept.positions, None",
            ),
            Change(
                "core/index_preparation.py",
                "StartingPoint(at, True, kept.gone, ",
                "StartingPoint(at, True, None, ",
            ),
        ),
        (),
        (
            "tests/unit/test_recovery.py::test_requests_that_retention_removed_are_reported_if_the_first_opening_failed",
            "tests/unit/test_rebuild.py::test_an_interrupted_rebuild_reports_requests_that_retention_removed",
        ),
    ),
    Bug(
        "a-letter-of-the-message",
        "If Kafka has removed the record of a request, its dead letter has the message as if that were the request.",
        (
            Change(
                "core/letter_record.py",
                "    if is_record(entry):\n",
                "    if entry:\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_letters.py::test_a_dead_letter_asks_for_the_same_request_if_kafka_has_removed_its_record",
        ),
    ),
    Bug(
        "a-band-is-shared",
        "A target whose preferred band is taken is not parked: its whole backlog is read again in each second.",
        (
            Change(
                "core/parking.py",
                "    return next(chain(own, free), None)\n",
                "    return next(chain(own, [b for b in free if b == next(bands_of(target))]), None)\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_waiting_for_a_rate.py::test_a_backlog_whose_preferred_band_is_taken_is_not_read_in_each_second",
        ),
    ),
    Bug(
        "a-backlog-in-two-bands",
        "A target whose preferred band becomes free has its later requests there, and earlier ones in another band.",
        (
            Change(
                "core/parking.py",
                "    return next(chain(own, free), None)\n",
                "    return next((b for b in bands_of(target) if parked.get(b, target) == target), None)\n",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_waiting_targets.py::test_a_target_keeps_its_band_although_the_one_that_it_prefers_is_free_again",
        ),
    ),
    Bug(
        "a-band-of-the-batch",
        "A request that a later record ends is parked in a band in which its batch parks requests of another target.",
        (
            Change(
                "core/dispatch.py",
                "        parked = {**self.index.parked(), **batch.parked}",
                "        parked = self.index.parked()",
            ),
        ),
        (),
        (
            "tests/unit/dispatch/test_superseded_ids.py::test_a_superseded_request_is_not_parked_in_a_band_that_its_batch_takes",
        ),
    ),
    Bug(
        "parked-in-the-band-of-others",
        "A request whose record is read again, with a timestamp after all times, is parked in the band of another target.",
        (
            Change(
                "core/parking.py",
                "    return band * BAND_MS + min(max(0, due_ms), BAND_MS - 1)\n",
                "    return band * BAND_MS + max(0, due_ms)\n",
            ),
        ),
        (),
        (
            "tests/contract/test_shard_index.py::test_a_request_that_is_due_after_all_times_is_parked_in_the_band_of_its_target",
        ),
    ),
    Bug(
        "empty-headers-are-free",
        "Refused records with many empty headers are stored in Redis.",
        (
            Change(
                "core/interpret.py",
                "    size = LENGTHS_BYTES * len(record.headers) + sum(map(len, parts))\n",
                "    size = sum(map(len, parts))\n",
            ),
        ),
        (),
        (
            "tests/unit/test_many_headers.py::test_a_record_with_many_headers_takes_little_room_in_redis",
            "tests/unit/test_many_headers.py::test_an_invalid_record_with_empty_headers_is_large_as_well",
        ),
    ),
    Bug(
        "aborted-records-count-as-unread",
        "Promotion waits for records of aborted transactions, which nothing reads.",
        (
            Change(
                "core/promotion.py",
                "self._unread += len(batch.records)",
                "self._unread += batch.end - batch.start",
            ),
        ),
        (),
        ("tests/unit/test_promotion.py",),
    ),
    Bug(
        "left-out-for-an-hour",
        "A request that an open transaction cancels waits for the next regular promotion, although that is aborted.",
        (
            Change(
                "core/promotion.py",
                "self._passed_over += len(waiting) - len(kept)",
                "pass",
            ),
        ),
        (),
        ("tests/unit/test_promotion.py",),
    ),
    Bug(
        "valid-by-now",
        "A record that was refused as invalid, and is valid by the settings of now, ends a pending request in a rebuild.",
        (
            Change(
                "core/resolve.py",
                "elif change.caller_id is not None and not _was_refused(view, offset):",
                "elif change.caller_id is not None:",
            ),
        ),
        (),
        ("tests/unit/test_rebuild.py",),
    ),
    Bug(
        "next-requests-unnamed",
        "Receipts do not name the requests for next times. If one is missing, the request never recurs again.",
        (Change("core/delivery_transaction.py", "            next=following,\n", ""),),
        (),
        ("tests/unit/test_torn_recurrence.py",),
    ),
    Bug(
        "a-batch-too-large-for-its-connection",
        "A batch that Kafka does not take in time is sent again with as many requests, and never delivered.",
        (
            Change(
                "core/dispatch.py",
                "                self.batch_limit.shrink(count)\n",
                "                pass\n",
            ),
        ),
        (),
    ),
    Bug(
        "small-batches-for-good",
        "After a slow moment of Kafka, a shard delivers in small batches as long as its process lives.",
        (
            Change(
                "core/dispatch.py",
                "            self.batch_limit.grow()\n",
                "            pass\n",
            ),
        ),
        (),
    ),
    Bug(
        "taken-back-without-a-transaction",
        "At least once, a batch is sent twice if a later record ends one of its recurring requests.",
        (
            Change(
                "core/delivery_transaction.py",
                "        if not self._follow_ups or not self._writer.exactly_once:\n",
                "        if not self._follow_ups:\n",
            ),
        ),
        (),
    ),
    Bug(
        "earlier-version-of-another-topic",
        "An index of an earlier version is emptied, although it belongs to another topic, other receipts or another group.",
        (Change("core/index_preparation.py", "            self._check_earlier(binding)\n", ""),),
        (),
    ),
    Bug(
        "late-cancels-kept",
        "Redis keeps each cancel by id that comes too late, while a shard has any cold request.",
        (
            Change(
                "core/resolve.py",
                "        if original < by and (original < renewed_below or not view.knows(original)):\n",
                "        if original < by:\n",
            ),
        ),
        (),
    ),
    Bug(
        "renewals-unnoticed",
        "A request that was renewed is delivered although it was cancelled by its first id.",
        (
            Change(
                "core/resolve.py",
                "        plan.renewed_below = max(plan.renewed_below, origin + 1)\n",
                "        pass\n",
            ),
        ),
        (),
    ),
)
