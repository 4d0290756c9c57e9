"""Bugs in `blackbox/rebind`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "begun-without-a-mark",
        "The first receipt for a topic that was created again has no low-water mark.",
        (
            Change(
                "rebind/decision.py",
                "        return replace(self.barrier, mark=Mark(self.begins, end))\n",
                "        return self.barrier\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "unknown-not-noted",
        "A rebind to a new receipts topic does not record that earlier outcomes are unknown.",
        (
            Change(
                "rebind/topic_rebind.py",
                "index.rebind(decision.positions, self._ours, decision.unknown_ms, tail)",
                "index.rebind(decision.positions, self._ours, 0, tail)",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "older-index-asked-again",
        "A rebind writes the requests of an old topic's index again although the new topic has been opened since.",
        (
            Change(
                "rebind/decision.py",
                "bool(groups & {self.ours.group, kept.binding.group})",
                "False",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "rebind-fenced-once",
        "A rebind ends when a service that opens the shard fences it.",
        (
            Change(
                "rebind/topic_rebind.py",
                "return again(self._rebind, index)",
                "return self._rebind(index)",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "rebind-without-outcomes",
        "A rebind writes requests again that have an outcome in the receipts.",
        (
            Change(
                "rebind/leftovers.py",
                "if offset >= self.first and offset not in self.ended",
                "if offset >= self.first",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "newer-record-ended",
        "A rebind writes a request again although a later record with its caller id replaced or cancelled it.",
        (
            Change(
                "rebind/later_records.py",
                "        newer.caller_ids.add(change.caller_id)\n",
                "        pass\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "letter-asked-again",
        "A rebind writes the request again instead of its dead letter.",
        (
            Change(
                "rebind/leftovers.py",
                "        if entry.reason is not None:\n",
                "        if False:\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "older-receipts-kept",
        "A rebind keeps an index from before its receipts topic was opened.",
        (
            Change(
                "rebind/decision.py",
                "        if by is None and not is_same and openings(journal, self.ours.topic_id):\n",
                "        if False:\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "asked-again-unsaid",
        "The receipt of a rebind does not name the index whose requests were written again.",
        (
            Change(
                "rebind/decision.py",
                "group=self.ours.group, unknown_ms=unknown_ms, cut=list(cut), rebound=rebound,",
                "group=self.ours.group, unknown_ms=unknown_ms, cut=list(cut),",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "older-than-a-cut-kept",
        "A rebind of an index from before a log became shorter writes the lost requests again, although their outcomes are unknown.",
        (
            Change(
                "rebind/decision.py",
                "Gone(self.ours.topic_id, first, since, is_open, is_unknown=bool(cuts))",
                "Gone(self.ours.topic_id, first, since, is_open)",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "cut-said-twice",
        "A rebind of an older index records the same cut again, which voids the outcomes since the first one.",
        (
            Change(
                "rebind/decision.py",
                "cut=[] if explained else [lost]",
                "cut=[first]",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "all-leave-their-partitions",
        "A rebind writes requests to any partition although the number of partitions is the same as before.",
        (
            Change(
                "rebind/decision.py",
                "    return not former or max(former) + 1 == count\n",
                "    return not former\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "cancels-by-id-not-heard",
        "A rebind writes a request again although a later record cancelled it by its id.",
        (Change("rebind/later_records.py", " or id in self.cancelled\n", "\n"),),
        (),
        (),
    ),
    Bug(
        "neighbours-refused",
        "If Kafka refuses one record of a rebind's batch, other requests of the batch become dead letters too.",
        (
            Change(
                "rebind/leftovers.py",
                "            if len(batch) == 1:\n                self._note(refused.suspects)\n",
                "            self._note(refused.suspects)\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "written-behind-a-lost-end",
        "A rebind skips records that callers wrote after the log lost its end, if the log is still shorter than before.",
        (
            Change(
                "rebind/lost_end.py",
                "    if below is None or not below.record.has_broker_time:\n",
                "    if True:\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "ranks-that-moved",
        "A rebind does not write a request again that a frozen owner postpones during the rebind.",
        (
            Change(
                "rebind/leftovers.py",
                "            self._check_all_seen()\n",
                "",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "gap-of-former-partitions",
        "A rebind starts with the first former partition. If it is interrupted, the next run does not find the others.",
        (
            Change(
                "rebind/topic_rebind.py",
                "[*there, *reversed(gone)]",
                "[*there, *gone]",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "former-partition-unsaid",
        "A rebind writes no receipt for a former partition whose requests it has written again.",
        (
            Change(
                "rebind/decision.py",
                "        return shard.partition < self.receipts_count\n",
                "        return shard.partition < min(self.count, self.receipts_count)\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "loss-by-clocks-alone",
        "A rebind finds the place of a loss by timestamps although leader epochs show it.",
        (
            Change(
                "rebind/lost_end.py",
                "    is_shown = last.epoch > tail.epoch != UNKNOWN_EPOCH\n",
                "    is_shown = False\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_leader_epochs_show_the_loss_whatever_callers_write_as_timestamps",
        ),
    ),
    Bug(
        "one-timestamp-moves-a-loss",
        "One record with a late timestamp makes a rebind deliver everything since that record again.",
        (
            Change(
                "rebind/lost_end.py",
                "        balance += 1 if timestamp_ms >= since_ms else -1\n",
                "        balance += timestamp_ms >= since_ms\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_records_after_a_loss_are_new_although_one_before_them_has_a_late_timestamp",
        ),
    ),
    Bug(
        "restored-epochs-hide-new-records",
        "A rebind trusts leader epochs alone: it skips records that restored brokers took under repeated epochs.",
        (
            Change(
                "rebind/lost_end.py",
                "        place = first_within(epoch_from, *requests, tail.epoch + 1, last.epoch)\n",
                "        return first_within(epoch_from, *requests, tail.epoch + 1, last.epoch)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_brokers_timestamps_show_the_loss_if_restored_brokers_pass_the_old_epochs",
        ),
    ),
    Bug(
        "last-timestamp-hides-new-records",
        "A rebind skips records that callers wrote after a loss because the clock of the last one was slow.",
        (
            Change(
                "rebind/lost_end.py",
                "        elif balance < best - MOST_OLDER:\n",
                "        else:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_a_last_broker_whose_clock_is_slow_hides_no_records_after_a_loss",
        ),
    ),
    Bug(
        "clocks-outweigh-epochs",
        "A last record whose clock was seconds behind makes a rebind deliver messages again although epochs show the loss.",
        (
            Change(
                "rebind/lost_end.py",
                "    since_ms = tail.timestamp_ms + CLOCKS_APART_MS\n",
                "    since_ms = tail.timestamp_ms + 1\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_a_few_wrong_clocks_do_not_move_the_loss_that_leader_epochs_show",
        ),
    ),
    Bug(
        "one-clock-outweighs-epochs",
        "One record with a late timestamp makes a rebind deliver messages again although epochs show the loss.",
        (
            Change(
                "rebind/lost_end.py",
                ", since_ms, least=1) == place:",
                ", since_ms) == place:",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_a_few_wrong_clocks_do_not_move_the_loss_that_leader_epochs_show",
        ),
    ),
    Bug(
        "a-lone-record-decides-nothing",
        "A rebind skips the only record that restored brokers took under a repeated epoch.",
        (
            Change(
                "rebind/lost_end.py",
                ", since_ms, least=1) == place:",
                ", since_ms, least=2) == place:",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_a_lone_new_record_below_the_place_that_epochs_show_is_read",
        ),
    ),
    Bug(
        "a-hundred-records-decide",
        "A rebind compares the last hundred records only. If most of them are new, it delivers everything again.",
        (
            Change(
                "rebind/lost_end.py",
                "    while end > requests.start:\n",
                "    while end > max(requests.start, requests.end - TAIL):\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_no_run_of_slow_clocks_hides_the_new_records_before_it",
        ),
    ),
    Bug(
        "a-search-without-end",
        "Records that a fast clock left long before a loss make a rebind deliver everything since then again.",
        (
            Change(
                "rebind/lost_end.py",
                "        elif balance < best - MOST_OLDER:\n",
                "        elif balance < -requests.end:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_what_a_fast_clock_left_long_before_does_not_move_the_loss",
        ),
    ),
    Bug(
        "margin-hides-new-records",
        "A rebind skips records that restored brokers took within a minute after the last one that was read.",
        (
            Change(
                "rebind/lost_end.py",
                "    return _search_times(journal, before, tail.timestamp_ms + 1)\n",
                "    return _search_times(journal, before, since_ms)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind_lost_end.py::test_restored_brokers_hide_no_record_that_was_written_soon_after_the_last_one_read",
        ),
    ),
    Bug(
        "expiry-begins-again",
        "A rebind gives overdue requests their time to expire again, from when they are written again.",
        (
            Change(
                "records/outgoing.py",
                "    since_ms = 0 if entry.recurs else now_ms\n",
                "    since_ms = 0\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind.py::test_a_request_that_is_written_again_expires_when_it_would_have_before",
        ),
    ),
    Bug(
        "expired-written-again",
        "A rebind delivers requests that had expired.",
        (
            Change(
                "rebind/leftovers.py",
                "entry.expires_ms < self._began_ms and not entry.recurs",
                "False",
            ),
        ),
        (),
        ("tests/unit/test_rebind.py::test_a_rebind_does_not_deliver_requests_that_have_expired",),
    ),
    Bug(
        "late-replacement-counts",
        "A rebind drops a request because of a later replacement with its caller id that came too late.",
        (Change("rebind/later_records.py", " if ids & pending}", "}"),),
        (),
        (
            "tests/unit/test_rebind.py::test_a_replacement_that_is_too_late_ends_no_request_with_its_caller_id",
        ),
    ),
    Bug(
        "replaced-leftover-dropped",
        "A rebind drops a request because of its replacement, which becomes a dead letter: the request left the topic.",
        (Change("rebind/later_records.py", "if one.offset < first\n", "if True\n"),),
        (),
        (
            "tests/unit/test_rebind.py::test_after_a_loss_a_replacement_counts_if_the_request_that_it_names_is_still_there",
        ),
    ),
    Bug(
        "replacement-of-a-cold-request-dropped",
        "A rebind writes a request again that ends a newer one with its caller id: the replacement of a cold request.",
        (Change("rebind/later_records.py", "one.offset in cold or ", ""),),
        (),
        (
            "tests/unit/test_rebind.py::test_after_a_loss_a_replacement_counts_if_the_cold_request_that_it_names_is_still_there",
        ),
    ),
    Bug(
        "one-id-of-two-runs",
        "A rebind after an interrupted one drops a request: the other partition's, written again, passes for a newer one.",
        (
            Change(
                "rebind/later_records.py",
                "                    if source is None:\n",
                "                    if True:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rebind.py::test_an_interrupted_rebind_remembers_which_partitions_request_has_a_caller_id",
        ),
    ),
    Bug(
        "one-id-of-two-partitions",
        "A rebind to another number of partitions writes two requests again under one id: one replaces the other.",
        (Change("rebind/topic_rebind.py", "            holders=self._holders,\n", ""),),
        (),
        (
            "tests/unit/test_rebind.py::test_requests_of_one_caller_id_in_two_partitions_do_not_replace_each_other",
        ),
    ),
    Bug(
        "earlier-version-rebound",
        "A rebind empties an index of an earlier version that belongs to another topic, and loses its requests.",
        (
            Change(
                "rebind/decision.py",
                "        if kept is None and earlier is not None and earlier[1:] != self.ours[1:]:\n",
                "        if False:\n",
            ),
        ),
        (),
    ),
)
