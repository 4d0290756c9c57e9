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
        "waits-for-lost-executors",
        "A driver whose executors are gone for good keeps its shards. A restart of Spark's master stops all deliveries.",
        (
            Change(
                "engine/spark/spark_watch.py",
                "        self._without_slots = self._without_slots + 1 if is_without else 0\n",
                "        self._without_slots = 0\n",
            ),
        ),
        (),
        (
            "tests/unit/test_engines.py"
            "::test_a_driver_ends_when_it_has_had_no_executor_for_a_minute",
        ),
    ),
    Bug(
        "lost-executors-count-as-idle",
        "A driver of intake alone whose batch gets no executor waits for good if Spark allocates executors by itself.",
        (
            Change(
                "engine/spark/spark_watch.py",
                "        needs_slots = has_work or not self._may_be_idle\n",
                "        needs_slots = not self._may_be_idle\n",
            ),
        ),
        (),
        (
            "tests/unit/test_engines.py"
            "::test_a_driver_of_intake_ends_when_a_batch_gets_no_executor_for_five_minutes",
        ),
    ),
    Bug(
        "idle-executors-count-as-lost",
        "A driver of intake alone exits when it is idle, unless dynamic allocation is written as `true`.",
        (
            Change(
                "engine/spark/spark_watch.py",
                '"false")).strip().lower() == "true"',
                '"false")) == "true"',
            ),
        ),
        (),
        (
            "tests/unit/test_engines.py"
            "::test_a_driver_of_intake_may_give_its_idle_executors_back_if_spark_allocates_them",
        ),
    ),
    Bug(
        "takes-shards-without-executors",
        "A driver that has no executor takes shards from drivers that deliver.",
        (
            Change(
                "engine/spark/driver.py",
                "        if not self._slots:\n            self._join_by_s",
                "        if False:\n            self._join_by_s",
            ),
        ),
        (),
        ("tests/unit/test_engines.py::test_a_driver_without_an_executor_takes_no_shards",),
    ),
    Bug(
        "windows-that-never-begin",
        "A driver whose JVM starts no threads keeps its shards. No window begins any more.",
        (
            Change(
                "engine/spark/running_window.py",
                "    return {window.number for window in each if window.group not in served}\n",
                "    return set()\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch_windows.py"
            "::test_a_window_that_was_never_heard_counts_unless_another_has_its_shards",
        ),
    ),
    Bug(
        "hung-jvm-keeps-the-process",
        "A service whose Spark failed waits for threads that wait for its JVM, and never exits.",
        (
            Change(
                "cli/run.py",
                "            has_ended, code = False, FAILED\n",
                "            raise typer.Exit(FAILED) from None\n",
            ),
        ),
        (),
        (
            "tests/unit/test_engines.py"
            "::test_a_service_whose_spark_failed_ends_although_threads_wait_for_its_jvm",
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
                '{"spark.executor.failuresValidityInterval": "1h"}',
                "dict[str, str]()",
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
    Bug(
        "strangers-at-sparks-ports",
        "Spark on this machine answers every user of the machine at its ports.",
        (
            Change(
                "spark/spark_session.py",
                '    "spark.authenticate": "true",\n',
                '    "spark.authenticate": "false",\n',
            ),
        ),
        (),
        (
            "tests/pipeline/test_spark_session.py"
            "::test_a_stranger_on_this_machine_gets_nothing_from_the_ports_of_spark",
        ),
    ),
    Bug(
        "files-of-spark-readable",
        "Every user of this machine can read the records that Spark keeps on disk.",
        (
            Change(
                "spark/spark_session.py",
                "    if LOCAL_DIR not in settings:\n",
                "    if False:\n",
            ),
        ),
        (),
        (
            "tests/pipeline/test_spark_session.py"
            "::test_the_records_that_spark_keeps_on_disk_are_private",
        ),
    ),
)
