"""Bugs in `blackbox/spark`, and in the driver of `blackbox/engine/spark`."""

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
    Bug(
        "lost-host-stops-all",
        "An executor whose host is gone stops its shards, and the intake of all, for two minutes.",
        (
            Change(
                "spark/spark_session.py",
                '    "spark.network.timeout": "20s",\n',
                '    "spark.network.timeout": "120s",\n',
            ),
        ),
        (),
        (
            "tests/unit/test_spark_session.py"
            "::test_an_executor_whose_host_is_gone_is_replaced_within_half_a_minute",
        ),
    ),
    Bug(
        "failures-of-a-lifetime",
        "A driver on Kubernetes ends after a few failed executors, however much time is between them.",
        (
            Change(
                "spark/spark_session.py",
                '    "spark.executor.failuresValidityInterval": "1h",\n',
                "",
            ),
        ),
        (),
        (
            "tests/unit/test_spark_session.py"
            "::test_failed_executors_do_not_count_for_the_whole_life_of_a_driver",
        ),
    ),
    Bug(
        "package-swept-away",
        "The package for executors is removed from /tmp after some weeks, and a new executor runs nothing.",
        (
            Change(
                "spark/spark_session.py",
                "    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)\n",
                "",
            ),
        ),
        (),
        (
            "tests/unit/test_spark_session.py"
            "::test_the_package_for_executors_is_locked_against_cleaners_of_temporary_files",
        ),
    ),
)
