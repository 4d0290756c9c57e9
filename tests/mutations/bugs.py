"""Bugs that somebody might write one day, each as a change of the product's text.

Every one of them once cost a system like this messages, or doubled some.
"""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """In a file of the package, text that is there once, and what stands there instead."""

    file: str
    old: str
    new: str


class Bug(NamedTuple):
    """`tests` are asked when those without servers of their own have found nothing.

    `faults` are those of the chaos suite, one after the other, that may show it as well.
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
                "dispatch.py",
                "        label = self.writer.commit(_receipt(dead, places, letters, now_ms, self._known))\n",
                "        gone = {offset: entry.caller_id for offset, entry in ended.items()}\n"
                "        self.index.settle(gone, self.index.labels.receipts)\n"
                "        label = self.writer.commit(_receipt(dead, places, letters, now_ms, self._known))\n",
            ),
        ),
        ("crash after D3", "reply to EndTxn lost"),
    ),
    Bug(
        "position-before-data",
        "intake moves its position first, and stores then",
        (
            Change(
                "index/shard_index.py",
                "                if not is_leaving and self._exec(commands, meanwhile if attempt == 0 else None):\n",
                "                moved = self._write_requests(end, b'largest', largest)\n"
                "                if not is_leaving and self._exec([moved]) and self._exec(commands):\n",
            ),
        ),
        ("EXEC itself lost", "connections to Redis cut"),
    ),
    Bug(
        "due-without-labels",
        "dispatch does not look whether the index is still its own",
        (
            Change(
                "index/shard_index.py",
                "            self._check(self._labels(state, label))\n",
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
                "recovery.py",
                "        self.writer.open()\n        labels, gone, is_new = self._start()\n",
                "        labels, gone, is_new = self._start()\n"
                "        self._apply_receipts(labels.receipts, self.journal.receipt_bounds().end, is_new=is_new)\n"
                "        self.writer.open()\n",
            ),
        ),
        ("service frozen past its session", "one of two services killed"),
    ),
    Bug(
        "no-skip",
        "a removal is forgotten when its request is not in the index yet",
        (
            Change(
                "index/shard_index.py",
                "            if offset >= found.requests:\n                segment, bit",
                "            if offset >= found.requests + (1 << 60):\n                segment, bit",
            ),
        ),
        ("Redis emptied", "Redis put back to an earlier state"),
    ),
    Bug(
        "settle-without-labels",
        "what was delivered is removed from whatever index is there now",
        (
            Change(
                "index/shard_index.py",
                "        return self._check(self._labels(*self._session.run(commands, 3)[1:]))\n",
                "        return self._labels(*self._session.run(commands, 3)[1:]) or self.labels\n",
            ),
        ),
        ("Redis put back under living connections", "Redis emptied"),
    ),
    Bug(
        "one-id-per-process",
        "the transactional id is the process', so that a new owner fences nobody",
        (
            Change(
                "journal/writer.py",
                'f"{access.group_id}-{shard}" if exactly_once',
                "f\"{access.group_id}-{shard}-{__import__('os').getpid()}\" if exactly_once",
            ),
        ),
        ("service frozen past its session", "several of these"),
    ),
    Bug(
        "position-of-the-first-record",
        "a batch says that it begins at its first record, not where it was read from",
        (
            Change(
                "journal/reader.py",
                "                start, end = self._positions[shard], records[-1].offset + 1\n",
                "                start, end = records[0].offset, records[-1].offset + 1\n",
            ),
            Change(
                "journal/shard_journal.py",
                "            yield Batch(position, reached, read_records(messages))\n",
                "            found = read_records(messages)\n"
                "            yield Batch(found[0].offset if found else position, reached, found)\n",
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
                '            self._connection.send_packed_command([b"".join(packed)])\n'
                "            return self._read(replies)\n",
                '            packed = [b"".join(packed)]\n'
                "            try:\n"
                "                self._connection.send_packed_command(packed)\n"
                "                return self._read(replies)\n"
                "            except (redis.ConnectionError, OSError):\n"
                "                self._connection.disconnect()\n"
                "                self._connection.send_packed_command(packed)\n"
                "                return self._read(replies)\n",
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
                "index/shard_index.py",
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
                "recovery.py",
                "        missing = journal.missing([r for _, r in newest if not r.barrier])\n",
                "        missing: list[int] = []\n",
            ),
        ),
        ("coordinator torn",),
    ),
    Bug(
        "a-word-without-an-offset",
        "what the client calls delivered is believed, though it cannot say where",
        (Change("journal/writer.py", "            self._unplaced += 1\n", "            pass\n"),),
        ("Kafka killed",),
        ("tests/service/test_moving_leader.py",),
    ),
    Bug(
        "open-before-read",
        "a shard delivers before it has read its requests to the end",
        (Change("recovery.py", "        self._catch_up()  # 5\n", ""),),
        ("from after a cancel",),
    ),
)
