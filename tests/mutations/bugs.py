"""Realistic bugs, each as a change of the product's source text.

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
    """`tests` are run if the tests without servers find nothing; () if these must find the bug. Functions among
    them, `file::test`, are run first until the page names the tests that found the bug.

    `faults` of the chaos suite are played one after the other, and may also show the bug.
    """

    name: str
    what: str
    changes: tuple[Change, ...]
    faults: tuple[str, ...]
    tests: tuple[str, ...] = ("tests/service/test_exactly_once.py",)


BUGS = (
    Bug(
        "remove-before-commit",
        "Dispatch removes the entries of a batch from the index before it commits the Kafka transaction.",
        (
            Change(
                "core/dispatch.py",
                "            position = self.writer.commit(delivery.receipt(dead), latest_ms)\n",
                "            gone = {offset: entry.caller_id for offset, entry in ended.items()}\n"
                "            self.index.settle(Settlement(gone, self.index.positions.receipts))\n"
                "            position = self.writer.commit(delivery.receipt(dead), latest_ms)\n",
            ),
        ),
        ("crash after D3", "reply to EndTxn lost"),
    ),
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
        "receipts-before-fence",
        "A new owner reads the end of the receipts before it fences the earlier owner.",
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
                "        return self._check(*self._session.run(commands)[1:])\n",
                "        return positions_of(self.shard, *self._session.run(commands)[1:]) or self.positions\n",
            ),
        ),
        ("Redis put back under living connections", "Redis emptied"),
    ),
    Bug(
        "one-id-per-process",
        "The transactional id contains the process id. A new owner therefore does not fence the earlier one.",
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
        "A batch starts at the offset of its first record, not at the offset from which it was read.",
        (
            Change(
                "journal/request_reader.py",
                "                batches[shard] = Batch(position, end,",
                "                batches[shard] = Batch(records[0].offset, end,",
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
        "the-last-receipt-is-believed",
        "Recovery does not check whether the messages of the last receipt exist.",
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
        "The producer accepts an acknowledgement that has no offset.",
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
        "Recovery does not read the request topic to its end before dispatch starts.",
        (Change("core/recovery.py", "        self._catch_up()  # R5\n", ""),),
        ("from after a cancel",),
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
        "A walk does not check whether the due times still exist.",
        (Change("index/walk.py", "if sentinel is None or found", "if found"),),
        ("due times deleted alone",),
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
        "early-forgotten",
        "Recovery removes a replaced request early, but does not record its replacement in `early`. The replacement is then too late.",
        (
            Change(
                "core/settling.py",
                "index.positions.receipts, early=[offset]))",
                "index.positions.receipts))",
            ),
        ),
        (),
    ),
    Bug(
        "ended-by-id-forgotten",
        "Intake does not record a cancel by the first id of a cold request.",
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
        "ignored-not-told",
        "The receipt of a mark does not name the conditional records that did not count.",
        (Change("core/low_water.py", "ignored=ignored", "ignored=[]"),),
        ("crash after a promotion was committed",),
    ),
    Bug(
        "receipts-of-the-last-pair",
        "A mark takes its receipts offset from the last pair, even if receipts below it are still needed.",
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
        "An index whose position is below the start of a journal is kept, and continues at the start.",
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
        "Recovery keeps `skip` when it empties an index.",
        (
            Change(
                "index/command_builder.py", "keys.refused, keys.skip, keys", "keys.refused, keys"
            ),
        ),
        ("Redis put back to before a trim",),
    ),
    Bug(
        "unknown-believed",
        "A carried record without a recorded verdict counts, even if the request that it carries is not pending.",
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
        "Receipts are trimmed before the requests that they end.",
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
        "cut-not-heard",
        "The outcomes of requests that the log lost end the new requests at the same offsets.",
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
        "The first receipt for a topic that was created again has no low-water mark.",
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
        "A rebind to a new receipts topic does not record that earlier outcomes are unknown.",
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
        "A rebind writes the requests of an old topic's index again although the new topic has been opened since.",
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
        "A rebind ends when a service that opens the shard fences it.",
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
        "A replacement by id that was too late counts if the named request is pending when it is read again.",
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
        "If Redis has no room for a replacement, recovery keeps the pending request with its caller id.",
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
        "rebind-without-outcomes",
        "A rebind writes requests again that have an outcome in the receipts.",
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
        "A rebind writes a request again although a later record with its caller id replaced or cancelled it.",
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
        "A rebind writes the request again instead of its dead letter.",
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
        "A rebind keeps an index from before its receipts topic was opened.",
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
        "The receipt of a rebind does not name the index whose requests were written again.",
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
        "A rebind of an index from before a log became shorter writes the lost requests again, although their outcomes are unknown.",
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
        "A rebind of an older index records the same cut again, which voids the outcomes since the first one.",
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
        "Recovery does not check the index before it fences. A service that cannot open a shard fences a running rebind.",
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
        "A rebind writes requests to any partition although the number of partitions is the same as before.",
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
        "A rebind writes a request again although a later record cancelled it by its id.",
        (Change("rebind/since.py", " or id in self.cancelled\n", "\n"),),
        (),
        (),
    ),
    Bug(
        "unknown-recurs-no-more",
        "A recurring request ends when its outcome becomes unknown.",
        (
            Change(
                "core/rebuild.py",
                "if isinstance(content, Request | Entry) and content.recurs is not None:",
                "if False:",
            ),
        ),
        (),
        (),
    ),
    Bug(
        "first-id-not-looked-for",
        "The check of follow-ups does not find a cancel by the first id of a carried request.",
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
        "The check of follow-ups keeps the names in all records of the backlog in memory, without a limit.",
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
        "The check of follow-ups does not find a cancel in a very long backlog. The recurring request continues.",
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
        "waits-for-a-follow-up-that-never-fits",
        "A request waits for a follow-up that its topic refuses each time, and each attempt opens the shard again.",
        (
            Change(
                "core/delivery_transaction.py",
                "            if refusal is None or refusal[0] in MAY_COME_BACK:\n",
                "            if True:\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "waits-for-a-follow-up-that-brokers-refuse",
        "A request waits for a follow-up that the brokers refuse, and that blackbox could not check before.",
        (
            Change(
                "core/follow_ups.py",
                "        return (smaller,) if entry.shortened >= FORMS else (message, smaller)\n",
                "        return (message, smaller)\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "opened-again-for-each-later-record",
        "A shard is opened again whenever a later record ends a request in delivery. One busy id stops the shard.",
        (
            Change(
                "core/delivery_transaction.py",
                "        if any(ended[offset].waits >= MOST_WAITS_FOR_INTAKE for offset in overtaken):\n",
                "        if True:\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "a-busy-id-holds-up-others",
        "A request whose id was overtaken is sent with the others again, and takes them back again.",
        (
            Change(
                "core/follow_ups.py",
                "            if self._contended.get(hash(entry.caller_id), 0) > now_ms:\n",
                "            if False:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py"
            "::test_an_id_that_was_overtaken_does_not_abort_the_others_again",
        ),
    ),
    Bug(
        "busy-ids-hold-up-others",
        "After an id was overtaken, the others wait for the next check, in which the next id is overtaken.",
        (
            Change(
                "core/dispatch.py",
                "        for part in self.triage.follow_ups.parts(sent, overtaken):\n",
                "        did.is_full = True\n        for part in ():\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py"
            "::test_ids_that_are_each_written_again_hold_up_no_other_request",
        ),
    ),
    Bug(
        "busy-ids-abort-whole-batches",
        "The others are sent again together. While ids are written again in each transaction, none is delivered.",
        (
            Change(
                "core/follow_ups.py",
                "        half = (len(others) + 1) // 2\n",
                "        half = len(others)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py"
            "::test_while_each_transaction_is_overtaken_by_another_id_the_others_are_delivered",
        ),
    ),
    Bug(
        "a-busy-id-is-read-ahead",
        "A request that is sent after the others is read ahead while they are delivered, and is delivered twice.",
        (
            Change(
                "core/dispatch.py",
                "            is_whole = not batch.alone and not later\n",
                "            is_whole = not batch.alone\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "recovery-never-helps-intake",
        "A request waits without end for a later record that intake cannot store, because Redis is full.",
        (
            Change(
                "core/delivery_transaction.py",
                "            self._take_back(overtaken)\n",
                "            pass\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "neighbours-refused",
        "If Kafka refuses one record of a rebind's batch, other requests of the batch become dead letters too.",
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
        "A rebind skips records that callers wrote after the log lost its end, if the log is still shorter than before.",
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
        "A rebind does not write a request again that a frozen owner postpones during the rebind.",
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
        "A rebind starts with the first former partition. If it is interrupted, the next run does not find the others.",
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
        "A rebind writes no receipt for a former partition whose requests it has written again.",
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
        "Spark: if one partition does not return its end, no partition is read.",
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
        "Spark: a range that Kafka does not return stops the other ranges of its task.",
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
        "lost-end-unseen",
        "After a change of leader, intake does not check whether the last record that it read still exists.",
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
        "Redis stores large refused records completely.",
        (Change("core/interpret.py", "    if size > MOST_REFUSED_BYTES:\n", "    if False:\n"),),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "refused-read-at-once",
        "Dispatch reads the large records of all dead letters of a batch from Kafka at once.",
        (
            Change(
                "core/due_batch.py",
                "            if read_bytes > MOST_LETTER_BYTES and offset != near[0]:\n",
                "            if False:\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "scattered-letters-read-at-once",
        "Dispatch reads the records of dead letters whose offsets are far apart before it sends the messages of a batch.",
        (
            Change(
                "core/due_batch.py",
                "            elif offset - start > MOST_LETTER_SPAN:\n",
                "            elif False:\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
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
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "refused-records-are-pending",
        "A request without a payload counts as pending, also if it was refused: a cancel ends its dead letter.",
        (
            Change(
                "index/lookups.py",
                "and (offset not in refused if entry is None else entry.reason is None),\n",
                "and (entry is None or entry.reason is None),\n",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py",),
    ),
    Bug(
        "invalid-records-read-at-once",
        "Dispatch reads the records of all invalid requests of a batch from Kafka at once.",
        (
            Change(
                "core/triage.py",
                "self.journal.first_records(near, MOST_LETTER_BYTES)\n",
                "self.journal.first_records(near, 1 << 62)\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "refused-then-admitted",
        "A request over a quota, of which Redis keeps only a bit, is delivered when its record is read again.",
        (
            Change(
                "core/lost_payload.py",
                "    if cause is not None and cause in BROKEN_RULES:\n        _, asked",
                "    if False:\n        _, asked",
            ),
        ),
        (),
        ("tests/unit/test_lost_payload.py",),
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
        "parked-with-a-payload",
        "While the dead-letter topic is missing, each large refused request gets a payload in Redis.",
        (
            Change(
                "core/due_batch.py",
                "        is_bare = offset in self.without_payload\n",
                "        is_bare = False\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
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
        "fetches-of-a-megabyte",
        "A client fetches a megabyte of each shard, and decompresses all of it before it returns a record.",
        (
            Change(
                "journal/kafka_access.py",
                "FETCH_BYTES = 65_536\n",
                "FETCH_BYTES = 1_048_576\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "batches-of-any-size",
        "Intake reads 4,000 records before it stores one, whatever their size. The records of others wait.",
        (
            Change(
                "journal/request_client.py",
                "while len(messages) < most and size < MOST_BYTES:\n",
                "while len(messages) < most:\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "starved-shards-wait",
        "A record batch that is larger than a fetch waits for the backlogs of all other shards.",
        (
            Change(
                "journal/request_reader.py",
                "        for shard in self._together.starved:\n",
                "        for shard in ():\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "apart-for-ever",
        "Shards that are read apart keep the only threads for that; the next shard never gets one.",
        (
            Change(
                "journal/request_reader.py",
                "            if detour.is_over:\n",
                "            if False:\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "apart-not-in-turn",
        "Of many shards that wait to be read apart, always the last ones are.",
        (
            Change(
                "journal/request_reader.py",
                "            shard = next(iter(self._in_line))\n",
                "            shard = next(reversed(self._in_line))\n",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "silent-record-stops-a-shard",
        "A record that the client never returns stops its shard for ever.",
        (
            Change(
                "journal/offset_lookup.py",
                "            if silent.version > version and silent.offset >= offset:\n",
                "            if False:\n",
            ),
        ),
        (),
        ("tests/service/test_silent_records.py",),
    ),
    Bug(
        "silent-broker-is-a-silent-record",
        "A record becomes a dead letter because Kafka does not answer for a while.",
        (
            Change(
                "journal/offset_lookup.py",
                "            if silent.version > version and silent.offset >= offset:\n",
                "            if silent.version > version or time.monotonic() > ends_s:\n",
            ),
        ),
        (),
        ("tests/unit/test_offset_lookup.py",),
    ),
    Bug(
        "earlier-look-up-decides",
        "A record becomes a dead letter because the client could not parse a fetch of the look-up before.",
        (
            Change(
                "journal/offset_lookup.py",
                "            if silent.version > version and silent.offset >= offset:\n",
                "            if silent.version >= 0:\n",
            ),
        ),
        (),
        ("tests/unit/test_offset_lookup.py",),
    ),
    Bug(
        "error-of-another-position",
        "The error of where a record claimed to be stops its shard, or hides the records behind it.",
        (
            Change(
                "journal/polled_messages.py",
                " and polled.offset() != position\n",
                " and False\n",
            ),
        ),
        (),
        ("tests/unit/test_offset_lookup.py",),
    ),
    Bug(
        "passed-over-batch-is-an-error",
        "Batches of which the client returns nothing stop their shard, once its fetches have grown.",
        (
            Change(
                "journal/polled_messages.py",
                "error.code() == PASSED_OVER or ",
                "",
            ),
        ),
        (),
        ("tests/service/test_claimed_offsets.py",),
    ),
    Bug(
        "read-beyond-the-end",
        "A read of a partition that was shortened never ends.",
        (
            Change(
                "journal/partition_reader.py",
                "                    if reached > at or position > before:\n",
                "                    if True:\n",
            ),
        ),
        (),
        ("tests/unit/test_partition_reader.py",),
    ),
    Bug(
        "fetches-that-grow",
        "Megabytes of aborted records make the client's fetches grow, until small batches fill the memory.",
        (Change("journal/kafka_access.py", '            "fetch.max.bytes": FETCH_BYTES,\n', ""),),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "apart-from-a-silent-broker",
        "Shards of a broker that does not answer are read apart, and take the turns of others.",
        (
            Change(
                "journal/request_client.py",
                ' and partition["leader"] in answering',
                "",
            ),
        ),
        (),
        ("tests/unit/test_starved_shards.py",),
    ),
    Bug(
        "stopped-and-read-again",
        "A read that fails restarts a shard that was stopped in the meantime.",
        (
            Change(
                "journal/request_reader.py",
                "self._asked.extendleft(",
                "self._asked.extend(",
            ),
        ),
        (),
        ("tests/service/test_shard_journal.py",),
    ),
    Bug(
        "unreadable-batch-stops-a-shard",
        "A record batch that the client cannot decompress stops its shard for ever.",
        (
            Change(
                "journal/partition_reader.py",
                "believed(readable(polled), reached,",
                "believed(polled, reached,",
            ),
        ),
        (),
        ("tests/service/test_unreadable_batches.py",),
    ),
    Bug(
        "later-batch-holds-a-read-up",
        "A read does not end if an unreadable batch was written right behind the marker at its end.",
        (
            Change(
                "journal/unreadable_batches.py",
                "    if first >= end:  # it was",
                "    if False:  # it was",
            ),
        ),
        (),
        ("tests/service/test_unreadable_batches.py",),
    ),
    Bug(
        "claimed-offset-is-believed",
        "A record is taken for the one whose offset it claims.",
        (
            Change(
                "journal/claimed_offsets.py",
                "    return polled[:end] if claimed is None or is_there(claimed) else polled[:count]\n",
                "    return polled\n",
            ),
        ),
        (),
        ("tests/service/test_claimed_offsets.py",),
    ),
    Bug(
        "claimed-offset-is-not-looked-up",
        "A record that claims a later offset moves the reader past the records of others.",
        (
            Change(
                "journal/claimed_offsets.py",
                "claimed is None or is_there(claimed) else",
                "claimed is None or True else",
            ),
        ),
        (),
        ("tests/service/test_claimed_offsets.py",),
    ),
    Bug(
        "unreadable-message-is-missing",
        "A message that cannot be read counts as missing, and is delivered again.",
        (
            Change(
                "journal/claim_check.py",
                "        if (unreadable := message.error()) is not None:\n",
                "        if (unreadable := message.error()) is not None and False:\n",
            ),
        ),
        (),
        ("tests/service/test_unreadable_batches.py",),
    ),
    Bug(
        "unreadable-batch-without-end",
        "Records behind an unreadable batch become dead letters as well.",
        (
            Change(
                "journal/unreadable_batches.py",
                "    while behind - inside > 1:\n",
                "    while False:\n",
            ),
        ),
        (),
        ("tests/service/test_unreadable_batches.py",),
    ),
    Bug(
        "silence-of-aborted-records",
        "A read treats a client that skips many aborted records as a client without an answer.",
        (
            Change(
                "journal/partition_reader.py",
                "                elif position <= before and time.monotonic() > ends_s:\n",
                "                elif time.monotonic() > ends_s:\n",
            ),
        ),
        (),
        ("tests/unit/test_partition_reader.py",),
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
        "stamp-not-compared",
        "Dispatch commits a transaction although Kafka's timestamp is before a due time of the batch.",
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
        "A new shard owner does not look for parked requests.",
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
        "oldest-starves",
        "In a backlog, dispatch skips requests that arrived later and are due earlier until the backlog ends.",
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
        "cancels-read-ahead",
        "Dispatch reads ahead after cancels of requests that are in flight, and skips others in their place.",
        (
            Change(
                "core/dispatch.py",
                "        if self.index.gone(before.offsets(), self._removed):\n",
                "        if False:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py"
            "::test_cancels_during_a_batch_do_not_change_the_order_of_those_behind_it",
        ),
    ),
    Bug(
        "read-ahead-twice",
        "Under load, each batch that dispatch of the Spark engine has read ahead is read a second time.",
        (
            Change(
                "core/dispatch.py",
                "        if self._next and self.index.gone(self._next[1].offsets(), self._removed):\n",
                "        if self.index.removed != self._removed:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py"
            "::test_each_payload_is_read_once_while_another_process_stores_requests",
        ),
    ),
    Bug(
        "quotas-of-the-earlier-topic",
        "The service does not notice, when it counts quotas, that a request topic was created again.",
        (
            Change(
                "rules/admission.py",
                "        return self.topic_id == topic_id and not is_later\n",
                "        return not is_later\n",
            ),
        ),
        (),
        ("tests/unit/test_admission.py",),
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
        "a-target-crowds-follow-ups",
        "If a record batch of a target was too large, follow-ups in other topics are also sent one by one, for ten minutes.",
        (
            Change(
                "core/triage.py",
                "at_fault = topics.intersection(crowded)",
                "at_fault = topics",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py"
            "::test_a_too_large_batch_of_a_target_leaves_the_batches_of_follow_ups_as_they_are",
        ),
    ),
    Bug(
        "too-large-tried-together-for-ever",
        "Messages too large for several targets are sent together again, also if no other message goes with them.",
        (
            Change(
                "core/delivery_transaction.py",
                "return {t for t in self._writer.crowded if not limits.get(t, NO_LIMITS).one_by_one}",
                "return self._writer.crowded",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py"
            "::test_messages_with_follow_ups_that_are_too_large_for_their_targets_become_dead_letters",
        ),
    ),
    Bug(
        "crowded-by-another-shard",
        "What a shard sent together goes out alone if another shard has noted the small limit first.",
        (
            Change(
                "core/delivery_transaction.py",
                "        limits = self._limits\n",
                "        limits = self._triage.targets.limits(self._writer.crowded)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py"
            "::test_records_go_one_by_one_in_one_transaction_also_if_another_shard_noted_that_first",
        ),
    ),
    Bug(
        "crowded-unknown-at-least-once",
        "At least once, the request topic gets follow-ups together again after their batch was too large.",
        (
            Change(
                "core/dispatch.py",
                "apart, crowded = delivery.apart, delivery.crowded",
                "apart, crowded = delivery.apart, delivery.crowded if self.writer.exactly_once else ()",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py"
            "::test_a_follow_up_batch_that_is_too_large_repeats_messages_once_at_least_once",
        ),
    ),
    Bug(
        "pieces-counted-again",
        "A batch that is stored again in pieces is counted again in the quotas of its callers.",
        (
            Change(
                "rules/admission.py",
                "        is_later = epoch > self.epoch != UNKNOWN_EPOCH\n",
                "        is_later = epoch != self.epoch != UNKNOWN_EPOCH\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rules.py"
            "::test_a_batch_that_is_stored_again_in_pieces_is_not_counted_again",
        ),
    ),
    Bug(
        "quotas-of-a-lost-end",
        "The service does not notice, when it counts quotas, that other requests took the offsets of lost ones.",
        (
            Change(
                "rules/admission.py",
                "        return self.topic_id == topic_id and not is_later\n",
                "        return self.topic_id == topic_id\n",
            ),
        ),
        (),
        (
            "tests/unit/test_rules.py"
            "::test_quotas_apply_to_requests_that_took_the_offsets_of_lost_ones",
        ),
    ),
    Bug(
        "replay-replaces",
        "A replay of a dead letter replaces a newer pending request with the same id.",
        (
            Change(
                "admin/dead_letters.py",
                "            left.update(conflicts(self.lookup, replays))\n",
                "",
            ),
        ),
        (),
        ("tests/unit/test_dead_letters.py",),
    ),
    Bug(
        "replay-past-hidden-requests",
        "A replay of a dead letter replaces a request with the same id that an open transaction hides from the service.",
        (
            Change(
                "admin/replay_conflicts.py",
                "        left = {shard: reader.log_end(*shard) for shard in shards}\n",
                "        left = {shard: reader.bounds(*shard).end for shard in shards}\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dead_letters.py::test_a_letter_is_not_replayed_past_requests_that_an_open_transaction_hides",
        ),
    ),
    Bug(
        "replay-waits-for-markers",
        "A replay of a dead letter is refused until another request follows the transaction of the replay before it.",
        (
            Change(
                "admin/replay_conflicts.py",
                "    return not any(found for found, _ in reader.read(*shard, max(start, position), end))\n",
                "    return False\n",
            ),
        ),
        (),
        ("tests/unit/test_dead_letters.py::test_offsets_without_a_record_do_not_delay_a_replay",),
    ),
    Bug(
        "receipts-without-a-bound",
        "A batch ends only at its limits, even if its receipt is larger than Kafka accepts.",
        (
            Change(
                "core/delivery_transaction.py",
                "        return self._receipt_bytes <= MOST_RECEIPT_BYTES\n",
                "        return True\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "payload-of-a-cancelled-request",
        "Dispatch writes the payload of a postponed request that another process has just cancelled.",
        (
            Change(
                "index/dispatch_changes.py",
                "                commands += self._defer_commands(pending, done.now_ms, only_there=is_whole)\n",
                "                commands += self._defer_commands(pending, done.now_ms)\n",
            ),
        ),
        (),
        (
            "tests/contract/test_shard_index.py::test_a_request_cancelled_elsewhere_while_it_is_postponed_leaves_no_payload",
        ),
    ),
    Bug(
        "receipts-limited-by-the-brokers",
        "A receipts topic is created with the default of the brokers for max.message.bytes.",
        (
            Change(
                "journal/own_topics.py",
                "            settings = UNLIMITED_RETENTION | BROKER_TIMESTAMPS | ROOM_FOR_RECEIPTS\n",
                "            settings = UNLIMITED_RETENTION | BROKER_TIMESTAMPS\n",
            ),
        ),
        (),
        (
            "tests/unit/test_own_topics.py::test_a_new_receipts_topic_takes_large_receipts_whatever_the_default_of_the_brokers",
        ),
    ),
    Bug(
        "follow-ups-in-one-batch",
        "Copies and other follow-ups are sent to a topic with a small limit in one record batch.",
        (
            Change(
                "core/delivery_transaction.py",
                "        place = self._parts.place(message, *(form for _, forms in follow_ups for form in forms[:1]))\n",
                "        place = self._parts.place(message)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py::test_copies_too_large_for_one_batch_are_sent_in_parts_of_one_transaction",
        ),
    ),
    Bug(
        "backlog-read-ahead",
        "Dispatch reads ahead while it releases parked requests, and skips due requests for other targets.",
        (
            Change(
                "core/dispatch.py",
                "            reads_ahead = did.is_full and is_whole and not self._has_released\n",
                "            reads_ahead = did.is_full and is_whole\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "backlog-overtaken",
        "Requests that become due for a target are delivered before its parked requests.",
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
        "what-cannot-be-read-is-sent-again",
        "Recovery delivers requests again whose messages cannot be read yet.",
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
        "The barrier does not list requests in doubt. A rebuild delivers them again.",
        (Change("core/barrier.py", "void=void, doubtful=list(unread), group", "void=void, group"),),
        (),
        ("tests/contract/test_shard_machine.py", "tests/service/test_torn_transaction.py"),
    ),
    Bug(
        "a-doubt-is-replaced",
        "A replacement counts although the request that it replaces is in doubt.",
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
        "Dispatch checks requests in doubt only once, after the shard is opened.",
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
        "Under a rate, messages that become due take the places of the backlog.",
        (
            Change(
                "core/due_batch.py",
                "                waits = not entry.expires_ms or to in limited\n",
                "                waits = not entry.expires_ms and to not in limited\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "what-is-known-is-doubted-again",
        "A rebuild puts a request in doubt although a later receipt declares its outcome void.",
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
        "A partition without a leader counts as deleted, and its messages count as delivered.",
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
                "            if not readings.shards() and (attempt > 0 or self.is_warm):\n",
                "            if not readings.shards() and self.is_warm:\n",
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
                "            self._end(cannot.keys() | back, readings)\n",
                "            self._end(cannot.keys(), readings)\n",
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
                "            while readings.shards() and not self.has_room.wait(LOOK_S):\n",
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
        "metadata-holds-up-all",
        "Dispatch waits for the metadata of targets whose last metadata can still be used.",
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
        "Dispatch sends messages in one record batch that is larger than their topic accepts.",
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
        "Dispatch flushes any number of times for a topic with a small limit. Other targets of the shard wait.",
        (
            Change(
                "records/topic_limits.py",
                "        if is_full or self._count == MOST_PARTS or time.monotonic() > self._until_s:\n",
                "        if is_full:\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "letters-tried-for-ever",
        "Dead letters whose topic is missing are retried instead of parked.",
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
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "unowned-is-left",
        "Partitions without an owner in the group stay without an owner.",
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
        "A process that lost its instance id to another process keeps its shards.",
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
        "Dead letters of other deployments in the same topic are listed and discarded.",
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
        "letters-replayed-past-hidden-marks",
        "A replay reads the dead letters without the marks that an open transaction hides, and repeats earlier replays.",
        (
            Change(
                "journal/dead_letter_topic.py",
                "                bounds_of=ShardJournal.settled_bounds,\n",
                "                bounds_of=ShardJournal.request_bounds,\n",
            ),
        ),
        (),
        ("tests/service/test_dead_letter_topic.py",),
    ),
    Bug(
        "errors-explained-at-any-size",
        "Python's parser reads a record of 1 MB to name the wrong field. All callers wait.",
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
        "Python's parser reads each number of a record that orjson would change. All callers wait.",
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
        "A request may have 70,000 headers, and Python code checks each of them.",
        (
            Change(
                "formats/countdown.py",
                "    if len(headers) + of_record > MAX_HEADERS:\n",
                "    if len(headers) == -1:\n",
            ),
        ),
        (),
        ("tests/unit/test_countdown.py",),
    ),
    Bug(
        "schedule-ids-without-limit",
        "The id of a schedule may have 1 MB, and takes several times as much in Redis.",
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
        "Each error of the HTTP layer logs a traceback, without a limit.",
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
        "Responses that clients do not read accumulate in memory.",
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
        "The next response to a pipelined request is made before the client has read the previous one.",
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
        "cells-as-they-are",
        "Tables of commands print the texts of servers as they are, with control characters for the terminal.",
        (
            Change(
                "cli/terminal.py",
                "        super().add_row(*map(_escaped, cells), **options)\n",
                "        super().add_row(*cells, **options)\n",
            ),
        ),
        (),
        ("tests/unit/test_terminal.py",),
    ),
    Bug(
        "lines-as-they-are",
        "Commands print lines with texts of servers as they are, with control characters for the terminal.",
        (
            Change(
                "cli/terminal.py",
                "    typer.echo(logs.printable(text), err=err)\n",
                "    typer.echo(text, err=err)\n",
            ),
        ),
        (),
        ("tests/unit/test_terminal.py",),
    ),
    Bug(
        "tombstones-of-any-key",
        "A cancel with the headers of another schedule's message passes for the tombstone of a schedule, and is ignored.",
        (
            Change(
                "formats/scheduler.py",
                "        return first_header(record.headers[::-1], KEY) in (None, record.key)\n",
                "        return True\n",
            ),
        ),
        (),
        ("tests/unit/test_scheduler.py",),
    ),
    Bug(
        "turns-awaited-by-any-number",
        "Any number of HTTP requests may wait for their turn. They occupy all connections, and probes are not answered.",
        (
            Change(
                "api/turns.py",
                "        if within_s is not None and self._waiting >= self._most_waiting:\n            raise _busy(busy)\n",
                "",
            ),
        ),
        (),
        ("tests/service/test_access_middleware.py",),
    ),
    Bug(
        "closing-letters-in-the-turns-of-changes",
        "Replays of dead letters that wait for an open transaction hold all turns of changes. Requests are answered with 503.",
        (
            Change(
                "api/dead_letters.py",
                "    closes = [places_body, Depends(turns.close_letters)]\n",
                "    closes = [places_body, Depends(turns.change)]\n",
            ),
        ),
        (),
        (
            "tests/unit/test_turns.py::test_dead_letters_that_wait_to_be_closed_do_not_delay_requests",
        ),
    ),
    Bug(
        "letters-counted-before-json",
        "The size of dead letters is limited before JSON escapes them. Control characters make the response six times too large.",
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
        "Eight clients that read schedules slowly block all other reads.",
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
        "The next page of schedules is read before the client has received the previous one.",
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
        "A page of pending requests has a thousand requests, regardless of their size.",
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
                '`_check_every_second`."""\n        return True\n',
                '`_check_every_second`."""\n        return not self.stuck()\n',
            ),
        ),
        (),
        (
            "tests/unit/test_engines.py::test_a_process_is_live_while_a_shard_opens_for_minutes",
            "tests/unit/test_engines.py::test_a_driver_is_live_while_its_tasks_make_no_progress",
        ),
    ),
    Bug(
        "unknown-answers-fail-the-batch",
        "If a broker refuses a record for a reason that blackbox does not know, the shard sends the whole batch again and again.",
        (
            Change(
                "journal/refusals.py",
                "        return REASONS_BY_ERROR.get(code, Reason.BROKER_ERROR)\n",
                "        return REASONS_BY_ERROR.get(code)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_shard_writer.py::test_an_unknown_broker_error_is_attributed_to_the_record",
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
        "compacted-is-missing",
        "A message that compaction removed from its target counts as missing. It is delivered again, after a newer one with its key.",
        (
            Change(
                "journal/claim_check.py",
                "        absent -= self._compacted_away(topic, int(partition), absent, bounds)\n",
                "",
            ),
        ),
        (),
        (
            "tests/unit/test_shard_journal.py::test_a_message_that_compaction_removed_counts_as_delivered",
        ),
    ),
    Bug(
        "foreign-receipts-close-the-shard",
        "A record in the receipts topic that is not a receipt keeps its shard closed.",
        (
            Change(
                "journal/receipt_parsing.py",
                "        except NotAReceipt:\n            foreign.append(message)\n",
                "",
            ),
        ),
        (),
        (
            "tests/unit/test_receipt_parsing.py::test_a_foreign_record_in_the_receipts_topic_is_skipped_with_an_error",
        ),
    ),
    Bug(
        "delivered-receipts",
        "A message that a request delivers to a receipts topic counts as a receipt. It ends requests that were not delivered.",
        (
            Change(
                "journal/receipt_parsing.py",
                "    if unreadable or any(header[0].startswith(OUR_HEADERS) for header in headers):\n",
                "    if unreadable:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_receipt_parsing.py::test_a_foreign_record_in_the_receipts_topic_is_skipped_with_an_error",
        ),
    ),
    Bug(
        "receipts-of-others-as-target",
        "A request may be delivered to the receipts topic of another deployment.",
        (
            Change(
                "journal/topics.py",
                "    is_receipts = name.endswith(RECEIPTS_SUFFIX)\n",
                "    is_receipts = name in map(receipts_topic, request_topics)\n",
            ),
        ),
        (),
        ("tests/unit/test_settings.py::test_topics_of_blackbox_are_not_targets",),
    ),
    Bug(
        "earlier-failure-reported",
        "Over HTTP, a request is reported as failed because an earlier cancel failed. It was written, and a retry delivers it twice.",
        (
            Change(
                "admin/request_topics_writer.py",
                "            writer.wait_for(written)\n",
                "            writer.flush()\n",
            ),
        ),
        (),
        (
            "tests/unit/test_changes.py::test_a_request_is_written_after_a_cancel_that_kafka_refused",
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
        "lost-targets-awaited",
        "If a target is deleted while dispatch sends to it, all targets of the shard wait about 15 s.",
        (
            Change(
                "journal/shard_writer.py",
                "            if self._exactly_once and now - asked_s >= LOOK_S:\n",
                "            if False:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_shard_writer.py::test_a_transaction_ends_within_a_second_of_the_loss_of_a_target",
        ),
    ),
    Bug(
        "receipts-grow-late",
        "A new partition waits up to 10 s for its partition of the receipts topic.",
        (
            Change(
                "journal/own_topics.py",
                "        if now < self._ask_again_at_s and (self._has_failed or not is_lacking):\n",
                "        if now < self._ask_again_at_s:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_own_topics.py::test_a_new_partition_gets_its_receipts_partition_at_once",
        ),
    ),
    Bug(
        "token-not-checked",
        "The HTTP API needs no token, although one is configured.",
        (
            Change(
                "api/access_middleware.py",
                "                self._access.check(request)\n",
                "",
            ),
        ),
        (),
        (
            "tests/service/test_access_middleware.py::test_every_route_except_the_open_ones_requires_a_token",
        ),
    ),
    Bug(
        "brokers-time-unknown",
        "Intake takes a timestamp of the broker for one of the caller. If the clocks of Redis and the host are slow, countdowns end early.",
        (
            Change(
                "journal/message_conversion.py",
                "by == TIMESTAMP_LOG_APPEND_TIME)",
                "False)",
            ),
        ),
        (),
        (
            "tests/unit/test_message_conversion.py::test_a_record_says_whether_the_broker_set_its_timestamp",
        ),
    ),
    Bug(
        "cold-by-value-alone",
        "Whether a request may be cold depends on the size of its value alone.",
        (
            Change(
                "core/interpret.py",
                "is_far_ahead and record_bytes(record) <= MOST_COLD_BYTES",
                'is_far_ahead and len(record.value or b"") <= MOST_COLD_BYTES',
            ),
        ),
        (),
        ("tests/unit/test_interpret.py",),
    ),
    Bug(
        "letter-of-the-carried-record",
        "The dead letter of a promoted request of unknown outcome is the record that promotion wrote.",
        (
            Change(
                "core/rebuild.py",
                "        original = original_if_carried(record)\n",
                "        original = record\n",
            ),
        ),
        (),
        ("tests/unit/test_rebuild.py",),
    ),
    Bug(
        "replay-as-promotion",
        "A replay of a dead letter keeps the headers by which blackbox marks its own records.",
        (
            Change(
                "admin/dead_letters.py",
                "headers[end - 1][0] in (REPLACES, CARRIED, FOLLOWS, AGAIN)",
                "headers[end - 1][0] in (REPLACES,)",
            ),
        ),
        (),
        ("tests/unit/test_replayed_records.py",),
    ),
    Bug(
        "removed-cold-requests-stay",
        "Promotion does not end cold requests that Kafka has removed.",
        (
            Change(
                "core/promotion.py",
                "in chain(self._removed(start), self._readable(start, now_ms)):",
                "in self._readable(start, now_ms):",
            ),
        ),
        (),
        ("tests/unit/test_promotion.py",),
    ),
    Bug(
        "cold-by-a-fast-clock",
        "A request with a caller's timestamp in the future is cold, so its due time is determined again at its promotion.",
        (
            Change(
                "core/interpret.py",
                "    if not record.has_broker_time and record.timestamp_ms > latest_ms + WRITER_AHEAD_MS:\n",
                "    if False:\n",
            ),
        ),
        (),
        ("tests/unit/test_interpret.py",),
    ),
    Bug(
        "accepted-requests-judged-again",
        "Requests of the cold tier are judged again by the current BLACKBOX_MAX_COUNTDOWN_S.",
        (
            Change(
                "formats/format.py",
                "        unlimited._max_countdown_s = LONGEST_COUNTDOWN_S\n",
                "",
            ),
        ),
        (),
        ("tests/unit/test_promotion.py",),
    ),
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
        "progress-committed-again-in-one-try",
        "One short outage of Kafka while a load of weeks commits its progress again ends the load.",
        (
            Change(
                "journal/piece_writer.py",
                "        stop=stop_after_attempt(COMMIT_TRIES),\n",
                "        stop=stop_after_attempt(1),\n",
            ),
        ),
        (),
        (
            "tests/unit/test_piece_writer.py::test_a_short_outage_does_not_end_a_load_that_commits_its_progress_again",
        ),
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
        "kept-password-readable",
        "The password of the embedded Redis stays readable for others in a file that exists already.",
        (
            Change(
                "embedded/redis.py",
                "        configuration.chmod(0o600)  # touch leaves the mode of a file that exists\n",
                "",
            ),
        ),
        (),
        ("tests/embedded/test_redis.py",),
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
                "~any_of(several, same, may_be_compacted_away),\n",
                "~any_of(several, same),\n",
            ),
        ),
        (),
        ("tests/pipeline/test_audit.py::test_each_planted_fault_is_found_and_nothing_else",),
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
        "audit-stopped-by-a-trim",
        "The audit fails if Kafka removes records before it has read them.",
        (
            Change(
                "journal/ranges.py",
                "            if skip_removed and isinstance(reason, RecordsRemoved):\n",
                "            if False and isinstance(reason, RecordsRemoved):\n",
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
                "        self._check_topics(first)\n",
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
        "a-shard-takes-a-whole-rate",
        "The shard that looks first in a second always gets the whole rate of a target, and others wait without limit.",
        (
            Change(
                "core/rate_limit.py",
                '    return second * 1000 + crc32(f"{shard} {second}".encode()) % TURNS_MS\n',
                "    return second * 1000 + shard.partition\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "rates-of-another-cluster",
        "Deployments on two clusters that share a Redis share the rates of targets with the same name.",
        (
            Change(
                "rules/target_rates.py",
                'Second("messages", f"{cluster}/{to}", now_ms // 1000)',
                'Second("messages", to, now_ms // 1000)',
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "backlogs-use-their-rates-once",
        "Messages that wait for the rate of their target come out only when something else is due.",
        (
            Change(
                "core/dispatch.py",
                "            did.next_due_ms = min(turn_ms, did.next_due_ms or turn_ms)\n",
                "            pass\n",
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "more-come-out-than-may-go",
        "All parked messages come out in each second, and most of them are parked again.",
        (
            Change(
                "index/dispatch_changes.py",
                "min(share, release[known[band]])",
                "share",
            ),
        ),
        (),
        ("tests/contract/test_shard_index.py",),
    ),
    Bug(
        "marker-counts-as-a-receipt",
        "If Kafka removed all receipts of a quiet shard, requests that are due become dead letters at the next start.",
        (
            Change(
                "core/index_preparation.py",
                "            is_at_marker = self.has_markers and positions.receipts > 0\n",
                "            is_at_marker = False\n",
            ),
        ),
        (),
        ("tests/unit/test_rebuild.py",),
    ),
    Bug(
        "deferred-payloads-expire",
        "The payload of a message that is deferred expires as if the message were not.",
        (
            Change(
                "index/command_builder.py",
                '        return pack("EXPIRE", name, self._expires_s(due_ms, now_ms))\n',
                '        return pack("EXISTS", name)\n',
            ),
        ),
        (),
        ("tests/unit/test_dispatch.py",),
    ),
    Bug(
        "gone-is-not-kept",
        "If the first opening after a removal by retention fails, the removed requests are never reported.",
        (
            Change(
                "core/index_preparation.py",
                "positions, gone = kept.positions, kept.gone",
                "positions, gone = kept.positions, None",
            ),
            Change(
                "core/index_preparation.py",
                "StartingPoint(at, True, kept.gone, ",
                "StartingPoint(at, True, None, ",
            ),
        ),
        (),
        (
            "tests/unit/test_recovery.py::test_requests_that_retention_removed_are_reported_if_the_first_opening_failed",
            "tests/unit/test_rebuild.py::test_an_interrupted_rebuild_reports_requests_that_retention_removed",
        ),
    ),
    Bug(
        "a-letter-of-the-message",
        "If Kafka has removed the record of a request, its dead letter has the message as if that were the request.",
        (
            Change(
                "core/letter_record.py",
                "    if is_record(entry):\n",
                "    if entry:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py::test_a_dead_letter_asks_for_the_same_request_if_kafka_has_removed_its_record",
        ),
    ),
    Bug(
        "a-band-is-shared",
        "A target whose preferred band is taken is not parked: its whole backlog is read again in each second.",
        (
            Change(
                "core/parking.py",
                "    return next(chain(own, free), None)\n",
                "    return next(chain(own, [b for b in free if b == next(bands_of(target))]), None)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py::test_a_backlog_whose_preferred_band_is_taken_is_not_read_in_each_second",
        ),
    ),
    Bug(
        "a-backlog-in-two-bands",
        "A target whose preferred band becomes free has its later requests there, and earlier ones in another band.",
        (
            Change(
                "core/parking.py",
                "    return next(chain(own, free), None)\n",
                "    return next((b for b in bands_of(target) if parked.get(b, target) == target), None)\n",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py::test_a_target_keeps_its_band_although_the_one_that_it_prefers_is_free_again",
        ),
    ),
    Bug(
        "a-used-up-second-is-counted",
        "In the rest of a second in which the rates of targets are used up, Redis is asked about them at each check.",
        (
            Change(
                "rules/target_rates.py",
                "known[at] < limited.get(to, math.inf)",
                "to in limited",
            ),
        ),
        (),
        (
            "tests/unit/test_target_rates.py::test_redis_is_not_asked_about_a_second_that_is_used_up",
        ),
    ),
    Bug(
        "a-silent-redis-is-asked-at-once",
        "While Redis cannot count the messages to targets with a rate, all shards wait for it at each check.",
        (
            Change(
                "rules/target_rates.py",
                "            if not more or now_s < self._ask_at_s:\n",
                "            if not more:\n",
            ),
        ),
        (),
        (
            "tests/unit/test_target_rates.py::test_a_redis_that_does_not_answer_is_asked_again_after_a_while_by_one_shard",
        ),
    ),
    Bug(
        "rates-only-with-redis",
        "While Redis cannot count, targets with a rate get all messages at once.",
        (
            Change(
                "rules/target_rates.py",
                "        before = known if before is None else before\n",
                "        before = 0 if before is None else before\n",
            ),
        ),
        (),
        (
            "tests/unit/test_target_rates.py::test_while_redis_cannot_count_a_process_keeps_to_the_rate_by_itself",
        ),
    ),
    Bug(
        "a-band-of-the-batch",
        "A request that a later record ends is parked in a band in which its batch parks requests of another target.",
        (
            Change(
                "core/dispatch.py",
                "        parked = {**self.index.parked(), **batch.parked}",
                "        parked = self.index.parked()",
            ),
        ),
        (),
        (
            "tests/unit/test_dispatch.py::test_a_superseded_request_is_not_parked_in_a_band_that_its_batch_takes",
        ),
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
        "parked-in-the-band-of-others",
        "A request whose record is read again, with a timestamp after all times, is parked in the band of another target.",
        (
            Change(
                "core/parking.py",
                "    return band * BAND_MS + min(max(0, due_ms), BAND_MS - 1)\n",
                "    return band * BAND_MS + max(0, due_ms)\n",
            ),
        ),
        (),
        (
            "tests/contract/test_shard_index.py::test_a_request_that_is_due_after_all_times_is_parked_in_the_band_of_its_target",
        ),
    ),
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
        "records-of-tiny-headers",
        "A record may have 50,000 headers, each of which takes 25 bytes in Redis.",
        (
            Change(
                "formats/format.py",
                "    if record.value is None or count <= MAX_HEADERS:\n",
                "    if count:\n",
            ),
        ),
        (),
        ("tests/unit/test_many_headers.py::test_a_record_has_a_thousand_headers_at_most",),
    ),
    Bug(
        "quick-records-of-tiny-headers",
        "A usual request, which is parsed the quick way, may have 50,000 headers.",
        (
            Change(
                "formats/countdown.py",
                "            has_all = has_all and len(headers) <= MAX_HEADERS\n",
                "",
            ),
        ),
        (),
        ("tests/unit/test_many_headers.py::test_a_usual_record_has_a_thousand_headers_at_most",),
    ),
    Bug(
        "empty-headers-are-free",
        "Refused records with many empty headers are stored in Redis.",
        (
            Change(
                "core/interpret.py",
                "    size = LENGTHS_BYTES * len(record.headers) + sum(map(len, parts))\n",
                "    size = sum(map(len, parts))\n",
            ),
        ),
        (),
        (
            "tests/unit/test_many_headers.py::test_a_record_with_many_headers_takes_little_room_in_redis",
            "tests/unit/test_many_headers.py::test_an_invalid_record_with_empty_headers_is_large_as_well",
        ),
    ),
    Bug(
        "large-headers-are-no-message",
        "A caller's limit on the size of messages does not count their keys and headers.",
        (
            Change(
                "rules/rules.py",
                "    return names + sum(len(value) for value in values if value is not None)\n",
                '    return len(request.message or b"")\n',
            ),
        ),
        (),
        ("tests/unit/test_rules.py::test_a_refusal_names_the_value_and_the_rule",),
    ),
)
