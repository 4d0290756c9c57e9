"""Bugs in `blackbox/client`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "a-schedule-of-others",
        "A consumer's retry replaces any schedule that the writer of its message names.",
        (
            Change(
                "client/retry.py",
                "    if found is None:\n        return None\n",
                "    if found is None:\n        return kept or None\n",
            ),
        ),
        (),
        ("tests/unit/test_retry.py::test_a_forged_schedule_id_is_ignored",),
    ),
    Bug(
        "a-lost-answer-is-a-rejection",
        "The client reports a request as rejected when only the broker's answer was lost: its caller sends it twice.",
        (
            Change(
                "client/pending_write.py",
                "error is None or error.code() in _UNCLEAR\n",
                "error is None\n",
            ),
        ),
        (),
        ("tests/unit/test_client.py::test_a_request_whose_answer_was_lost_may_have_been_written",),
    ),
    Bug(
        "written-until-an-error",
        "send_many writes the messages before an invalid one, and returns no ids: its caller sends them twice.",
        (
            Change(
                "client/client.py",
                "        asked = [(_value(message), message.id) for message in (Later(*one) for one in messages)]\n",
                "        asked = ((_value(message), message.id) for message in (Later(*one) for one in messages))\n",
            ),
        ),
        (),
        (
            "tests/unit/test_client.py::test_send_many_writes_nothing_if_one_of_the_messages_is_invalid",
        ),
    ),
    Bug(
        "look-ups-that-outlast-their-limit",
        "A look-up waits 30 s for another producer's transaction, twice, whatever its limit is.",
        (
            Change(
                "journal/shard_journal.py",
                "stable_bounds(*self._shard, offset, within_s)\n",
                "stable_bounds(*self._shard, offset)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_client.py::test_a_lookup_of_a_request_that_a_transaction_hides_ends_in_time",
        ),
    ),
    Bug(
        "look-ups-on-the-loops-threads",
        "Cancelled look-ups of the AsyncClient keep the threads that the whole program shares.",
        (
            Change(
                "client/client.py",
                "run_in_executor(self._lookups, what, *given)\n",
                "run_in_executor(None, what, *given)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_client.py::test_cancelled_lookups_leave_the_threads_of_the_event_loop_free",
        ),
    ),
    Bug(
        "not-a-number-becomes-null",
        "The client sends NaN as null: of a message that is NaN, a tombstone is delivered.",
        (
            Change(
                "client/request_value.py",
                'is_safe = b"null" not in written',
                'is_safe = b"NaN" not in written',
            ),
        ),
        (),
        (
            "tests/unit/test_client.py::test_a_number_that_json_cannot_express_is_refused_with_its_place",
        ),
    ),
)
