"""Where `blackbox rebind` finds that a request topic lost its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blackbox.core.plan import UNKNOWN_EPOCH, Binding, IndexMetadata, Positions, Tail
from blackbox.rebind.decision import Decider, Decision
from blackbox.rebind.lost_end import tail_before
from blackbox.records.receipt import Mark, Receipt
from blackbox.records.request import Record, Shard
from tests.support.fakes import FakeJournal

START_MS = 1_767_225_600_000
DAY_MS = 86_400_000
READ = 200
OURS = Binding("cluster", "topic", "receipts", "blackbox")


def written(offset: int, late_ms: int = 0, *, by_broker: bool = True) -> Record:
    """The record at this offset, one each second."""
    at_ms = START_MS + offset * 1000 + late_ms
    return Record(offset, at_ms, None, b"record %d" % offset, [], None, by_broker)


def log(records: Iterable[Record], epoch: Callable[[int], int]) -> FakeJournal:
    journal = FakeJournal(request_records=list(records), receipt_records=[None] * 10)
    journal.epochs = {one.offset: epoch(one.offset) for one in journal.request_records if one}
    return journal


def read_up_to(record: Record, epoch: int) -> IndexMetadata:
    return IndexMetadata(
        Positions(record.offset + 1, 10), binding=OURS, tail=Tail.of(record, epoch), token="token"
    )


def decision(journal: FakeJournal, kept: IndexMetadata | None) -> Decision:
    index: Any = SimpleNamespace(shard=Shard("TB", 0), load=lambda: kept, earlier_binding=None)
    return Decider(OURS, 1, 1, lambda partition: cast(Any, journal)).decide(index)


def cut(journal: FakeJournal, kept: IndexMetadata) -> int:
    barrier = decision(journal, kept).barrier
    assert barrier is not None
    return barrier.cut[0]


@pytest.mark.parametrize("epoch", [4, UNKNOWN_EPOCH], ids=["epochs", "no-epochs"])
@pytest.mark.parametrize("early", [10, 90, 179])
def test_one_timestamp_of_a_broker_that_was_ahead_does_not_move_the_loss(
    early: int, epoch: int
) -> None:
    records = [written(offset, DAY_MS if offset == early else 0) for offset in range(180)]
    journal = log(records, lambda _: epoch)

    place = cut(journal, read_up_to(written(READ - 1), epoch))

    # All that can be said of the very last record is that it is later than what was read.
    assert place == (179 if early == 179 else 180)


@pytest.mark.parametrize(
    "early",
    [set(), {110, 120}, {75, 112}, {148}, {100, 101, 120}],
    ids=["none", "two", "far-apart", "last-but-one", "three"],
)
@pytest.mark.parametrize("behind_ms", [0, 80_000])
def test_a_few_wrong_clocks_do_not_move_the_loss_that_leader_epochs_show(
    early: set[int], behind_ms: int
) -> None:
    records = [written(offset, DAY_MS if offset in early else 0) for offset in range(180)]
    journal = log(records, lambda offset: 4 + (offset >= 150))
    # Those of the last half minute before the loss look later.
    tail = written(READ - 1, -behind_ms)

    assert cut(journal, read_up_to(tail, 4)) == 150


@pytest.mark.parametrize("late_ms", [60_000, 3_600_000, DAY_MS])
@pytest.mark.parametrize("soon", [set(), {147, 148}], ids=["alone", "others-soon-after-the-loss"])
def test_a_lone_new_record_below_the_place_that_epochs_show_is_read(
    late_ms: int, soon: set[int]
) -> None:
    lates = {149: 50_000 + late_ms} | dict.fromkeys(soon, 60_000)
    records = [written(offset, lates.get(offset, 0)) for offset in range(150)]
    newest = [written(offset, 2 * DAY_MS) for offset in range(150, 180)]
    journal = log([*records, *newest], lambda offset: 4 + (offset >= 150))

    # Restored brokers took it under the epoch of the last record that was read.
    assert cut(journal, read_up_to(written(READ - 1), 4)) == min({149} | soon)


@pytest.mark.parametrize("run", [1, 2, 20])
@pytest.mark.parametrize(
    "epochs", [(UNKNOWN_EPOCH, UNKNOWN_EPOCH), (4, 5)], ids=["none", "repeated"]
)
def test_no_run_of_slow_clocks_hides_the_new_records_before_it(
    run: int, epochs: tuple[int, int]
) -> None:
    old, new = [*map(written, range(150))], [written(offset, DAY_MS) for offset in range(150, 550)]
    newest = [written(offset, DAY_MS) for offset in range(550, 560)] if epochs[0] == 4 else []
    journal = log([*old, *new, *newest], lambda offset: epochs[offset >= 550])
    kept = read_up_to(written(READ - 1), 4)

    places = dict[int, int]()
    for first in range(250, 551 - run):
        slow = [written(offset, -DAY_MS) for offset in range(first, first + run)]
        journal.request_records[first : first + run] = slow
        places[first] = cut(journal, kept)
        journal.request_records[first : first + run] = new[first - 150 : first - 150 + run]

    assert set(places.values()) == {150}, places


@pytest.mark.parametrize("run", [1, 2, 20])
@pytest.mark.parametrize("new", [0, 3, 300])
def test_no_run_of_fast_clocks_among_old_records_moves_the_loss(run: int, new: int) -> None:
    old = [*map(written, range(500))]
    later = [written(offset, 2 * DAY_MS) for offset in range(500, 500 + new)]
    journal = log([*old, *later], lambda _: UNKNOWN_EPOCH)
    kept = read_up_to(written(999), UNKNOWN_EPOCH)

    places = dict[int, int]()
    # as long as more old ones follow them
    for first in range(200, 500 - 2 * run):
        fast = [written(offset, DAY_MS) for offset in range(first, first + run)]
        journal.request_records[first : first + run] = fast
        places[first] = cut(journal, kept)
        journal.request_records[first : first + run] = old[first : first + run]

    assert set(places.values()) == {500}, places


def test_what_a_fast_clock_left_long_before_does_not_move_the_loss() -> None:
    records = [written(offset, DAY_MS if offset < 4000 else 0) for offset in range(5100)]
    journal = log(records, lambda _: UNKNOWN_EPOCH)

    assert cut(journal, read_up_to(written(9999), UNKNOWN_EPOCH)) == 5100


@pytest.mark.parametrize("slow", [1, 50, 98, 99, 100, 101, 102, 150, 299, 300])
@pytest.mark.parametrize("again", [1, 5, 100, 1000])
def test_records_that_an_interrupted_run_wrote_do_not_move_the_loss(slow: int, again: int) -> None:
    new = [written(offset, DAY_MS) for offset in range(150, 1650)]
    new[-slow] = written(1650 - slow, -DAY_MS)
    journal = log([*map(written, range(150)), *new], lambda _: UNKNOWN_EPOCH)
    kept = read_up_to(written(READ - 1), UNKNOWN_EPOCH)
    before = cut(journal, kept)
    journal.request_records += [written(1650 + count, DAY_MS) for count in range(again)]

    assert cut(journal, kept) == before == 150


@pytest.mark.parametrize("count", [180, 250, 300])
@pytest.mark.parametrize(
    "early",
    [{90, 170}, {115, 141}, {140, 146}, {37, 75}],
    ids=["far-apart", "near-the-end", "close", "early"],
)
def test_without_epochs_a_few_timestamps_of_brokers_that_were_ahead_move_no_loss(
    early: set[int], count: int
) -> None:
    new = [written(offset, 2 * DAY_MS) for offset in range(150, count)]
    old = [written(offset, DAY_MS if offset in early else 0) for offset in range(180)]
    at_end = read_up_to(written(READ - 1), UNKNOWN_EPOCH)

    assert cut(log(old, lambda _: UNKNOWN_EPOCH), at_end) == 180
    assert cut(log([*old[:150], *new], lambda _: UNKNOWN_EPOCH), at_end) == 150


def test_restored_brokers_hide_no_record_that_was_written_soon_after_the_last_one_read() -> None:
    new = [written(offset, 50_000) for offset in range(150, 270)]
    journal = log([*map(written, range(150)), *new], lambda offset: 4 + (offset >= 250))

    assert cut(journal, read_up_to(written(READ - 1), 4)) == 150


@pytest.mark.parametrize("read_at_once", [1, 7, 1000])
@pytest.mark.parametrize("count", [153, 190, 400])
def test_gaps_in_the_offsets_do_not_move_a_loss(count: int, read_at_once: int) -> None:
    late = [written(offset, DAY_MS if offset >= 150 else 0) for offset in range(count)]
    # Two of three offsets are those of control records, or compaction has removed the record.
    records = [one if one.offset % 3 == 1 else None for one in late]
    journal = FakeJournal(request_records=records, receipt_records=[None] * 10)
    journal.read_at_once = read_at_once

    # behind the record at 148
    assert cut(journal, read_up_to(written(READ - 1), UNKNOWN_EPOCH)) == 149


@pytest.mark.parametrize("epochs", [(4, 5), (UNKNOWN_EPOCH, UNKNOWN_EPOCH)], ids=["epochs", "none"])
@pytest.mark.parametrize("count", [180, 230], ids=["shorter", "longer"])
@pytest.mark.parametrize("early", [None, 10, 75, 112])
def test_records_after_a_loss_are_new_although_one_before_them_has_a_late_timestamp(
    early: int | None, count: int, epochs: tuple[int, int]
) -> None:
    old = [written(offset, DAY_MS if offset == early else 0) for offset in range(150)]
    new = [written(offset, 2 * DAY_MS) for offset in range(150, count)]
    journal = log(old + new, lambda offset: epochs[offset >= 150])

    assert cut(journal, read_up_to(written(READ - 1), epochs[0])) == 150


@pytest.mark.parametrize("slow_ms", [0, DAY_MS])
def test_leader_epochs_show_the_loss_whatever_callers_write_as_timestamps(slow_ms: int) -> None:
    records = [written(offset, by_broker=False) for offset in range(180)]
    journal = log(records, lambda offset: 4 + (offset >= 150))
    # The last caller's clock was slow by a day: all that is there looks later.
    tail = written(READ - 1, -slow_ms, by_broker=False)

    assert cut(journal, read_up_to(tail, 4)) == 150


@pytest.mark.parametrize("epoch", [4, UNKNOWN_EPOCH])
def test_a_callers_slow_clock_delivers_nothing_again_after_a_loss(epoch: int) -> None:
    records = [written(offset, by_broker=False) for offset in range(180)]
    tail = written(READ - 1, -DAY_MS, by_broker=False)

    assert cut(log(records, lambda _: epoch), read_up_to(tail, epoch)) == 180


def test_brokers_timestamps_show_the_loss_if_restored_brokers_repeat_an_epoch() -> None:
    new = [written(offset, DAY_MS) for offset in range(150, 230)]
    journal = log([*map(written, range(150)), *new], lambda _: 4)

    assert cut(journal, read_up_to(written(READ - 1), 4)) == 150


@pytest.mark.parametrize("epochs", [(3, 4, 6), (4, 4, 5)], ids=["lower", "same"])
def test_brokers_timestamps_show_the_loss_if_restored_brokers_pass_the_old_epochs(
    epochs: tuple[int, int, int],
) -> None:
    new = [written(offset, DAY_MS) for offset in range(150, 230)]
    before, since, newest = epochs
    epoch = lambda offset: before if offset < 150 else since if offset < 170 else newest  # noqa: E731
    journal = log([*map(written, range(150)), *new], epoch)

    assert cut(journal, read_up_to(written(READ - 1), newest - 1)) == 150


def test_a_loss_is_found_at_the_same_place_once_requests_are_written_again() -> None:
    records: list[Record | None] = [*map(written, range(179)), None]  # a transaction marker
    journal = FakeJournal(request_records=records, receipt_records=[None] * 10)
    journal.epochs = dict.fromkeys(range(180), 4)
    kept = read_up_to(written(READ - 1), 4)
    before = cut(journal, kept)
    journal.request_records += [None, written(181, DAY_MS)]
    journal.epochs[181] = 5

    assert cut(journal, kept) == before == 179


@pytest.mark.parametrize("early", [None, 10, 90])
def test_without_an_index_one_late_timestamp_starts_nothing_again(early: int | None) -> None:
    journal = log(
        [written(offset, DAY_MS if offset == early else 0) for offset in range(170)],
        lambda _: UNKNOWN_EPOCH,
    )
    mark = Mark(READ, 1)
    known = Receipt(START_MS + 150_000, read=READ, mark=mark, topic_id="topic", group="blackbox")
    journal.append(known)

    assert decision(journal, None).begins == 150


@pytest.mark.parametrize("new", [1, 2, 20])
@pytest.mark.parametrize("by_broker", [False, True], ids=["callers", "brokers"])
def test_without_an_index_a_slow_clock_of_the_last_record_hides_no_new_ones(
    new: int, by_broker: bool
) -> None:
    records = [written(offset, by_broker=by_broker) for offset in range(150 + new)]
    slow = written(150 + new, -3_600_000, by_broker=by_broker)
    journal = log([*records, slow], lambda _: 4)
    mark = Mark(READ, 1)
    known = Receipt(START_MS + 150_000, read=READ, mark=mark, topic_id="topic", group="blackbox")
    journal.append(known)

    assert decision(journal, None).begins == 150


@pytest.mark.parametrize("count", [152, 160, 190, 260])
def test_a_last_broker_whose_clock_is_slow_hides_no_records_after_a_loss(count: int) -> None:
    new = [written(offset, DAY_MS) for offset in range(150, count)]
    slow = written(count, -DAY_MS)
    journal = log([*map(written, range(150)), *new, slow], lambda _: UNKNOWN_EPOCH)

    assert cut(journal, read_up_to(written(READ - 1), UNKNOWN_EPOCH)) == 150


def test_a_single_old_record_is_old() -> None:
    journal = log([written(0)], lambda _: UNKNOWN_EPOCH)

    assert cut(journal, read_up_to(written(READ - 1), UNKNOWN_EPOCH)) == 1


def test_the_tail_of_a_rebind_has_the_epoch_that_shows_a_second_loss() -> None:
    journal = log(map(written, range(180)), lambda offset: 4 + (offset >= 150))

    assert tail_before(cast(Any, journal), 150) == Tail.of(written(149), 4)
    assert tail_before(cast(Any, journal), 160) == Tail.of(written(159), 5)
