"""Bugs that somebody might write, each as a change of the product's text.

Each of them has lost or duplicated messages of a system like this one.
"""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """In a file of the package, a text that occurs once, and its replacement."""

    file: str
    old: str
    new: str


class Bug(NamedTuple):
    """`tests` are run if those without servers find nothing; () if those must find it.

    `faults` of the chaos suite are played one after the other, and may also show it.
    """

    name: str
    what: str
    changes: tuple[Change, ...]
    faults: tuple[str, ...]
    tests: tuple[str, ...] = ("tests/service/test_exactly_once.py",)


BUGS = (
    Bug(
        "remove-before-commit",
        "what is being delivered leaves the index before Kafka has it",
        (
            Change(
                "core/dispatch.py",
                "            position = self.writer.commit(delivery.receipt(dead), latest_ms)\n",
                "            gone = {offset: entry.caller_id for offset, entry in ended.items()}\n"
                "            self.index.settle(gone, self.index.positions.receipts)\n"
                "            position = self.writer.commit(delivery.receipt(dead), latest_ms)\n",
            ),
        ),
        ("crash after D3", "reply to EndTxn lost"),
    ),
    Bug(
        "position-before-data",
        "intake moves its position first, and stores then",
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
        "dispatch does not look whether the index is still its own",
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
        "receipts-before-fence",
        "a new owner reads what was delivered before it has fenced the old one",
        (
            Change(
                "core/recovery.py",
                "        self.confirm()  # R1\n",
                "        told = self.journal.receipt_bounds().end\n        self.confirm()\n",
            ),
            Change(
                "core/recovery.py",
                "        outcomes = self._outcomes(start, position)",
                "        outcomes = self._outcomes(start, told)",
            ),
        ),
        ("service frozen past its session", "one of two services killed"),
    ),
    Bug(
        "no-skip",
        "a removal is forgotten when its request is not in the index yet",
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
        "what was delivered is removed from whatever index is there now",
        (
            Change(
                "index/guarded_index.py",
                "        return self._check(*self._session.run(commands)[1:])\n",
                "        return positions_of(self.shard, *self._session.run(commands)[1:]) or self.positions\n",
            ),
        ),
        ("Redis put back under living connections", "Redis emptied"),
    ),
    Bug(
        "one-id-per-process",
        "the transactional id is the process', so that a new owner fences nobody",
        (
            Change(
                "journal/shard_writer.py",
                "access.transactional_id(str(shard)) if exactly_once",
                "access.transactional_id(f\"{shard}-{__import__('os').getpid()}\") if exactly_once",
            ),
        ),
        ("service frozen past its session", "several of these"),
    ),
    Bug(
        "position-of-the-first-record",
        "a batch says that it begins at its first record, not where it was read from",
        (
            Change(
                "journal/request_reader.py",
                "                start, end = self._positions[shard], records[-1].offset + 1\n",
                "                start, end = records[0].offset, records[-1].offset + 1\n",
            ),
            Change(
                "journal/shard_journal.py",
                "            yield Batch(position, reached, read_records(messages), leader_epochs(messages))\n",
                "            found = read_records(messages)\n"
                "            first = found[0].offset if found else position\n"
                "            yield Batch(first, reached, found, leader_epochs(messages))\n",
            ),
        ),
        ("services come and go", "several of these"),
        ("tests/service/test_shard_journal.py", "tests/service/test_exactly_once.py"),
    ),
    Bug(
        "silent-reconnect",
        "a lost connection to Redis is made anew, and nobody looks what Redis has lost",
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
        "payloads expire a second after they are due, also while nobody runs",
        (
            Change(
                "index/command_builder.py",
                'b"%d" % (left_s + self._grace_s)',
                'b"%d" % (left_s + 1)',
            ),
        ),
        ("service killed", "Kafka killed"),
    ),
    Bug(
        "the-last-receipt-is-believed",
        "nobody looks whether the messages of the last receipt are there",
        (
            Change(
                "core/barrier.py",
                "        missing, unread = journal.check(claims, PATIENCE_S)\n",
                "        missing, unread = [], {}  # type: ignore[var-annotated]\n",
            ),
        ),
        ("coordinator torn",),
    ),
    Bug(
        "a-word-without-an-offset",
        "what the client calls delivered is believed, though it cannot say where",
        (
            Change(
                "journal/shard_writer.py", "            self._unplaced += 1\n", "            pass\n"
            ),
        ),
        ("Kafka killed",),
        ("tests/service/test_moving_leader.py",),
    ),
    Bug(
        "open-before-read",
        "a shard delivers before it has read its requests to the end",
        (Change("core/recovery.py", "        self._catch_up()  # R5\n", ""),),
        ("from after a cancel",),
    ),
    Bug(
        "walk-without-token",
        "a walk goes on over an index that was opened anew meanwhile",
        (Change("index/walk.py", "token != self._token or rebuild", "rebuild"),),
        ("Redis put back to before a trim", "Redis emptied after a trim"),
    ),
    Bug(
        "positions-after-the-walk",
        "a walk says the positions that it read last, not those it began at",
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
        "a walk whose connection is lost goes on over another one",
        (
            Change(
                "index/walk.py",
                "        self._token = token\n",
                "        self._token = token\n        self._connections = connections\n",
            ),
            Change(
                "index/walk.py",
                "        scores, *about = self._session.run([look, *self._about()])\n",
                "        try:\n"
                "            scores, *about = self._session.run([look, *self._about()])\n"
                "        except RecoveryRequired:\n"
                "            self._session = RedisSession(self._connections, self._keys.state)\n"
                "            scores, *about = self._session.run([look, *self._about()])\n",
            ),
        ),
        ("Redis put back to before a trim",),
    ),
    Bug(
        "walk-over-lost-due-times",
        "a walk does not look whether the due times are still there",
        (Change("index/walk.py", "if sentinel is None or found", "if found"),),
        ("due times deleted alone",),
    ),
    Bug(
        "walk-with-requests-unread",
        "a walk does not wait until the requests are read of which a mark told",
        (Change("index/walk.py", "known_to > self.positions.requests or ", ""),),
        ("Redis full",),
    ),
    Bug(
        "early-not-awaited",
        "a walk does not wait until a replacement is read whose other request was removed before",
        (Change("index/walk.py", "*(int(name, 16) + 1 for name in early), ", ""),),
        (),
    ),
    Bug(
        "early-forgotten",
        "a replacement whose other request was removed before there was room for it is too late",
        (
            Change(
                "core/settling.py",
                "index.positions.receipts, early=[offset])",
                "index.positions.receipts)",
            ),
        ),
        (),
    ),
    Bug(
        "ended-by-id-forgotten",
        "a cancel by the first id is forgotten while what it ends is cold",
        (
            Change(
                "core/resolve.py",
                "            plan.cancelled_cold[original] = by\n",
                "            pass\n",
            ),
        ),
        (),
    ),
    Bug(
        "ignored-not-written",
        "intake forgets which conditional records did not count",
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
        "ignored-not-told",
        "a mark is committed, and no receipt says which conditional records did not count",
        (Change("core/low_water.py", "ignored=ignored", "ignored=[]"),),
        ("crash after a promotion was committed",),
    ),
    Bug(
        "receipts-of-the-last-pair",
        "a mark says that no older receipts are needed, whatever is still pending",
        (
            Change(
                "core/low_water.py",
                "*(pair[1] for pair in behind)",
                "*(pair[1] for pair in pairs)",
            ),
        ),
        ("Redis emptied after a trim",),
    ),
    Bug(
        "jump-to-the-start",
        "an index that lies below the start of a journal is kept, and goes on at the start",
        (
            Change(
                "core/index_preparation.py",
                "if is_behind and (kept.is_rebuilding or self._mark_covers_pending(requests, binding)):",
                "if is_behind and kept.is_rebuilding:",
            ),
        ),
        ("Redis put back to before a trim",),
    ),
    Bug(
        "skip-left",
        "an index that is emptied keeps the removals that were read ahead",
        (Change("index/command_builder.py", "keys.cold, keys.skip, keys", "keys.cold, keys"),),
        ("Redis put back to before a trim",),
    ),
    Bug(
        "unknown-believed",
        "a carried record that no receipt told of counts, whatever became of the one it carries on",
        (
            Change(
                "core/plan.py",
                "return offset < below and offset not in self.ignored",
                "return offset not in self.ignored",
            ),
        ),
        ("crash after a promotion was committed",),
    ),
    Bug(
        "receipts-trimmed-first",
        "receipts are removed before the requests that they end",
        (
            Change(
                "journal/trim.py",
                "zip(topics, (mark.requests, mark.receipts), strict=True)",
                "zip(topics[::-1], (mark.receipts, mark.requests), strict=True)",
            ),
        ),
        ("crash after one journal was trimmed",),
    ),
    Bug(
        "trimmed-before-the-mark",
        "journals are trimmed up to a mark that is not in Kafka yet",
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
        "stored-by-anybody",
        "requests are stored by another process while the owner rebuilds the index",
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
        "nobody notices that the due times were lost alone",
        (
            Change(
                "index/command_builder.py", "        if last != [SENTINEL]:", "        if False:"
            ),
        ),
        ("due times deleted alone",),
    ),
    Bug(
        "cold-marks-not-checked",
        "nobody notices that the marks of the cold tier were lost alone",
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
        "who begins an index empties it before it looks whether it is still the one it saw",
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
        "cut-not-heard",
        "receipts of requests that a log lost end those that take their places",
        (
            Change(
                "core/outcomes.py",
                "            self._forget_from(first)\n",
                "            pass\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "begun-without-a-mark",
        "a topic that was created again is begun, and its first receipt does not say where",
        (
            Change(
                "rebind/decide.py",
                "        return replace(self.barrier, mark=Mark(self.begins, end))\n",
                "        return self.barrier\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "unknown-not-noted",
        "an index is bound to new receipts, and forgets that they do not tell what was delivered before",
        (
            Change(
                "rebind/topic_rebind.py",
                "index.rebind(decision.positions, self._ours, decision.unknown_ms, tail)",
                "index.rebind(decision.positions, self._ours, 0, tail)",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "older-index-asked-again",
        "what an index of an old topic still has is asked for again, though the new topic was opened since",
        (
            Change(
                "rebind/decide.py",
                "bool(groups & {self.ours.group, kept.binding.group})",
                "False",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "rebind-fenced-once",
        "rebind gives up when a service that tries to open the shard fences it",
        (
            Change(
                "rebind/topic_rebind.py",
                "return again(self._rebind, index)",
                "return self._rebind(index)",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "too-late-forgotten",
        "a replacement by id that was too late is judged again, by what is pending now",
        (
            Change(
                "core/resolve.py",
                "is_in_time = not was_too_late and _end_named(",
                "is_in_time = _end_named(",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "early-leaves-a-holder",
        "a replacement that there is no room for leaves what waits under its caller id",
        (
            Change(
                "core/settling.py",
                "own = [] if caller_id is None else [caller_id]",
                "own: list[str] = []",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "memory-not-checked",
        "nobody notices that `skip`, `moved` or `ended` was lost alone",
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
        "which record promotion wrote is remembered although its request has ended",
        (
            Change(
                "index/dispatch_changes.py",
                "                commands += zrem_chunks(self._keys.moved, origins)\n",
                "",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "rebind-without-outcomes",
        "a rebind asks again for what receipts say has ended",
        (
            Change(
                "rebind/leftovers.py",
                "if offset >= self.first and offset not in self.ended",
                "if offset >= self.first",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "newer-record-ended",
        "a rebind asks again for what its caller has replaced or cancelled since",
        (
            Change(
                "rebind/since.py", "newer.caller_ids.update(touched_by(changes).caller_ids)", "pass"
            ),
        ),
        (),
        (),
    ),
    Bug(
        "letter-asked-again",
        "a rebind asks again for what was to become a dead letter",
        (
            Change(
                "rebind/leftovers.py",
                "        if entry.reason is not None:\n",
                "        if False:\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "older-receipts-kept",
        "an index older than its receipts topic is bound to it as it is",
        (
            Change(
                "rebind/decide.py",
                "        if by is None and not is_same and openings(journal, self.ours.topic_id):\n",
                "        if False:\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "asked-again-unsaid",
        "no receipt tells which index the requests were of that were asked for again",
        (
            Change(
                "rebind/decide.py",
                "group=self.ours.group, unknown_ms=unknown_ms, cut=list(cut), rebound=rebound,",
                "group=self.ours.group, unknown_ms=unknown_ms, cut=list(cut),",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "older-than-a-cut-kept",
        "what an index of before a log lost its end has of the lost requests is asked for once more",
        (
            Change(
                "rebind/decide.py",
                "Gone(self.ours.topic_id, first, since, is_open, is_unknown=bool(cuts))",
                "Gone(self.ours.topic_id, first, since, is_open)",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "cut-said-twice",
        "a rebind of an older index says once more that the log lost its end, and voids what was delivered since",
        (
            Change(
                "rebind/decide.py",
                "cut=[] if explained else [lost]",
                "cut=[first]",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "fenced-for-nothing",
        "a service that cannot open a shard fences whoever rebinds it",
        (
            Change(
                "core/recovery.py",
                "        preparation.load()  # `blackbox rebind` may be running, and would be fenced for nothing\n",
                "",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "all-leave-their-partitions",
        "requests are asked for again anywhere though the topic has as many partitions as before",
        (
            Change(
                "rebind/decide.py",
                "    return not former or max(former) + 1 == count\n",
                "    return not former\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "cancels-by-id-not-heard",
        "a rebind asks again for what was cancelled by its id since",
        (Change("rebind/since.py", " or id in self.cancelled\n", "\n"),),
        (),
        (),
    ),
    Bug(
        "unknown-recurs-no-more",
        "what recurs ends when its outcome becomes unknown",
        (
            Change(
                "core/interpret.py",
                "if isinstance(content, Request | Entry) and content.recurs is not None:",
                "if False:",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "first-id-not-looked-for",
        "a cancel by the first id of what was carried on is not seen before its next time is asked for",
        (
            Change(
                "core/follow_ups.py",
                "names = (offset, entry.origin, entry.caller_id)",
                "names = (offset, entry.caller_id)",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "backlog-remembered-whole",
        "the memory of the service grows with the backlog in Kafka",
        (
            Change(
                "core/follow_ups.py",
                "has_room = is_next and len(self._hashes) < MOST_REMEMBERED",
                "has_room = is_next",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "not-looked-for-beyond",
        "what recurs goes on although a record in a very long backlog cancels it",
        (
            Change(
                "core/follow_ups.py",
                "elif name in self._wanted:",
                "elif False:",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "neighbours-refused",
        "what was in a batch with a record that Kafka does not take becomes a dead letter, too",
        (
            Change(
                "rebind/leftovers.py",
                "            if len(batch) == 1:\n                self._note(refused.suspects)\n",
                "            self._note(refused.suspects)\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "written-behind-a-lost-end",
        "what callers wrote behind a lost end is passed over when the log is still shorter than it was",
        (
            Change(
                "rebind/decide.py",
                "    places = [requests.end, since, tail",
                "    places = [requests.end, tail",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "ranks-that-moved",
        "what a frozen owner puts off while an index is read is not written again",
        (
            Change(
                "rebind/leftovers.py",
                "            self._check_all_seen()\n",
                "",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "gap-of-former-partitions",
        "former partitions are begun with the first one, and a run that is interrupted hides the others",
        (
            Change(
                "rebind/topic_rebind.py",
                "[*there, *reversed(gone)]",
                "[*there, *gone]",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "former-partition-unsaid",
        "nothing in Kafka says that what a former partition had was asked for again",
        (
            Change(
                "rebind/decide.py",
                "        return shard.partition < self.receipts_count\n",
                "        return shard.partition < min(self.count, self.receipts_count)\n",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "one-partition-stops-all",
        "where one partition does not say how far it goes, none is planned to be read",
        (
            Change(
                "journal/ends.py",
                "        found, silent = self._by_leader_with_retries(asked)\n",
                '        raise JournalLost("a partition does not answer")\n',
            ),
        ),
        (),
        ("tests/pipeline/test_kafka_source.py",),
    ),
    Bug(
        "one-range-fails-its-task",
        "a range that Kafka does not give takes the others of its task with it",
        (
            Change(
                "journal/ranges.py",
                "            if lost is None:\n                raise\n",
                "            raise\n",
            ),
        ),
        (),
        ("tests/pipeline/test_intake_task.py",),
    ),
    Bug(
        "left-behind-for-good",
        "what a shard missed is only read once something new is written to it",
        (
            Change(
                "engine/spark/intake_stream.py",
                "            if at in ends and Shard(*at) in self._why_behind\n",
                "            if False\n",
            ),
        ),
        (),
        ("tests/pipeline/test_intake_stream.py",),
    ),
    Bug(
        "lost-end-unseen",
        "after a leader change it is not looked whether the last record that was read is still there",
        (
            Change(
                "core/intake.py",
                "                if is_again or view.tail.may_be_lost(parsed.epoch):\n",
                "                if False:\n",
            ),
        ),
        (),
        ("tests/unit/test_intake.py", "tests/service/test_rebind.py"),
    ),
    Bug(
        "refused-records-kept",
        "large records that are refused are kept whole in Redis",
        (Change("core/interpret.py", "    if size > MOST_REFUSED_BYTES:\n", "    if False:\n"),),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "refused-read-at-once",
        "the large records of a batch's dead letters are read from Kafka all at once",
        (
            Change(
                "core/due_batch.py",
                "            elif read_bytes > MOST_LETTER_BYTES and offset != large[0]:\n",
                "            elif False:\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "silence-of-aborted-records",
        "a client that passes over aborted records for long is taken for one that does not answer",
        (
            Change(
                "journal/partition_reader.py",
                "                if position <= before:\n",
                "                if True:\n",
            ),
        ),
        (),
        ("tests/unit/test_partition_reader.py",),
    ),
    Bug(
        "kafkas-clock-ignored",
        "Kafka's clock keeps nothing that is due by those of Redis and the host",
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
        "a clock of Kafka that was set forward, or a host that slept, is not noticed",
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
        "stamp-not-compared",
        "what was not due yet by Kafka's clock as it took it is committed",
        (
            Change(
                "core/dispatch.py",
                "        latest_ms = min(max(due_ms, default=0), now_ms)\n",
                "        latest_ms = 0\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py", "tests/service/test_clocks.py"),
    ),
    Bug(
        "parked-and-forgotten",
        "who opens a shard does not look what is parked in it",
        (
            Change(
                "index/postponing.py",
                "            while first := self._session.ask(\n",
                "            while first := () and self._session.ask(\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py", "tests/contract/test_shard_index.py"),
    ),
    Bug(
        "parked-by-others",
        "what a Redis that went back, or an owner that was fenced, has parked is not looked for",
        (
            Change(
                "index/dispatch_changes.py",
                "            if total != sum(counts):",
                "            if False:",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py", "tests/contract/test_shard_machine.py"),
    ),
    Bug(
        "oldest-starves",
        "in a backlog, requests that came in later and were due earlier are skipped as long as it lasts",
        (
            Change(
                "core/dispatch.py",
                "        self._has_skipped = due.left_out > 0\n",
                "        self._has_skipped = False\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "backlog-read-ahead",
        "a backlog that comes out is read ahead, and what is due for others skipped meanwhile",
        (
            Change(
                "core/dispatch.py",
                "                reads_ahead = did.is_full and not batch.alone and not self._has_released\n",
                "                reads_ahead = did.is_full and not batch.alone\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "backlog-overtaken",
        "what comes due anew for a target goes out before what was parked for it",
        (
            Change(
                "core/due_batch.py",
                "        for part in (self.ready, self.alone) if due.backlogs else ():\n",
                "        for part in ():\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "backlog-first",
        "a backlog of one target takes a whole batch",
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
        "what-cannot-be-read-is-sent-again",
        "messages of the last receipt that nobody can read yet count as not delivered",
        (
            Change(
                "core/recovery.py",
                "            self.index.mark_doubtful(outcomes.doubtful)\n",
                "            pass\n",
            ),
        ),
        (),
        ("tests/contract/test_shard_machine.py", "tests/service/test_torn_transaction.py"),
    ),
    Bug(
        "a-doubt-is-forgotten-with-redis",
        "the barrier does not say what could not be read, so that who rebuilds the index sends it again",
        (Change("core/barrier.py", "void=void, doubtful=list(unread), group", "void=void, group"),),
        (),
        ("tests/contract/test_shard_machine.py", "tests/service/test_torn_transaction.py"),
    ),
    Bug(
        "a-doubt-is-replaced",
        "a replacement takes the place of a request that may have been delivered",
        (
            Change(
                "core/resolve.py",
                "        if by is None:\n            plan.ended_in_doubt.add(offset)\n        return False\n",
                "        return by is not None\n",
            ),
        ),
        (),
        ("tests/unit/test_doubtful.py",),
    ),
    Bug(
        "a-doubt-for-ever",
        "what is in doubt is looked at once, when the shard is opened",
        (
            Change(
                "core/dispatch.py",
                "        if self._doubtful.claims and now_ms >= self._doubtful.check_at_ms:\n",
                "        if self._doubtful.claims and not self._doubtful.check_at_ms:\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "a-rate-is-overtaken",
        "what comes due anew takes the places of a backlog under a rate",
        (
            Change(
                "rules/target_rates.py",
                "        old = bisect_left(due_ms, second * 1000)\n",
                "        old = count\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "what-is-known-is-doubted-again",
        "who rebuilds an index doubts again what was found not to be delivered since",
        (
            Change(
                "core/outcomes.py",
                "            self._doubtful.pop(offset, None)\n",
                "            pass\n",
            ),
        ),
        (),
        ("tests/unit/test_doubtful.py",),
    ),
    Bug(
        "no-leader-is-gone",
        "a partition without leader counts as one that was deleted, and what should be there as delivered",
        (
            Change(
                "journal/partition_reader.py",
                "        if there is not None and there.leader < 0:\n",
                "        if there is not None and there.leader < 0:\n            return False\n"
                "        if there is not None and there.leader < -1:\n",
            ),
        ),
        (),
        ("tests/service/test_torn_transaction.py",),
    ),
    Bug(
        "silence-holds-up-each-batch",
        "Spark: a partition of which Kafka gives nothing stays in the query",
        (
            Change(
                "engine/spark/intake_stream.py",
                "            elif stored.is_silent:\n",
                "            elif stored.is_silent and stored.is_full:\n",
            ),
        ),
        (),
        ("tests/pipeline/test_intake_stream.py",),
    ),
    Bug(
        "much-takes-from-little",
        "Spark: a batch is shared out in proportion to what waits, so that a backlog holds up who has little",
        (
            Change(
                "engine/spark/batch_size.py",
                "    return {at: start[at] + min(count, share) for at, count in counts.items()}\n",
                "    whole = max(1, sum(counts.values()))\n"
                "    return {at: start[at] + min(count, max(1, most * count // whole)) for at, count in counts.items()}\n",
            ),
        ),
        (),
        ("tests/unit/test_batch_size.py",),
    ),
    Bug(
        "size-for-length",
        "Spark: a batch has as many records whatever they are, and takes minutes when they are large",
        (
            Change(
                "engine/spark/batch_size.py",
                "            self._per_s = max(LEAST_PER_S, per_s)\n",
                "            self._per_s = max(self._per_s, per_s)\n",
            ),
        ),
        (),
        ("tests/unit/test_batch_size.py",),
    ),
    Bug(
        "metadata-holds-up-all",
        "who delivers waits while targets are asked for that were known a moment ago",
        (
            Change(
                "journal/target_topics.py",
                "            or known[topic][0] + STILL_GOOD_S < now\n",
                "            or True\n",
            ),
        ),
        (),
        ("tests/unit/test_target_topics.py",),
    ),
    Bug(
        "one-batch-for-a-strict-topic",
        "messages that each fit their topic are sent in one batch that does not",
        (
            Change(
                "records/topic_limits.py",
                '        return "next"\n',
                '        return "here"\n',
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "parts-without-end",
        "one strict topic has the others of its shard wait for a thousand flushes",
        (
            Change(
                "records/topic_limits.py",
                "        if self._count == MOST_PARTS or time.monotonic() > self._until_s:\n",
                "        if self._count == -1:\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "letters-tried-for-ever",
        "dead letters whose topic is missing are looked at again and again",
        (
            Change(
                "core/due_batch.py",
                "    return refusal[0] == Reason.UNREACHABLE or (to == LETTERS and refusal[0] in TOPIC_WIDE_REASONS)\n",
                "    return refusal[0] == Reason.UNREACHABLE and to != LETTERS\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "letters-forgotten",
        "after a month without its topic a dead letter is read again from Kafka, and let in",
        (
            Change(
                "index/command_builder.py",
                "            left_s = LETTER_FOR_S if is_letter else PARKED_FOR_S\n",
                "            left_s = PARKED_FOR_S\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "unowned-is-left",
        "partitions that no member of the group owns stay without an owner",
        (
            Change(
                "journal/membership.py",
                "            self._must_leave = True\n",
                "            self._must_leave = False\n",
            ),
        ),
        (),
        ("tests/service/test_takeover.py",),
    ),
    Bug(
        "replaced-but-not-gone",
        "who lost its name in the group to another process goes on with the shards that it had",
        (
            Change(
                "journal/membership.py",
                "        self._give_up(sorted(self.owned()))\n",
                "",
            ),
        ),
        (),
        ("tests/service/test_takeover.py",),
    ),
    Bug(
        "letters-of-others",
        "dead letters of other deployments in the same topic are shown and discarded",
        (
            Change(
                "journal/dead_letter_topic.py",
                "                        if self._is_ours(letter):\n",
                "                        if letter.source:\n",
            ),
        ),
        (),
        ("tests/service/test_dead_letter_topic.py",),
    ),
    Bug(
        "errors-explained-at-any-size",
        "Python's parser reads a record of 1 MB to name the field that is wrong, and all callers wait",
        (
            Change(
                "formats/json_object.py",
                "    if len(value) > MAX_EXPLAINED_BYTES:\n",
                "    if len(value) == -1:\n",
            ),
        ),
        (),
        ("tests/unit/test_countdown.py",),
    ),
    Bug(
        "numbers-read-by-python",
        "Python's parser reads each number of a record that orjson would alter, and all callers wait",
        (
            Change(
                "formats/json_object.py",
                '    return asked | {"message": orjson.Fragment(_exact_message(asked, parts))}\n',
                "    number = orjson.Fragment\n"
                "    exact = json.loads(value, parse_int=number, parse_float=number)\n"
                '    return asked | {"message": exact["message"]}\n',
            ),
        ),
        (),
        ("tests/unit/test_countdown.py",),
    ),
    Bug(
        "headers-without-limit",
        "a request may have 70,000 headers, each checked by Python code",
        (
            Change(
                "formats/countdown.py",
                "    if len(headers) > MAX_HEADERS:\n",
                "    if len(headers) == -1:\n",
            ),
        ),
        (),
        ("tests/unit/test_countdown.py",),
    ),
    Bug(
        "schedule-ids-without-limit",
        "the id of a schedule may have 1 MB, and takes several times as much in Redis",
        (
            Change(
                "formats/scheduler.py",
                "    if key is not None and len(key) > MAX_ID_BYTES:\n",
                "    if key is not None and len(key) == -1:\n",
            ),
        ),
        (),
        ("tests/unit/test_scheduler.py",),
    ),
    Bug(
        "tracebacks-of-strangers",
        "each error of the HTTP layer writes a traceback into the log, as often as a client causes it",
        (
            Change(
                "api/connections.py",
                "_uvicorn.addFilter(LogLimit(range(logging.ERROR, logging.CRITICAL + 1)))  # those with a traceback\n",
                "",
            ),
        ),
        (),
        ("tests/service/test_connections.py",),
    ),
    Bug(
        "answers-without-a-bound",
        "answers that clients do not read pile up in memory",
        (
            Change(
                "api/connections.py",
                "        self._bound_unread()\n",
                "",
            ),
        ),
        (),
        ("tests/service/test_connections.py",),
    ),
    Bug(
        "answers-made-ahead",
        "a client that asks on and on without reading has one answer more in memory",
        (
            Change(
                "api/connections.py",
                "        if not self.flow.write_paused:\n            self._go_on()\n",
                "        self._go_on()\n",
            ),
        ),
        (),
        ("tests/service/test_connections.py",),
    ),
    Bug(
        "letters-counted-before-json",
        "control characters make an answer of dead letters six times as large as it may be",
        (
            Change(
                "api/dead_letters.py",
                "            letters=[LetterState.of(one, most_sent_bytes, with_record=is_operator) for one in found]\n",
                "            letters=[LetterState.of(one, with_record=is_operator) for one in found]\n",
            ),
        ),
        (),
        ("tests/service/test_access_middleware.py",),
    ),
    Bug(
        "turn-held-while-streaming",
        "eight slow readers of schedules shut out all other reads",
        (
            Change(
                "api/schedules.py",
                '    @router.get("/schedules", response_model=list[Schedule])\n',
                '    @router.get("/schedules", dependencies=looks, response_model=list[Schedule])\n',
            ),
        ),
        (),
        ("tests/service/test_access_middleware.py",),
    ),
    Bug(
        "schedules-read-ahead",
        "the next page of schedules is in memory before the client has taken the one before",
        (
            Change(
                "api/schedules.py",
                '        yield b"\\n"  # returns when the client has taken the page\n',
                "",
            ),
        ),
        (),
        ("tests/service/test_access_middleware.py",),
    ),
    Bug(
        "pages-without-a-bound",
        "a page of pending requests has a thousand of them, however large they are",
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
        "messages-read-all-at-once",
        "a hundred messages of each shard are read at once, however large they are",
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
)
