"""Bugs in `blackbox/admin`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "replay-replaces",
        "A replay of a dead letter replaces a newer pending request with the same id.",
        (
            Change(
                "admin/dead_letters.py",
                "        left |= conflicts(self.lookup, records, lambda place: self._is_there(whole[place]))\n",
                "",
            ),
        ),
        (),
        ("tests/unit/test_dead_letters.py",),
    ),
    Bug(
        "replay-of-another-record",
        "A replay of a shortened dead letter writes whatever record has its offset since the topic was created again.",
        (
            Change(
                "admin/dead_letters.py",
                "        if why := why_another(letter, record):\n",
                '        if why := "":\n',
            ),
        ),
        (),
        (
            "tests/unit/test_replayed_records.py"
            "::test_a_record_that_took_the_place_of_a_shortened_letters_record_is_not_replayed",
        ),
    ),
    Bug(
        "replay-of-a-younger-record",
        "A replay of a shortened dead letter takes a record of the same size that is younger than the letter for its own.",
        (
            Change(
                "admin/replayed_record.py",
                "    if why is None and record.timestamp_ms > letter.at_ms + CLOCKS_APART_MS:\n",
                "    if False:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_replayed_records.py"
            "::test_a_record_that_took_the_place_of_a_shortened_letters_record_is_not_replayed",
        ),
    ),
    Bug(
        "only-copy-is-discarded",
        "If the clock of a request's caller was ahead, the advice is to discard the dead letter, as if its record were gone.",
        (
            Change(
                "admin/replayed_record.py",
                "        if not record.has_broker_time:",
                "        if False:",
            ),
        ),
        (),
        (
            "tests/unit/test_replayed_records.py"
            "::test_a_record_of_a_caller_whose_clock_is_ahead_is_not_called_another_record",
        ),
    ),
    Bug(
        "replay-replaces-at-its-own-offset",
        "A replay of a dead letter replaces a pending request that has its offset since the topic was created again.",
        (
            Change(
                "admin/replay_conflicts.py",
                "not (holder == replays[place].offset and is_there(place))",
                "holder != replays[place].offset",
            ),
        ),
        (),
        (
            "tests/unit/test_dead_letters.py"
            "::test_a_replay_does_not_replace_a_request_that_has_the_offset_of_the_letters_own",
        ),
    ),
    Bug(
        "replay-past-hidden-requests",
        "A replay of a dead letter replaces a request with the same id that an open transaction hides from the service.",
        (
            Change(
                "admin/replay_conflicts.py",
                "        left = {shard: reader.log_end(*shard) for shard in shards}\n",
                "        left = {shard: reader.bounds(*shard).end for shard in shards}\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dead_letters.py::test_a_letter_is_not_replayed_past_requests_that_an_open_transaction_hides",
        ),
    ),
    Bug(
        "replay-waits-for-markers",
        "A replay of a dead letter is refused until another request follows the transaction of the replay before it.",
        (
            Change(
                "admin/replay_conflicts.py",
                "    return not any(found for found, _ in reader.read(*shard, max(start, position), end))\n",
                "    return False\n",
            ),
        ),
        (),
        ("tests/unit/test_dead_letters.py::test_offsets_without_a_record_do_not_delay_a_replay",),
    ),
    Bug(
        "pages-without-a-bound",
        "A page of pending requests has a thousand requests, regardless of their size.",
        (
            Change(
                "admin/pending.py",
                "        is_full = len(found) == limit or found_bytes >= MOST_BYTES\n",
                "        is_full = len(found) == limit\n",
            ),
        ),
        (),
        ("tests/contract/test_inspector.py",),
    ),
    Bug(
        "earlier-failure-reported",
        "Over HTTP, a request is reported as failed because an earlier cancel failed. It was written, and a retry delivers it twice.",
        (
            Change(
                "admin/request_topics_writer.py",
                "            writer.wait_for(written)\n",
                "            writer.flush()\n",
            ),
        ),
        (),
        (
            "tests/unit/test_changes.py::test_a_request_does_not_fail_because_an_earlier_record_was_refused_later",
        ),
    ),
    Bug(
        "replay-as-promotion",
        "A replay of a dead letter keeps the headers by which blackbox marks its own records.",
        (
            Change(
                "admin/replayed_record.py",
                "headers[end - 1][0] in (REPLACES, CARRIED, FOLLOWS, AGAIN)",
                "headers[end - 1][0] in (REPLACES,)",
            ),
        ),
        (),
        ("tests/unit/test_replayed_records.py",),
    ),
    Bug(
        "letters-read-for-each-transaction",
        "A replay of many large dead letters writes one transaction in each call, and each call reads all letters again.",
        (
            Change(
                "admin/dead_letters.py",
                "            if time.monotonic() > until_s:\n",
                "            if True:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dead_letters.py"
            "::test_letters_with_much_content_are_looked_for_once_and_replayed_in_several_transactions",
        ),
    ),
    Bug(
        "ended-while-in-flight",
        "A look-up says that a request has ended, although it is being delivered and its cancel came too late.",
        (
            Change(
                "admin/lookup.py",
                "as_in_flight(found) if is_in_flight and",
                "as_in_flight(found) if False and",
            ),
        ),
        (),
        (
            "tests/unit/test_lookup.py"
            "::test_a_request_that_is_cancelled_in_flight_has_not_ended_until_its_delivery_has",
        ),
    ),
    Bug(
        "replayed-but-reported-as-failed",
        "If Kafka fails during a replay, the letters that were replayed before that are not reported.",
        (
            Change(
                "admin/dead_letters.py",
                "                if not done:\n                    raise\n",
                "                if True:\n                    raise\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dead_letters.py"
            "::test_letters_before_a_failed_transaction_are_reported_as_replayed",
        ),
    ),
    Bug(
        "cancels-what-was-replaced-in-flight",
        "A cancel of a request that was replaced during its delivery is written, and reported as in time.",
        (
            Change(
                "admin/pending.py",
                "    return waits and status.detail != IN_FLIGHT\n",
                "    return waits\n",
            ),
        ),
        (),
        (
            "tests/unit/test_changes.py"
            "::test_a_cancel_of_a_request_that_was_replaced_in_flight_is_too_late",
        ),
    ),
    Bug(
        "ended-before-it-was-stored",
        "A look-up says that a request has ended that is stored while it looks.",
        (
            Change(
                "admin/lookup.py",
                "            is_read = known_to is not None and offset < known_to.requests\n",
                "            is_read = stats.positions is not None and offset < stats.positions.requests\n",
            ),
        ),
        (),
        (
            "tests/unit/test_lookup.py"
            "::test_a_request_that_is_stored_during_a_look_up_has_not_ended",
        ),
    ),
)
