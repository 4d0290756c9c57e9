"""Bugs in `blackbox/spark`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "audit-of-the-whole-ledger",
        "The audit reads all topics of a ledger, not only those that it judges.",
        (
            Change(
                "spark/journals.py",
                '        return kept.where(col("topic").isin(list(self.settings.topics)))\n',
                "        return kept\n",
            ),
        ),
        (),
        (
            "tests/pipeline/test_audit.py"
            "::test_a_ledger_of_several_topics_says_nothing_of_those_that_are_not_audited",
        ),
    ),
)
