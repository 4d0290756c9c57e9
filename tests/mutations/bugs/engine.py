"""Bugs in `blackbox/engine`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "trimmed-before-the-mark",
        "Journals are trimmed up to a mark that is not in Kafka yet.",
        (
            Change(
                "engine/shard_session.py",
                "            return written.result(WRITTEN_WITHIN_S)\n",
                "            from blackbox.core.low_water import next_mark\n\n"
                "            return next_mark(session.low_water.last, walk.positions, walk.lowest)\n",
            ),
        ),
        ("Redis emptied after a trim",),
    ),
    Bug(
        "removed-requests-are-not-announced",
        "Spark: after Kafka removed requests that intake had not read, the later ones wait for the next window.",
        (
            Change(
                "engine/spark/intake_task.py",
                "        if isinstance(reason, RecordsRemoved):\n",
                "        if False:\n",
            ),
        ),
        (),
        (
            "tests/pipeline/test_intake_task.py::test_a_task_announces_that_kafka_has_removed_requests",
        ),
    ),
    Bug(
        "left-behind-for-good",
        "Spark: a shard that was left behind is never read again.",
        (
            Change(
                "engine/spark/unread_shards.py",
                "        behind = [shard for shard, left in self._behind.items() if left.until_s > now_s]\n",
                "        behind = list(self._behind)\n",
            ),
        ),
        (),
        ("tests/pipeline/test_intake_stream.py",),
    ),
    Bug(
        "gone-forgotten-too-early",
        "Requests that retention removed are forgotten before they are counted: not at all, if the opening then fails.",
        (
            Change(
                "engine/shard_owner.py",
                "            recovered = session.recovery.open()\n",
                "            recovered = session.recovery.open()\n            session.index.forget_gone()\n",
            ),
        ),
        (),
        (
            "tests/unit/test_shard_owner.py"
            "::test_requests_that_retention_removed_are_counted_once_although_an_opening_fails_late",
        ),
    ),
    Bug(
        "silence-holds-up-each-batch",
        "Spark: a partition from which Kafka returns nothing stays in the query.",
        (
            Change(
                "engine/spark/intake_stream.py",
                "            elif stored.is_silent or stored.is_behind:\n",
                "            elif stored.is_behind and not stored.is_silent:\n",
            ),
        ),
        (),
        ("tests/pipeline/test_intake_stream.py",),
    ),
    Bug(
        "much-takes-from-little",
        "Spark: partitions get shares of a batch in proportion to their backlogs. A large backlog delays the small ones.",
        (
            Change(
                "engine/spark/batch_size.py",
                "            return share\n",
                "            return amounts[-1] * most / sum(amounts)\n",
            ),
        ),
        (),
        ("tests/unit/test_batch_size.py",),
    ),
    Bug(
        "size-for-length",
        "Spark: the cost of large records is not noted. Batches of them take minutes.",
        (
            Change(
                "engine/spark/read_costs.py",
                "                self._costs[one.shard] = max(cost_s, before_s / MOST_CHEAPER)\n",
                "                self._costs[one.shard] = before_s / MOST_CHEAPER\n",
            ),
        ),
        (),
        ("tests/unit/test_batch_size.py::test_what_a_task_measured_is_known_to_the_next_plan",),
    ),
    Bug(
        "takes-shards-while-cold",
        "Spark: a driver takes shards from others before it can read them. A rolling update stops them for most of a minute.",
        (
            Change(
                "engine/spark/driver.py",
                "and self._membership.has_others():\n            return\n",
                "and self._membership.has_others():\n            pass\n",
            ),
        ),
        (),
        (
            "tests/unit/test_engines.py"
            "::test_a_driver_takes_shards_from_others_only_when_it_is_warm",
        ),
    ),
    Bug(
        "slow-once-slow-for-good",
        "Spark: a short range never lowers the cost of a partition. One that was slow once is read in short ranges for good.",
        (
            Change(
                "engine/spark/read_costs.py",
                "            if is_known or cost_s < before_s:\n",
                "            if is_known:\n",
            ),
        ),
        (),
        ("tests/unit/test_batch_size.py",),
    ),
    Bug(
        "tries-again-without-shards",
        "Spark: a batch is tried again although all of its shards were lost. It is written to a full Redis.",
        (
            Change(
                "engine/spark/intake_stream.py",
                "            if not read_plan.shards() and (attempt > 0 or self.is_warm):\n",
                "            if not read_plan.shards() and self.is_warm:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_intake_stream.py::test_a_batch_whose_shards_were_lost_is_not_tried_again",
        ),
    ),
    Bug(
        "plan-ahead-of-redis",
        "Spark: after a rollback of Redis, what it lost is read again only when a new record comes.",
        (
            Change(
                "engine/spark/intake_stream.py",
                "            self._end(cannot.keys() | back, read_plan)\n",
                "            self._end(cannot.keys(), read_plan)\n",
            ),
        ),
        (),
        ("tests/unit/test_intake_stream.py",),
    ),
    Bug(
        "begins-where-the-plan-was",
        "Spark: a shard that comes back is read from where its last batch ended, not from its position in Redis.",
        (
            Change(
                "engine/spark/kafka_source.py",
                "            is_new = at not in before or before[at].begun != begun\n",
                "            is_new = at not in before\n",
            ),
        ),
        (),
        (
            "tests/pipeline/test_kafka_source.py"
            "::test_a_partition_is_read_from_where_it_was_begun_last",
        ),
    ),
    Bug(
        "waits-for-room-without-shards",
        "Spark: while Redis is full, a driver does not become warm, takes no shards, and delivers nothing.",
        (
            Change(
                "engine/spark/intake_stream.py",
                "            while read_plan.shards() and not self.has_room.wait(LOOK_S):\n",
                "            while not self.has_room.wait(LOOK_S):\n",
            ),
        ),
        (),
        (
            "tests/pipeline/test_intake_stream.py"
            "::test_a_stream_without_shards_warms_up_though_redis_is_full",
        ),
    ),
    Bug(
        "long-batches-beside-idle-partitions",
        "Spark: a batch is long if records wait in one partition only. New requests of the others wait for its end.",
        (
            Change(
                "engine/spark/batch_size.py",
                "    waiting_s = {at: (end[at] - start[at]) * cost_s[at] for at in end}\n",
                "    waiting_s = {at: n * cost_s[at] for at in end if (n := end[at] - start[at])}\n",
            ),
        ),
        (),
        (
            "tests/unit/test_batch_size.py"
            "::test_a_batch_is_sized_for_1_s_if_records_wait_in_one_partition_only",
        ),
    ),
    Bug(
        "large-records-count-as-small",
        "Spark: partitions get equal numbers of records. A flood of large ones takes the time of the others.",
        (
            Change(
                "engine/spark/batch_size.py",
                "    cost_s = {at: costs.get(at, FIRST_COST_S) for at in end}\n",
                "    cost_s = dict.fromkeys(end, max(costs.values(), default=FIRST_COST_S))\n",
            ),
        ),
        (),
        (
            "tests/unit/test_batch_size.py"
            "::test_a_flood_of_large_records_takes_no_share_from_small_ones",
        ),
    ),
    Bug(
        "stuck-is-dead",
        "A process is not live while a shard makes no progress. Kubernetes kills it during a long rebuild, or while Kafka is away.",
        (
            Change(
                "engine/process.py",
                "        return not self._scheduler.running or self._intake.is_alive()\n",
                "        return not self.stuck()\n",
            ),
            Change(
                "engine/spark/driver.py",
                '`SparkWatch`."""\n        return True\n',
                '`SparkWatch`."""\n        return not self.stuck()\n',
            ),
        ),
        (),
        (
            "tests/unit/test_engines.py::test_a_process_is_live_while_a_shard_opens_for_minutes",
            "tests/unit/test_engines.py::test_a_driver_is_live_while_its_tasks_make_no_progress",
        ),
    ),
    Bug(
        "paused-for-a-week",
        "After a pause, intake does not continue while requests for a later time use between 75 and 85 % of Redis' memory.",
        (
            Change(
                "engine/redis_monitor.py",
                "        elif used <= RESUME_AT or self._checks_between >= PATIENT_CHECKS:\n",
                "        elif used <= RESUME_AT:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_redis_monitor.py::test_requests_for_next_week_do_not_pause_intake_for_good",
        ),
    ),
    Bug(
        "receipts-in-kafka-not-compared",
        "Spark: after a rollback of Redis, a new worker replaces a request that was already delivered. Both are delivered.",
        (
            Change(
                "engine/spark/intake_task.py",
                "                is_behind=partial(self._has_receipt_since, shard),\n",
                "",
            ),
        ),
        (),
        (
            "tests/unit/test_intake_task.py::test_a_request_that_was_delivered_before_redis_went_back_is_not_replaced",
        ),
    ),
    Bug(
        "periodic-work-waits-for-the-clock",
        "After the clock of the host was set back, the periodic work of a service waits for the earlier time.",
        (Change("engine/steady_scheduler.py", "            self._follow_the_clock()\n", ""),),
        (),
        (
            "tests/unit/test_steady_scheduler.py::test_a_step_of_the_clock_neither_stops_nor_repeats_periodic_work",
        ),
    ),
    Bug(
        "promotion-fails-each-minute",
        "Promotion of a shard that cannot succeed is tried each minute, with a log line.",
        (Change("engine/promoter.py", "min(2 * retry_s, self._every_s)", "retry_s"),),
        (),
        ("tests/unit/test_promotion_job.py",),
    ),
    Bug(
        "dies-after-1024-runs",
        "The thread of a shard that fails for hours ends, and nothing opens the shard again.",
        (Change("engine/shard_owner.py", "min(short_runs + 1, MOST_DOUBLED)", "short_runs + 1"),),
        (),
        ("tests/unit/test_shard_owner.py",),
    ),
    Bug(
        "taken-over-in-flight",
        "Spark, at least once: a window gets a shard while the one before it waits for a broker. The batch is delivered twice.",
        (
            Change(
                "engine/spark/running_window.py",
                "            shards -= {shard for other in others for shard in shards if other.may_deliver(shard)}\n",
                "            shards -= {shard for other in others for shard in shards if False}\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch_windows.py"
            "::test_without_transactions_a_successor_gets_a_shard_when_its_predecessor_has_ended",
        ),
    ),
    Bug(
        "owned-before-the-lease",
        "Spark, at least once: a window opens the shards of its launch, although another may have got them since.",
        (
            Change(
                "engine/spark/dispatch_windows.py",
                "is_first and self._is_fenced else",
                "is_first else",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch_windows.py"
            "::test_without_transactions_a_window_gets_its_shards_from_a_lease_only",
        ),
    ),
    Bug(
        "given-up-before-it-was-granted",
        "Spark, at least once: a report from before the lease counts as giving up. Another window gets the shard at once.",
        (
            Change(
                "engine/spark/running_window.py",
                "        self.granted -= self.named - reported  # given up\n",
                "        self.granted &= reported\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch_windows.py"
            "::test_without_transactions_a_report_from_before_a_lease_gives_up_no_shard",
        ),
    ),
    Bug(
        "a-second-that-is-ahead-stops-silently",
        "If the last second in the oscillator topic is ahead of all clocks, nothing is written, logged or shown.",
        (
            Change(
                "engine/oscillator.py",
                "        return second * 1000 > self.clock.latest_ms() + CLOCKS_APART_MS\n",
                "        return False\n",
            ),
        ),
        (),
        (
            "tests/unit/test_oscillator.py::test_a_last_second_that_is_ahead_is_logged_once_a_minute",
        ),
    ),
    Bug(
        "a-lone-message-lingers",
        "After a look that found nothing due, a message waits as after a transaction.",
        (
            Change(
                "engine/linger.py",
                "        if has_sent:\n",
                "        if True:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_linger.py"
            "::test_a_message_that_comes_alone_does_not_wait_for_a_look_that_found_nothing",
        ),
    ),
    Bug(
        "a-stop-waits-for-the-linger",
        "A stop or a recovery waits for the pause between two transactions.",
        (
            Change(
                "engine/linger.py",
                "        self._hurried.set()\n",
                "        pass\n",
            ),
        ),
        (),
        ("tests/unit/test_linger.py::test_a_stop_or_a_recovery_ends_the_pause",),
    ),
)
