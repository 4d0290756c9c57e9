"""Bugs in `blackbox/jobs`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "map-keys-as-python",
        "A load sends the binary keys of a Parquet map as Python writes bytes.",
        (
            Change(
                "jobs/load/cells.py",
                '        return key.decode(errors="surrogateescape")\n',
                "        return str(key)\n",
            ),
        ),
        (),
        ("tests/unit/test_rows.py",),
    ),
    Bug(
        "bad-map-ends-the-load",
        "A load ends with a Python error at bytes in a Parquet map, and names no row.",
        (
            Change(
                "jobs/load/cells.py",
                "    except orjson.JSONEncodeError:\n        # Unconverted",
                "    except ZeroDivisionError:\n        # Unconverted",
            ),
        ),
        (),
        ("tests/unit/test_rows.py",),
    ),
    Bug(
        "keys-of-any-type",
        "A load writes keys of Parquet maps such as times and booleans with the text that Python has for them.",
        (
            Change(
                "jobs/load/cells.py",
                "    return str(key) if type(key) in (str, int, UUID) else None\n",
                "    return str(key)\n",
            ),
        ),
        (),
        ("tests/unit/test_rows.py::test_a_map_with_keys_that_json_cannot_have_is_a_bad_row",),
    ),
    Bug(
        "finished-pieces-forgotten",
        "A load does not commit the progress of finished pieces again, so that Kafka forgets them while it runs.",
        (
            Change(
                "jobs/load/load.py",
                "                commit_again(self.access, self.topic, self.pieces_in)\n",
                "",
            ),
        ),
        (),
        ("tests/unit/test_load_progress.py",),
    ),
    Bug(
        "progress-committed-only-at-the-start",
        "A load of weeks commits the progress of its finished pieces again only when it is started.",
        (
            Change(
                "jobs/load/load.py",
                "                until_s = time.time() + COMMIT_AGAIN_S\n",
                '                until_s = float("inf")\n',
            ),
        ),
        (),
        ("tests/unit/test_load_progress.py",),
    ),
    Bug(
        "tasks-never-stop-for-progress",
        "The tasks of a slow load do not stop for the daily commit of its progress.",
        (
            Change(
                "jobs/load/tasks.py",
                "            if time.time() >= self.until_s:\n                return\n",
                "",
            ),
        ),
        (),
        ("tests/unit/test_load_progress.py",),
    ),
    Bug(
        "ledger-of-two-topics",
        "A ledger continues with a topic that was created again and has no record at its last offset.",
        (
            Change(
                "jobs/ledger/mismatches.py",
                "        or list(_other_topics(manifest, ids))\n",
                "",
            ),
        ),
        (),
        ("tests/unit/test_ledger_manifest.py",),
    ),
    Bug(
        "ledger-forgets-topic-ids",
        "A ledger does not store the ids of its topics.",
        (
            Change(
                "jobs/ledger/manifest.py",
                '        "topic_ids": dict(manifest.topic_ids),\n',
                "",
            ),
        ),
        (),
        ("tests/unit/test_ledger_manifest.py",),
    ),
    Bug(
        "audit-without-gone",
        "The audit drops what receipts say of requests that Kafka removed before they were read.",
        (
            Change(
                "jobs/audit/audit.py",
                "self._keep(of_requests.unionByName(gone(outcomes)))\n",
                "self._keep(of_requests)\n",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_each_planted_fault_is_found_and_nothing_else",),
    ),
    Bug(
        "audit-of-compacted-schedules",
        "The audit takes offsets whose schedule was compacted away for offsets that never held one.",
        (
            Change(
                "jobs/audit/conditions.py",
                'return is_true(col("compacted") & col("kind")',
                'return is_true(lit(False) & col("kind")',
            ),
        ),
        (),
        (
            "tests/pipeline/test_audit.py"
            "::test_of_schedules_only_those_whose_records_and_receipts_are_kept_are_judged",
        ),
    ),
    Bug(
        "audit-of-compacted-targets",
        "The audit expects every delivered message in a compacted target.",
        (
            Change(
                "jobs/audit/exceptions.py",
                "any_of(is_kept & ~is_true(may_be_compacted_away), is_beyond",
                "any_of(is_kept, is_beyond",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_each_planted_fault_is_found_and_nothing_else",),
    ),
    Bug(
        "audit-of-lost-targets",
        "The audit counts messages as delivered that are beyond the end of their target, or whose target is gone.",
        (
            Change(
                "jobs/audit/exceptions.py",
                "any_of(is_kept & ~is_true(may_be_compacted_away), is_beyond, is_gone)",
                "any_of(is_kept & ~is_true(may_be_compacted_away))",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_each_planted_fault_is_found_and_nothing_else",),
    ),
    Bug(
        "audit-of-hidden-messages",
        "The audit does not expect messages beyond an open transaction of another producer in their target.",
        (
            Change(
                "jobs/audit/targets.py",
                'ReadableBounds(access, "read_uncommitted")',
                "ReadableBounds(access)",
            ),
        ),
        (),
        ("tests/unit/test_audit_targets.py",),
    ),
    Bug(
        "audit-looks-for-the-history",
        "The audit misses messages to the history topic, which it does not read.",
        (
            Change(
                "jobs/audit/exceptions.py",
                ' & ~col("to_topic").eqNullSafe(lit(unread))\n',
                "\n",
            ),
        ),
        (),
        (
            "tests/pipeline/test_audit.py"
            "::test_of_schedules_only_those_whose_records_and_receipts_are_kept_are_judged",
        ),
    ),
    Bug(
        "audit-of-the-history",
        "The audit reads the history topic if a caller names it, and counts copies as deliveries.",
        (
            Change(
                "jobs/audit/targets.py",
                "[name for name in names if name != copies]",
                "list(names)",
            ),
        ),
        (),
        (
            "tests/pipeline/test_audit.py"
            "::test_of_schedules_only_those_whose_records_and_receipts_are_kept_are_judged",
        ),
    ),
    Bug(
        "audit-of-late-replacements",
        "The audit lets a replacement that came too late end other requests until it is a dead letter.",
        (
            Change(
                "jobs/audit/replacements.py",
                "said_invalid.union(did_not_count)",
                "said_invalid",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_each_planted_fault_is_found_and_nothing_else",),
    ),
    Bug(
        "audit-of-replaced-requests",
        "The audit does not look for outcomes of requests whose replacements were delivered.",
        (
            Change(
                "jobs/audit/exceptions.py",
                ', col("replaced").isNotNull()\n',
                "",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_each_planted_fault_is_found_and_nothing_else",),
    ),
    Bug(
        "audit-of-refused-requests",
        "The audit assumes that no request ends before its due time.",
        (
            Change(
                "jobs/audit/request_statuses.py",
                '    asked_ms = least(col("timestamp_ms"), col("due_ms"))\n',
                '    asked_ms = col("due_ms")\n',
            ),
        ),
        (),
        (
            "tests/pipeline/test_audit.py"
            "::test_of_schedules_only_those_whose_records_and_receipts_are_kept_are_judged",
        ),
    ),
    Bug(
        "audit-by-the-last-mark",
        "If receipts were removed, the audit judges only requests above the last low-water mark: that passes a lost request.",
        (
            Change(
                "jobs/audit/positions.py",
                'earliest = smallest(struct("receipt", "offset"))',
                'earliest = smallest(struct((-col("receipt")).alias("receipt"), "offset"))',
            ),
        ),
        (),
        (
            "tests/pipeline/test_audit.py"
            "::test_of_schedules_only_those_whose_records_and_receipts_are_kept_are_judged",
        ),
    ),
    Bug(
        "audit-without-low-water",
        "The audit does not judge requests above the low-water mark if earlier receipts were removed.",
        (
            Change(
                "jobs/audit/request_statuses.py",
                '    is_accounted_for = is_true(col("offset") >= col("accounted_from"))\n',
                "    is_accounted_for = lit(False)\n",
            ),
        ),
        (),
        (
            "tests/pipeline/test_audit.py"
            "::test_of_schedules_only_those_whose_records_and_receipts_are_kept_are_judged",
        ),
    ),
    Bug(
        "audit-of-lost-receipts",
        "The audit ignores that a barrier says that the receipts before it are lost, and reports ended requests as lost.",
        (
            Change(
                "jobs/audit/positions.py",
                "cuts, losses = _cuts(later), _losses(outcomes)\n",
                "cuts, losses = _cuts(later), {}\n",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_requests_whose_receipts_were_lost_are_not_judged",),
    ),
    Bug(
        "audit-by-a-mark-from-before-the-loss",
        "The audit judges requests by a low-water mark that says nothing of the receipts that were lost.",
        (
            Change(
                "jobs/audit/positions.py",
                "loss.receipt + 1 for shard",
                "0 for shard",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_requests_whose_receipts_were_lost_are_not_judged",),
    ),
    Bug(
        "audit-without-receipts",
        "The audit takes a receipts topic that does not exist for an empty one, and reports ended requests as lost.",
        (
            Change(
                "jobs/audit/topic_check.py",
                "    if lacking:\n",
                "    if lacking and not written:\n",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_an_audit_fails_if_a_receipts_topic_is_missing",),
    ),
    Bug(
        "audit-of-hidden-receipts",
        "The audit does not wait for receipts of messages that it has read in targets already.",
        (
            Change(
                "jobs/audit/audit.py",
                "        hiding = self._wait_for_receipts(shards) if targets else set()\n",
                "        hiding = set()\n",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_each_planted_fault_is_found_and_nothing_else",),
    ),
    Bug(
        "audit-reads-twice",
        "The audit does not notice that Spark read records again after Kafka had removed some of them.",
        (
            Change(
                "jobs/audit/audit.py",
                "        self._check_read_once()\n",
                "",
            ),
        ),
        (),
        (
            "tests/pipeline/test_audit.py"
            "::test_an_audit_fails_if_records_that_it_must_read_again_are_gone",
        ),
    ),
    Bug(
        "audit-believes-its-plan",
        "The audit judges records that Kafka removed before they were read as if they had never been there.",
        (
            Change(
                "jobs/audit/audit.py",
                "        requests.leave_out_removed(left)\n        outcomes.leave_out_removed(left)\n",
                "",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_what_kafka_removes_during_an_audit_is_not_judged",),
    ),
    Bug(
        "audit-without-a-topic",
        "The audit leaves out request topics that do not exist.",
        (
            Change(
                "jobs/audit/audit.py",
                "        check_topics(first, self._settings, self._access)\n",
                "",
            ),
        ),
        (),
        (
            "tests/pipeline/test_audit.py"
            "::test_an_audit_fails_if_one_of_the_request_topics_does_not_exist",
        ),
    ),
    Bug(
        "audit-asks-for-each-target",
        "The audit asks the brokers about one target after the other.",
        (
            Change(
                "jobs/audit/targets.py",
                "    described = Topics(access.admin()).describe(names) if names else {}\n",
                "    topics = Topics(access.admin())\n"
                "    described = {n: one for name in names for n, one in topics.describe([name]).items()}\n",
            ),
        ),
        (),
        ("tests/unit/test_audit_targets.py",),
    ),
    Bug(
        "audit-believes-refused-records",
        "The audit counts a lost request as replaced if a refused record after it would be valid by now.",
        (
            Change(
                "jobs/audit/request_statuses.py",
                '.join(refused, PLACE, "left_anti")\n',
                "\n",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_each_planted_fault_is_found_and_nothing_else",),
    ),
)
