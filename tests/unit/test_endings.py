"""What follows the end of a schedule, and what must not be ended."""

from __future__ import annotations

from collections.abc import Iterator

from blackbox.endings import Endings
from blackbox.entry import Entry
from blackbox.formats import make_format
from blackbox.plan import Batch
from blackbox.receipt import Places
from blackbox.request import Headers, Reason, Record, Shard

SHARD = Shard("schedules", 2)
CONTRACT = make_format(
    "scheduler", max_countdown_s=1000, own_topics=lambda topic: False, topic="schedules"
)
ENTRY = Entry("videos", b"on", 90_000, b"vid1", [("scheduler-key", "video-1")], caller_id="video-1")
OWN: Headers = [("scheduler-epoch", b"90"), ("blackbox-source", b"schedules/2@3")]


class Log:
    """The request topic from offset 0 on, with what may never be committed."""

    def __init__(self, *records: tuple[bytes, bytes | None, Headers]) -> None:
        self._records = [Record(o, 1000, *record) for o, record in enumerate(records)]

    def requests(self, start: int, end: int) -> Iterator[Batch]:
        yield Batch(start, end, self._records[start:end])


def endings(log: Log | None = None) -> Endings:
    return Endings(SHARD, CONTRACT, log or Log(), "history")


def overtaken(log: Log, *, label: int, tombstones: Places) -> list[int]:
    found = endings(log).overtaken(label, {3: ENTRY}, tombstones)
    assert all(reason == Reason.UNREACHABLE for reason, _ in found.values())
    return list(found)


def test_a_tombstone_has_the_key_the_partition_and_the_headers_of_its_schedule() -> None:
    [tombstone] = endings().requests({3: ENTRY}, 0)
    assert (tombstone.topic, tombstone.partition) == ("schedules", 2)
    assert (tombstone.key, tombstone.value) == (b"video-1", None)
    assert [name for name, _ in tombstone.headers] == [
        "scheduler-key", "blackbox-id", "blackbox-due-ms", "blackbox-source",
    ]  # fmt: skip
    assert tombstone.headers[-1] == ("blackbox-source", "schedules/2@3")


def test_the_history_has_the_message_as_it_was_delivered() -> None:
    [copy] = endings().copies({3: ENTRY})
    assert (copy.topic, copy.partition, copy.key, copy.value) == ("history", -1, b"vid1", b"on")
    assert copy.headers[-1] == ("blackbox-source", "schedules/2@3")


def test_what_was_no_schedule_gets_no_tombstone() -> None:
    invalid = Entry("", b"{", 0, b" ", [], reason="bad-id")
    assert list(endings().requests({3: invalid}, 0)) == []


AT_5: Places = {"schedules/2": [(3, 5)]}
FILLER: list[tuple[bytes, bytes | None, Headers]] = [(b"x", b"", [])] * 4


def test_a_schedule_written_between_the_label_and_the_tombstone_overtakes_the_one_before() -> None:
    log = Log(*FILLER, (b"video-1", b"new", []), (b"video-1", None, OWN))
    assert overtaken(log, label=4, tombstones=AT_5) == [3]


def test_so_does_a_cancel() -> None:
    log = Log(*FILLER, (b"video-1", None, []), (b"video-1", None, OWN))
    assert overtaken(log, label=4, tombstones=AT_5) == [3]


def test_other_ids_and_tombstones_that_were_taken_back_do_not() -> None:
    log = Log(*FILLER[:3], (b"video-2", b"", []), (b"video-1", None, OWN), (b"video-1", None, OWN))
    assert overtaken(log, label=3, tombstones=AT_5) == []


def test_its_own_record_does_not_when_the_label_is_an_older_one() -> None:
    log = Log(*FILLER[:3], (b"video-1", b"on", []), (b"x", b"", []), (b"video-1", None, OWN))
    assert overtaken(log, label=0, tombstones=AT_5) == []


def test_kafka_is_not_asked_when_nothing_lies_in_between() -> None:
    assert overtaken(Log(), label=5, tombstones=AT_5) == []
    assert overtaken(Log(), label=5, tombstones={}) == []
