"""Bugs in `blackbox/records`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "refused-records-in-redis",
        "Intake stores a payload for each large request over a quota. A million of them fill 430 MB of Redis.",
        (
            Change(
                "records/entry.py",
                "Reason.TOO_LATE else rule_of(self.detail)\n",
                "Reason.TOO_LATE else None\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "kafkas-clock-ignored",
        "Dispatch delivers requests that are due by the clocks of Redis and the host, but not by Kafka's clock.",
        (
            Change(
                "records/clock.py",
                "        return now_ms - max(0, self._behind_ms(now_ms))\n",
                "        return now_ms\n",
            ),
        ),
        (),
        ("tests/unit/test_clock.py", "tests/service/test_clocks.py"),
    ),
    Bug(
        "kafkas-clock-for-good",
        "Dispatch does not notice that Kafka's clock was set forward or that the host was suspended.",
        (
            Change(
                "records/clock.py",
                "            was_set_forward = self._observed_s is None or least > self._kafka_ms\n",
                "            was_set_forward = self._observed_s is None\n",
            ),
        ),
        (),
        ("tests/unit/test_clock.py",),
    ),
    Bug(
        "one-batch-for-a-strict-topic",
        "Dispatch sends messages in one record batch that is larger than their topic accepts.",
        (
            Change(
                "records/topic_limits.py",
                '        return "next"\n',
                '        return "here"\n',
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "parts-without-end",
        "Dispatch flushes any number of times for a topic with a small limit. Other targets of the shard wait.",
        (
            Change(
                "records/topic_limits.py",
                "        if is_full or self._count == MOST_PARTS or time.monotonic() > self._until_s:\n",
                "        if is_full:\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "a-time-of-writing-is-believed",
        "A forged record of promotion puts a request at any due time, also at one that stops its shard for good.",
        (
            Change(
                "records/carried.py",
                "        if not 0 <= timestamp_ms <= _latest_ms(record):\n",
                "        if timestamp_ms < 0:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_carried.py::test_a_forged_time_of_writing_makes_a_dead_letter",
            "tests/unit/test_carried.py::test_a_forged_time_of_writing_is_no_time_in_a_table",
        ),
    ),
    Bug(
        "time-zones-of-the-host",
        "A recurring request may name a time zone of the host that reads it: its next reader takes another zone.",
        (
            Change(
                "records/recurrence.py",
                "        if type(zone) is not str or zone not in _zone_names():\n",
                "        if type(zone) is not str:\n",
            ),
        ),
        (),
        ("tests/unit/test_recurrence.py::test_a_timezone_that_depends_on_the_host_is_refused",),
    ),
)
