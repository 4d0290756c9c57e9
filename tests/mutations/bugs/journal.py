"""Bugs in `blackbox/journal`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "one-id-per-process",
        "The transactional id contains the process id. A new owner therefore does not fence the earlier one.",
        (
            Change(
                "journal/shard_writer.py",
                "access.transactional_id(str(shard)) if exactly_once",
                "access.transactional_id(f\"{shard}-{__import__('os').getpid()}\") if exactly_once",
            ),
        ),
        ("service frozen past its session", "several of these"),
    ),
    Bug(
        "position-of-the-first-record",
        "A batch starts at the offset of its first record, not at the offset from which it was read.",
        (
            Change(
                "journal/request_reader.py",
                "                batches[shard] = Batch(position, end,",
                "                batches[shard] = Batch(records[0].offset, end,",
            ),
            Change(
                "journal/shard_journal.py",
                "            yield Batch(position, reached, read_records(messages), leader_epochs(messages))\n",
                "            found = read_records(messages)\n"
                "            first = found[0].offset if found else position\n"
                "            yield Batch(first, reached, found, leader_epochs(messages))\n",
            ),
        ),
        ("services come and go", "several of these"),
        ("tests/service/test_shard_journal.py", "tests/service/test_exactly_once.py"),
    ),
    Bug(
        "a-word-without-an-offset",
        "The producer accepts an acknowledgement that has no offset.",
        (
            Change(
                "journal/shard_writer.py", "            self._unplaced += 1\n", "            pass\n"
            ),
        ),
        ("Kafka killed",),
        ("tests/service/test_moving_leader.py",),
    ),
    Bug(
        "receipts-trimmed-first",
        "Receipts are trimmed before the requests that they end.",
        (
            Change(
                "journal/trim.py",
                "zip(topics, (mark.requests, mark.receipts), strict=True)",
                "zip(topics[::-1], (mark.receipts, mark.requests), strict=True)",
            ),
        ),
        ("crash after one journal was trimmed",),
    ),
    Bug(
        "one-partition-stops-all",
        "Spark: if one partition does not return its end, no partition is read.",
        (
            Change(
                "journal/readable_bounds.py",
                "        found, silent = self._by_leader_with_retries(asked)\n",
                '        raise JournalLost("a partition does not answer")\n',
            ),
        ),
        (),
        ("tests/pipeline/test_kafka_source.py",),
    ),
    Bug(
        "one-range-fails-its-task",
        "Spark: a range that Kafka does not return stops the other ranges of its task.",
        (
            Change(
                "journal/ranges.py",
                "            if lost is None:\n                raise\n",
                "            raise\n",
            ),
        ),
        (),
        ("tests/pipeline/test_intake_task.py",),
    ),
    Bug(
        "fetches-of-a-megabyte",
        "A client fetches a megabyte of each shard, and decompresses all of it before it returns a record.",
        (
            Change(
                "journal/kafka_access.py",
                "FETCH_BYTES = 65_536\n",
                "FETCH_BYTES = 1_048_576\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "batches-of-any-size",
        "Intake reads 4,000 records before it stores one, whatever their size. The records of others wait.",
        (
            Change(
                "journal/request_client.py",
                "while len(messages) < most and size < MOST_BYTES:\n",
                "while len(messages) < most:\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "starved-shards-wait",
        "A record batch that is larger than a fetch waits for the backlogs of all other shards.",
        (
            Change(
                "journal/request_reader.py",
                "        for shard in self._together.starved:\n",
                "        for shard in ():\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "apart-for-ever",
        "Shards that are read apart keep the only threads for that; the next shard never gets one.",
        (
            Change(
                "journal/request_reader.py",
                "            if reader.is_over:\n",
                "            if False:\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "apart-not-in-turn",
        "Of many shards that wait to be read apart, always the last ones are.",
        (
            Change(
                "journal/request_reader.py",
                "            shard = next(iter(self._in_line))\n",
                "            shard = next(reversed(self._in_line))\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "silent-record-stops-a-shard",
        "A record that the client never returns stops its shard for ever.",
        (
            Change(
                "journal/offset_lookup.py",
                "            if silent.version > version and silent.offset >= offset:\n",
                "            if False:\n",
            ),
        ),
        (),
        ("tests/service/test_silent_records.py",),
    ),
    Bug(
        "silent-broker-is-a-silent-record",
        "A record becomes a dead letter because Kafka does not answer for a while.",
        (
            Change(
                "journal/offset_lookup.py",
                "            if silent.version > version and silent.offset >= offset:\n",
                "            if silent.version > version or time.monotonic() > ends_s:\n",
            ),
        ),
        (),
        ("tests/unit/test_offset_lookup.py",),
    ),
    Bug(
        "earlier-look-up-decides",
        "A record becomes a dead letter because the client could not parse a fetch of the look-up before.",
        (
            Change(
                "journal/offset_lookup.py",
                "            if silent.version > version and silent.offset >= offset:\n",
                "            if silent.version >= 0:\n",
            ),
        ),
        (),
        ("tests/unit/test_offset_lookup.py",),
    ),
    Bug(
        "error-of-another-position",
        "The error of where a record claimed to be stops its shard, or hides the records behind it.",
        (
            Change(
                "journal/polled_messages.py",
                " and polled.offset() != position\n",
                " and False\n",
            ),
        ),
        (),
        ("tests/unit/test_offset_lookup.py",),
    ),
    Bug(
        "passed-over-batch-is-an-error",
        "Batches of which the client returns nothing stop their shard, once its fetches have grown.",
        (
            Change(
                "journal/polled_messages.py",
                "error.code() == PASSED_OVER or ",
                "",
            ),
        ),
        (),
        ("tests/service/test_claimed_offsets.py",),
    ),
    Bug(
        "read-beyond-the-end",
        "A read of a partition that was shortened never ends.",
        (
            Change(
                "journal/partition_reader.py",
                "                    if reached > at or position > before:\n",
                "                    if True:\n",
            ),
        ),
        (),
        ("tests/unit/test_partition_reader.py",),
    ),
    Bug(
        "fetches-that-grow",
        "Megabytes of aborted records make the client's fetches grow, until small batches fill the memory.",
        (Change("journal/kafka_access.py", '            "fetch.max.bytes": FETCH_BYTES,\n', ""),),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "apart-from-a-silent-broker",
        "Shards of a broker that does not answer are read apart, and take the turns of others.",
        (
            Change(
                "journal/request_client.py",
                'if partition["leader"] in answering:',
                "if True:",
            ),
        ),
        (),
        ("tests/unit/test_starved_shards.py",),
    ),
    Bug(
        "starved-behind-a-full-queue",
        "A shard that is not fetched is not noticed while the process reads more slowly than it fetches.",
        (
            Change(
                "journal/request_client.py",
                "if is_read and 0 <= next_offset",
                'if is_read and not int(partition["fetchq_cnt"]) and 0 <= next_offset',
            ),
        ),
        (),
        ("tests/unit/test_starved_shards.py",),
    ),
    Bug(
        "waits-for-what-is-never-returned",
        "What a client had queued and never returns hides for good that a shard is not fetched.",
        (
            Change(
                "journal/request_client.py",
                "looks + 1, min(until, fetched_before)",
                "looks + 1, until",
            ),
        ),
        (),
        (
            "tests/unit/test_starved_shards.py::test_what_was_queued_and_is_never_returned_does_not_hide_a_starved_shard",
        ),
    ),
    Bug(
        "stopped-and-read-again",
        "A read that fails restarts a shard that was stopped in the meantime.",
        (
            Change(
                "journal/request_reader.py",
                "self._asked.extendleft(",
                "self._asked.extend(",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "unreadable-batch-stops-a-shard",
        "A record batch that the client cannot decompress stops its shard for ever.",
        (
            Change(
                "journal/partition_reader.py",
                "believed(readable(polled), reached,",
                "believed(polled, reached,",
            ),
        ),
        (),
        ("tests/service/test_unreadable_batches.py",),
    ),
    Bug(
        "later-batch-holds-a-read-up",
        "A read does not end if an unreadable batch was written right behind the marker at its end.",
        (
            Change(
                "journal/unreadable_batches.py",
                "    if first >= end:  # it was",
                "    if False:  # it was",
            ),
        ),
        (),
        ("tests/service/test_unreadable_batches.py",),
    ),
    Bug(
        "claimed-offset-is-believed",
        "A record is taken for the one whose offset it claims.",
        (
            Change(
                "journal/claimed_offsets.py",
                "    return polled[:end] if claimed is None or is_there(claimed) else polled[:count]\n",
                "    return polled\n",
            ),
        ),
        (),
        ("tests/service/test_claimed_offsets.py",),
    ),
    Bug(
        "claimed-offset-is-not-looked-up",
        "A record that claims a later offset moves the reader past the records of others.",
        (
            Change(
                "journal/claimed_offsets.py",
                "claimed is None or is_there(claimed) else",
                "claimed is None or True else",
            ),
        ),
        (),
        ("tests/service/test_claimed_offsets.py",),
    ),
    Bug(
        "unreadable-message-is-missing",
        "A message that cannot be read counts as missing, and is delivered again.",
        (
            Change(
                "journal/claim_check.py",
                "        if (unreadable := message.error()) is not None:\n",
                "        if (unreadable := message.error()) is not None and False:\n",
            ),
        ),
        (),
        ("tests/service/test_unreadable_batches.py",),
    ),
    Bug(
        "unreadable-batch-without-end",
        "Records behind an unreadable batch become dead letters as well.",
        (
            Change(
                "journal/unreadable_batches.py",
                "    while behind - inside > 1:\n",
                "    while False:\n",
            ),
        ),
        (),
        ("tests/service/test_unreadable_batches.py",),
    ),
    Bug(
        "silence-of-aborted-records",
        "A read treats a client that skips many aborted records as a client without an answer.",
        (
            Change(
                "journal/partition_reader.py",
                "                elif position <= before and time.monotonic() > ends_s:\n",
                "                elif time.monotonic() > ends_s:\n",
            ),
        ),
        (),
        ("tests/unit/test_partition_reader.py",),
    ),
    Bug(
        "receipts-limited-by-the-brokers",
        "A receipts topic is created with the default of the brokers for max.message.bytes.",
        (
            Change(
                "journal/own_topics.py",
                "            settings = UNLIMITED_RETENTION | BROKER_TIMESTAMPS | ROOM_FOR_RECEIPTS\n",
                "            settings = UNLIMITED_RETENTION | BROKER_TIMESTAMPS\n",
            ),
        ),
        (),
        (
            "tests/unit/test_own_topics.py::test_a_new_receipts_topic_takes_large_receipts_whatever_the_default_of_the_brokers",
        ),
    ),
    Bug(
        "no-leader-is-gone",
        "A partition without a leader counts as deleted, and its messages count as delivered.",
        (
            Change(
                "journal/partition_reader.py",
                "        if there is not None and there.leader < 0:\n",
                "        if there is not None and there.leader < 0:\n            return False\n"
                "        if there is not None and there.leader < -1:\n",
            ),
        ),
        (),
        ("tests/service/test_torn_transaction.py",),
    ),
    Bug(
        "metadata-holds-up-all",
        "Dispatch waits for the metadata of targets whose last metadata can still be used.",
        (
            Change(
                "journal/target_topics.py",
                "            or known[topic][0] + STILL_GOOD_S < now\n",
                "            or True\n",
            ),
        ),
        (),
        ("tests/unit/test_target_topics.py",),
    ),
    Bug(
        "unowned-is-left",
        "Partitions without an owner in the group stay without an owner.",
        (
            Change(
                "journal/membership.py",
                "            self._must_leave = True\n",
                "            self._must_leave = False\n",
            ),
        ),
        (),
        ("tests/service/test_takeover.py",),
    ),
    Bug(
        "replaced-but-not-gone",
        "A process that lost its instance id to another process keeps its shards.",
        (
            Change(
                "journal/membership.py",
                "        self._give_up(sorted(self.owned()))\n",
                "",
            ),
        ),
        (),
        ("tests/service/test_takeover.py",),
    ),
    Bug(
        "letters-of-others",
        "Dead letters of other deployments in the same topic are listed and discarded.",
        (
            Change(
                "journal/dead_letter_topic.py",
                "                        if self._is_ours(letter):\n",
                "                        if letter.source:\n",
            ),
        ),
        (),
        ("tests/service/test_dead_letter_topic.py",),
    ),
    Bug(
        "letters-replayed-past-hidden-marks",
        "A replay reads the dead letters without the marks that an open transaction hides, and repeats earlier replays.",
        (
            Change(
                "admin/dead_letters.py",
                "                is_settled=True,\n",
                "",
            ),
        ),
        (),
        ("tests/service/test_dead_letter_topic.py",),
    ),
    Bug(
        "unknown-answers-fail-the-batch",
        "If a broker refuses a record for a reason that blackbox does not know, the shard sends the whole batch again and again.",
        (
            Change(
                "journal/refusals.py",
                "        return REASONS_BY_ERROR.get(code, Reason.BROKER_ERROR)\n",
                "        return REASONS_BY_ERROR.get(code)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_shard_writer.py::test_an_unknown_broker_error_is_attributed_to_the_record",
        ),
    ),
    Bug(
        "compacted-is-missing",
        "A message that compaction removed from its target counts as missing. It is delivered again, after a newer one with its key.",
        (
            Change(
                "journal/claim_check.py",
                "        absent -= self._compacted_away(topic, int(partition), absent, bounds)\n",
                "",
            ),
        ),
        (),
        (
            "tests/unit/test_shard_journal.py::test_a_message_that_compaction_removed_counts_as_delivered",
        ),
    ),
    Bug(
        "foreign-receipts-close-the-shard",
        "A record in the receipts topic that is not a receipt keeps its shard closed.",
        (
            Change(
                "journal/receipt_parsing.py",
                "        except NotAReceipt:\n            foreign.append(message)\n",
                "",
            ),
        ),
        (),
        (
            "tests/unit/test_receipt_parsing.py::test_a_foreign_record_in_the_receipts_topic_is_skipped_with_an_error",
        ),
    ),
    Bug(
        "delivered-receipts",
        "A message that a request delivers to a receipts topic counts as a receipt. It ends requests that were not delivered.",
        (
            Change(
                "journal/receipt_parsing.py",
                "    if unreadable or any(header[0].startswith(OUR_HEADERS) for header in headers):\n",
                "    if unreadable:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_receipt_parsing.py::test_a_foreign_record_in_the_receipts_topic_is_skipped_with_an_error",
        ),
    ),
    Bug(
        "receipts-of-others-as-target",
        "A request may be delivered to the receipts topic of another deployment.",
        (
            Change(
                "journal/topics.py",
                "    is_receipts = name.endswith(RECEIPTS_SUFFIX)\n",
                "    is_receipts = name in map(receipts_topic, request_topics)\n",
            ),
        ),
        (),
        ("tests/unit/test_settings.py::test_topics_of_blackbox_are_not_targets",),
    ),
    Bug(
        "lost-targets-awaited",
        "If a target is deleted while dispatch sends to it, all targets of the shard wait about 15 s.",
        (
            Change(
                "journal/shard_writer.py",
                "            if self._exactly_once and now - asked_s >= LOOK_S:\n",
                "            if False:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_shard_writer.py::test_a_transaction_ends_within_a_second_of_the_loss_of_a_target",
        ),
    ),
    Bug(
        "receipts-grow-late",
        "A new partition waits up to 10 s for its partition of the receipts topic.",
        (
            Change(
                "journal/own_topics.py",
                "        if now < self._ask_again_at_s and (self._has_failed or not is_lacking):\n",
                "        if now < self._ask_again_at_s:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_own_topics.py::test_a_new_partition_gets_its_receipts_partition_at_once",
        ),
    ),
    Bug(
        "brokers-time-unknown",
        "Intake takes a timestamp of the broker for one of the caller. If the clocks of Redis and the host are slow, countdowns end early.",
        (
            Change(
                "journal/message_conversion.py",
                "by == TIMESTAMP_LOG_APPEND_TIME)",
                "False)",
            ),
        ),
        (),
        (
            "tests/unit/test_message_conversion.py::test_a_record_says_whether_the_broker_set_its_timestamp",
        ),
    ),
    Bug(
        "progress-committed-again-in-one-try",
        "One short outage of Kafka while a load of weeks commits its progress again ends the load.",
        (
            Change(
                "journal/piece_writer.py",
                "        stop=stop_after_attempt(COMMIT_TRIES),\n",
                "        stop=stop_after_attempt(1),\n",
            ),
        ),
        (),
        (
            "tests/unit/test_piece_writer.py::test_a_short_outage_does_not_end_a_load_that_commits_its_progress_again",
        ),
    ),
    Bug(
        "audit-stopped-by-a-trim",
        "The audit fails if Kafka removes records before it has read them.",
        (
            Change(
                "journal/ranges.py",
                "            if skip_removed and isinstance(reason, RecordsRemoved):\n",
                "            if False and isinstance(reason, RecordsRemoved):\n",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_what_kafka_removes_during_an_audit_is_not_judged",),
    ),
    Bug(
        "journals-limited-by-the-brokers",
        "Journals are created with the size limit of the brokers, above which Kafka removes pending requests.",
        (Change("journal/own_topics.py", '"retention.bytes": "-1", ', ""),),
        (),
        (
            "tests/unit/test_own_topics.py"
            "::test_kafka_removes_nothing_from_new_topics_by_age_or_size_whatever_the_defaults_of_the_brokers",
        ),
    ),
    Bug(
        "future-records-stop-trimming",
        "Trimming stops at a record with a timestamp of the future, and the journals grow until that time.",
        (
            Change(
                "journal/trim.py",
                "        if first is None or first[1] <= latest_ms:\n",
                "        if True:\n",
            ),
        ),
        (),
        ("tests/unit/test_trim.py::test_a_record_from_the_future_does_not_keep_older_ones",),
    ),
    Bug(
        "next-requests-are-missing",
        "The check of the last receipt does not recognise requests for next times: each message of a recurring request is delivered again.",
        (
            Change(
                "journal/claim_check.py",
                'for name in ("blackbox-source", AGAIN, FOLLOWS)',
                'for name in ("blackbox-source", AGAIN)',
            ),
        ),
        (),
        (
            "tests/service/test_torn_transaction.py::"
            "test_a_recurring_request_goes_on_whatever_is_torn_off",
        ),
    ),
)
