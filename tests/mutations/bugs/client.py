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
)
