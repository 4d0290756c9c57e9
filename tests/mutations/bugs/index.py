"""Bugs in `blackbox/index`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "position-before-data",
        "Intake writes the offset `requests` in one MULTI, and stores the requests in a later one.",
        (
            Change(
                "index/intake_changes.py",
                "                if not is_in_flight and self._run_multi(\n"
                "                    commands, while_busy if attempt == 0 else None\n"
                "                ):\n",
                "                moved = self._write_requests(end, b'largest', largest)\n"
                "                if not is_in_flight and self._run_multi([moved]) and self._run_multi(commands):\n",
            ),
        ),
        ("EXEC itself lost", "connections to Redis cut"),
    ),
    Bug(
        "due-without-positions",
        "Dispatch does not compare the position when it reads due requests.",
        (
            Change(
                "index/guarded_index.py",
                "            self._check(state, position)\n",
                "",
            ),
        ),
        ("Redis put back under living connections",),
    ),
    Bug(
        "no-skip",
        "Removals of requests that are not in the index yet are not stored in `skip`.",
        (
            Change(
                "index/dispatch_changes.py",
                "unread = [offset for offset in removals if offset >= found.requests]",
                "unread = [offset for offset in removals if offset >= found.requests + (1 << 60)]",
            ),
            Change(
                "index/opening_changes.py",
                "later = ended.bits_from(self.positions.requests)",
                "later = ended.bits_from(1 << 60)",
            ),
        ),
        ("Redis emptied", "Redis put back to an earlier state"),
    ),
    Bug(
        "settle-without-positions",
        "Writes to the index, such as the removal of delivered requests, do not compare the position.",
        (
            Change(
                "index/guarded_index.py",
                "        return self._check(*self._redis.run(commands)[1:])\n",
                "        return positions_of(self.shard, *self._redis.run(commands)[1:]) or self.positions\n",
            ),
        ),
        ("Redis put back under living connections", "Redis emptied"),
    ),
    Bug(
        "silent-reconnect",
        "After a lost connection, blackbox connects to Redis again and repeats the commands, without a recovery.",
        (
            Change(
                "index/connection.py",
                "            while block := list(islice(coming, STREAM_COMMANDS)):\n",
                "            commands = list(coming)\n"
                '            if commands[:1] != [pack("MULTI")]:\n'
                '                packed = [b"".join(commands)]\n'
                "                try:\n"
                "                    self._connection.send_packed_command(packed)\n"
                "                    return self._read(len(commands))\n"
                "                except (redis.ConnectionError, OSError):\n"
                "                    self._connection.disconnect()\n"
                "                    self._connection.send_packed_command(packed)\n"
                "                    return self._read(len(commands))\n"
                "            coming = iter(commands)\n"
                "            while block := list(islice(coming, STREAM_COMMANDS)):\n",
            ),
        ),
        ("Redis started with its last writes lost", "Redis put back to an earlier state"),
        ("tests/service/test_lost_redis.py",),
    ),
    Bug(
        "short-expiry",
        "Payloads expire one second after the due time, even if no service runs.",
        (
            Change(
                "index/command_builder.py",
                "        return left_s + self._grace_s\n",
                "        return left_s + 1\n",
            ),
        ),
        ("service killed", "Kafka killed"),
    ),
    Bug(
        "walk-without-token",
        "A walk continues although the index was opened again.",
        (Change("index/walk.py", "token != self._token or rebuild", "rebuild"),),
        ("Redis put back to before a trim", "Redis emptied after a trim"),
    ),
    Bug(
        "positions-after-the-walk",
        "A walk returns the position that it read last, not the position at its start.",
        (
            Change(
                "index/walk.py",
                "        self._check(*about)\n        if scores.count",
                "        self.positions = self._check(*about)\n        if scores.count",
            ),
        ),
        ("Redis emptied after a trim",),
    ),
    Bug(
        "walk-reconnects",
        "A walk that loses its connection continues on a new connection.",
        (
            Change(
                "index/walk.py",
                "        self._token = token\n",
                "        self._token = token\n        self._connections = connections\n",
            ),
            Change(
                "index/walk.py",
                "        scores, *about = self._redis.run([look, *self._about()])\n",
                "        try:\n"
                "            scores, *about = self._redis.run([look, *self._about()])\n"
                "        except RecoveryRequired:\n"
                "            self._redis = RedisSession(self._connections, self._keys.state)\n"
                "            scores, *about = self._redis.run([look, *self._about()])\n",
            ),
        ),
        ("Redis put back to before a trim",),
    ),
    Bug(
        "walk-over-lost-due-times",
        "A walk does not check whether the due times still exist.",
        (Change("index/walk.py", "if sentinel is None or found", "if found"),),
        ("due times deleted alone",),
    ),
    Bug(
        "cut-walk-counts-whole",
        "A walk that ends early counts as if it had found no pending request up to its end.",
        (Change("index/walk.py", "return min(self._at, self._end)", "return self._end"),),
        (),
    ),
    Bug(
        "walk-with-requests-unread",
        "A walk does not wait until all requests with a recorded verdict are read.",
        (Change("index/walk.py", "known_to > self.positions.requests or ", ""),),
        ("Redis full",),
    ),
    Bug(
        "early-not-awaited",
        "A walk does not wait until a replacement is read whose earlier request is already removed.",
        (Change("index/walk.py", "*(int(name, 16) + 1 for name in early), ", ""),),
        (),
    ),
    Bug(
        "ignored-not-written",
        "Intake does not record which conditional records did not count.",
        (
            Change(
                "index/intake_changes.py",
                "        yield from self._add_members(self._keys.ignored, sorted(plan.ignored))\n",
                "",
            ),
        ),
        ("crash after a promotion was committed",),
    ),
    Bug(
        "skip-left",
        "Recovery keeps `skip` when it empties an index.",
        (
            Change(
                "index/command_builder.py", "keys.refused, keys.skip, keys", "keys.refused, keys"
            ),
        ),
        ("Redis put back to before a trim",),
    ),
    Bug(
        "stored-by-anybody",
        "Another process stores requests while the owner rebuilds the index.",
        (
            Change(
                "index/intake_changes.py",
                "if state[2] is not None and (ended is None or state[2] != self._token):",
                "if False:",
            ),
        ),
        ("service killed while it rebuilds",),
    ),
    Bug(
        "sentinel-not-checked",
        "Recovery does not notice that only the due times were lost.",
        (
            Change(
                "index/command_builder.py", "        if last != [SENTINEL]:", "        if False:"
            ),
        ),
        ("due times deleted alone",),
    ),
    Bug(
        "cold-marks-not-checked",
        "Recovery and walks do not notice that only the bits of the cold tier were lost.",
        (
            Change(
                "index/command_builder.py",
                "if is_expected and not exists:",
                "if key != keys.cold and is_expected and not exists:",
            ),
            Change("index/walk.py", "if int(cold or 0) > 0 and not segments:", "if False:"),
        ),
        (),
    ),
    Bug(
        "emptied-unseen",
        "An owner removes entries of an index before it checks that it is still the index that it loaded.",
        (
            Change(
                "index/opening_changes.py",
                "        while True:\n            self._watch_loaded()\n            names",
                "        while True:\n            names",
            ),
            Change(
                "index/opening_changes.py",
                "            self._drop_payloads()\n            about",
                "            self._drop_payloads()\n            self._watch_loaded()\n            about",
            ),
        ),
        ("service frozen past its session, beside another",),
    ),
    Bug(
        "memory-not-checked",
        "Recovery does not notice that only `skip`, `moved` or `ended` was lost.",
        (
            Change(
                "index/command_builder.py",
                "if is_expected and not exists:",
                "if key in (keys.ids, keys.cold) and is_expected and not exists:",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "moved-left",
        "Dispatch does not remove an ended request from `moved`.",
        (
            Change(
                "index/dispatch_changes.py",
                "        yield from zrem_chunks(self._keys.moved, done.origins)\n",
                "",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "refused-records-are-pending",
        "A request without a payload counts as pending, also if it was refused: a cancel ends its dead letter.",
        (
            Change(
                "index/lookups.py",
                "and (offset not in refused if identity is None else identity.reason is None),\n",
                "and (identity is None or identity.reason is None),\n",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py",),
    ),
    Bug(
        "marks-of-refused-lost",
        "A rebind to an earlier end forgets which of the requests before that end were refused.",
        (
            Change(
                "index/opening_changes.py",
                "            *self._unmark_refused(first),\n",
                '            pack("UNLINK", keys.refused),\n',
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py",),
    ),
    Bug(
        "refused-for-ever",
        "The marks of refused requests stay in Redis after these have ended.",
        (
            Change(
                "index/dispatch_changes.py",
                "and segment_of(f) < first]:\n",
                "and segment_of(f) < 0]:\n",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py",),
    ),
    Bug(
        "parked-and-forgotten",
        "A new shard owner does not look for parked requests.",
        (
            Change(
                "index/postponing.py",
                "            while first := self._redis.ask(\n",
                "            while first := () and self._redis.ask(\n",
            ),
        ),
        (),
        ("tests/unit/dispatch", "tests/contract/test_shard_index.py"),
    ),
    Bug(
        "parked-by-others",
        "Dispatch does not look for requests that a fenced owner parked, or that are parked after a rollback of Redis.",
        (
            Change(
                "index/postponing.py",
                "        if total != sum(in_bands):",
                "        if False:",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py", "tests/contract/test_shard_machine.py"),
    ),
    Bug(
        "payload-of-a-cancelled-request",
        "Dispatch writes the payload of a postponed request that another process has just cancelled.",
        (
            Change(
                "index/dispatch_changes.py",
                "                commands += self._postpone_commands(pending, done.now_ms, only_there=is_whole)\n",
                "                commands += self._postpone_commands(pending, done.now_ms)\n",
            ),
        ),
        (),
        (
            "tests/contract/test_shard_index.py::test_a_request_cancelled_elsewhere_while_it_is_postponed_leaves_no_payload",
        ),
    ),
    Bug(
        "backlog-first",
        "Parked requests of one target fill a whole batch.",
        (
            Change(
                "index/dispatch_changes.py",
                "            stored = self._payloads(ready + released, int(state[2] or 0))\n",
                "            stored = self._payloads((released + ready)[:limit], int(state[2] or 0))\n",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py",),
    ),
    Bug(
        "letters-forgotten",
        "Parked payloads expire after a month. Dead letters are read from Kafka again and admitted, and rescheduled "
        "requests become dead letters.",
        (
            Change(
                "index/command_builder.py",
                "            return PARKED_FOR_S + self._grace_s\n",
                "            return 30 * 86_400 + self._grace_s\n",
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "letters-expire-like-requests",
        "The payload of a dead letter expires as if it were a request: after an outage, its record is read again and "
        "its message delivered.",
        (
            Change(
                "index/command_builder.py",
                "        if is_letter:\n            left_s += PARKED_FOR_S\n",
                "",
            ),
        ),
        (),
        (
            "tests/contract/test_shard_index.py::test_a_dead_letter_does_not_become_a_request_again_after_an_outage_longer_than_the_grace",
        ),
    ),
    Bug(
        "messages-read-all-at-once",
        "A hundred messages of each shard are read at once, regardless of their size.",
        (
            Change(
                "index/inspector.py",
                "        count = max(1, bisect_right(list(accumulate(sizes)), most_bytes))\n",
                "        count = len(sizes)\n",
            ),
        ),
        (),
        ("tests/contract/test_inspector.py",),
    ),
    Bug(
        "cancels-read-messages",
        "Intake reads the whole payloads of all requests that a batch of cancels names, at once.",
        (
            Change(
                "index/guarded_index.py",
                "        for name, head in read_heads(names, self._starts):\n",
                "        for name, head in zip(names, self._mget(names), strict=True):\n",
            ),
        ),
        (),
        ("tests/contract/test_payload_heads.py::test_a_burst_of_cancels_reads_no_message",),
    ),
    Bug(
        "settled-receipts-forgotten",
        "Spark: a worker that saw receipts settled replaces requests by an older state of Redis, in which they are still pending.",
        (
            Change(
                "index/intake_changes.py",
                "        if view.positions.receipts < self._settled:\n",
                "        if False:\n",
            ),
        ),
        (),
        (
            "tests/contract/test_shard_index.py::test_no_replacement_is_decided_after_redis_lost_receipts",
        ),
    ),
    Bug(
        "one-list-in-flight",
        "All owners of a shard write the same list of requests in flight. A fenced owner empties the list of its successor.",
        (
            Change(
                "index/dispatch_changes.py",
                '        forget = pack("HDEL", key, self._token)\n'
                '        command = pack("HSET", key, self._token, b"".join(names)) if names else forget\n',
                '        forget = pack("HDEL", key, "owner")\n'
                '        command = pack("HSET", key, "owner", b"".join(names)) if names else forget\n',
            ),
        ),
        (),
        (
            "tests/contract/test_shard_index.py::test_a_replaced_owner_cannot_change_what_its_successor_has_in_flight",
        ),
    ),
    Bug(
        "more-come-out-than-may-go",
        "All parked messages come out in each second, and most of them are parked again.",
        (
            Change(
                "index/postponing.py",
                "min(share, release[known[band]])",
                "share",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py",),
    ),
    Bug(
        "postponed-payloads-expire",
        "The payload of a message that is postponed expires as if the message were not.",
        (
            Change(
                "index/command_builder.py",
                '        return pack("EXPIRE", name, self._expires_s(due_ms, now_ms, is_letter=True))\n',
                '        return pack("EXISTS", name)\n',
            ),
        ),
        (),
        ("tests/unit/dispatch",),
    ),
    Bug(
        "bands-without-end",
        "A score beyond all bands in which requests are parked stops the deliveries of its shard.",
        (
            Change(
                "index/postponing.py",
                "            lowest, end = parked_at(1, 0), span(BANDS)[1]\n",
                '            lowest, end = parked_at(1, 0), "(+inf"\n',
            ),
        ),
        (),
        (
            "tests/contract/test_shard_index.py::test_a_score_beyond_all_bands_does_not_keep_others_from_being_delivered",
        ),
    ),
    Bug(
        "a-gap-needs-room",
        "A shard whose requests Kafka removed does not open while Redis is full, so nothing makes room there.",
        (
            Change(
                "index/opening_changes.py",
                "[moved, *self._forget_skipped(start, first)], even_if_full=True",
                "[moved, *self._forget_skipped(start, first)]",
            ),
        ),
        (),
        ("tests/contract/test_full_redis.py",),
    ),
    Bug(
        "a-gap-written-late",
        "An opening that finds the requests which Kafka removed already passed records an empty gap in place of theirs.",
        (
            Change(
                "index/opening_changes.py",
                '            if start < first:\n                about += (b"gap"',
                '            if True:\n                about += (b"gap"',
            ),
        ),
        (),
        (
            "tests/contract/test_opening_changes.py::test_requests_that_kafka_removed_stay_known_as_such_if_another_passed_them_first",
        ),
    ),
    Bug(
        "an-older-index-keeps-its-room",
        "A full Redis refuses to empty the index of an earlier version, so its shard stays closed.",
        (
            Change(
                "index/opening_changes.py",
                "self._exec_even_if_full(removals, SeenState(format, requests, receipts))",
                "self._exec_even_if_full(removals, self.positions)",
            ),
        ),
        (),
        (
            "tests/contract/test_full_redis.py::test_an_index_of_an_earlier_version_is_emptied_and_begun_again_in_a_full_redis",
        ),
    ),
    Bug(
        "emptied-by-an-owner-that-waited",
        "An owner that finds Redis full while it empties an index takes the entries of the next owner.",
        (
            Change(
                "index/when_full.py",
                "if (redis.call('HGET', KEYS[1], 'format') or '') ~= ARGV[1] then return 0 end\n",
                "",
            ),
        ),
        (),
        (
            "tests/contract/test_opening_changes.py::test_an_owner_that_finds_redis_full_takes_nothing_from_the_next_one",
        ),
    ),
    Bug(
        "waiting-sets-the-clock-back",
        "While a node of a cluster hangs, the time of the others is as old as the wait for it.",
        (Change("index/redis_servers.py", "now_ms + int((now_s - at_s) * 1000)", "now_ms"),),
        (),
        ("tests/unit/test_redis_servers.py",),
    ),
    Bug(
        "notes-to-the-server-before",
        "Spark: after a failover by DNS, the driver sends its leases to the old primary. New windows get none, and end.",
        (
            Change(
                "index/bus.py",
                "        self._use_new_connection()\n        channel,",
                "        channel,",
            ),
        ),
        (),
        ("tests/contract/test_bus.py::test_a_bus_follows_its_name_to_another_server",),
    ),
    Bug(
        "listens-to-the-server-before",
        "Spark: after a failover by DNS, a task listens to the old primary until it ends.",
        (
            Change(
                "index/bus.py",
                "        else:\n            self._use_new_connection()\n",
                "",
            ),
        ),
        (),
        ("tests/contract/test_bus.py::test_a_listener_follows_its_name_to_another_server",),
    ),
    Bug(
        "closed-before-another-works",
        "Spark: while all Sentinels are down, the driver closes the connection that works. It sends no lease any more.",
        (
            Change(
                "index/bus.py",
                "                self._attempt = _Attempt(self._others, self._connect)\n",
                "                self._clients.close()\n"
                "                self._attempt = _Attempt(self._others, self._connect)\n",
            ),
        ),
        (),
        ("tests/contract/test_bus.py::test_a_bus_keeps_its_connection_while_no_other_can_be_made",),
    ),
    Bug(
        "deaf-before-another-works",
        "Spark: while all Sentinels are down, a task that heard nothing for 5 s closes the connection that works.",
        (
            Change(
                "index/bus.py",
                "                self._attempt = _Attempt(self._others, self._subscribe)\n",
                "                self._drop()\n"
                "                self._attempt = _Attempt(self._others, self._subscribe)\n",
            ),
        ),
        (),
        (
            "tests/contract/test_bus.py"
            "::test_a_listener_keeps_its_connection_while_no_other_can_be_made",
        ),
    ),
    Bug(
        "leases-wait-for-dns",
        "Spark: while the name server does not answer, leases wait for a new connection. Tasks end although Redis works.",
        (
            Change(
                "index/bus.py",
                '        Thread(target=self._run, name="bus", daemon=True).start()\n',
                "        self._run()\n",
            ),
        ),
        (),
        (
            "tests/contract/test_bus.py"
            "::test_a_bus_sends_at_once_while_the_name_server_does_not_answer",
        ),
    ),
    Bug(
        "an-earlier-lease-after-a-later-one",
        "Spark: a new connection repeats the notes that the one before has received. A task takes shards that it gave up.",
        (Change("index/bus.py", "and self._heard_s < attempt.began_s:", "and True:"),),
        (),
        (
            "tests/contract/test_bus.py"
            "::test_a_listener_does_not_receive_a_note_again_from_its_new_connection",
        ),
    ),
    Bug(
        "in-flight-watched-too-late",
        "Intake of another process reads what is pending before it watches what is in flight. A request that is delivered in between is replaced all the same.",
        (
            Change(
                "index/intake_changes.py",
                "            watched.append(self._keys.in_flight)\n",
                "            pass\n",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py",),
    ),
    Bug(
        "in-flight-forgotten-in-parts",
        "An opening that removes a part of what was delivered forgets that the rest was in flight.",
        (
            Change(
                "index/dispatch_changes.py",
                "        if done.receipts != found.receipts:\n",
                "        if True:\n",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py",),
    ),
)
