from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blackbox.records.receipt import (
    DOUBTFUL,
    Mark,
    NotAReceipt,
    Receipt,
    decode,
    encode,
    without_void,
)

offsets = st.integers(0, 2**62)
offset_lists = st.lists(offsets, max_size=5)
places = st.dictionaries(
    st.from_regex(r"[a-z]{1,5}/[0-9]{1,2}", fullmatch=True),
    st.lists(st.tuples(offsets, offsets), min_size=1, max_size=4),
    max_size=3,
)
receipts = st.builds(
    Receipt,
    at_ms=st.integers(0, 2**53),
    delivered=places,
    dead=offset_lists,
    expired=offset_lists,
    invalid=offset_lists,
    letters=places,
    void=offset_lists,
    barrier=st.booleans(),
    gone=st.none() | st.tuples(offsets, offsets),
)


@given(receipts)
def test_a_receipt_is_read_as_it_was_written(receipt: Receipt) -> None:
    again = decode(encode(receipt))

    assert encode(again) == encode(receipt)
    assert list(again.removals()) == list(receipt.removals())
    assert (again.void, again.barrier, again.at_ms) == (
        receipt.void, receipt.barrier, receipt.at_ms,
    )  # fmt: skip


def test_a_receipt_reads_as_documented() -> None:
    receipt = Receipt(5, delivered={"orders/3": [(17, 4), (18, 5)]}, dead=[19])

    assert encode(receipt) == (
        b'{"v":1,"at_ms":5,"delivered":{"orders/3":[[17,4],[18,5]]},"dead":[19]}'
    )


def test_an_empty_receipt_takes_no_room() -> None:
    assert encode(Receipt(5)) == b'{"v":1,"at_ms":5}'


@pytest.mark.parametrize(
    "value",
    [
        None, b"", b"{}", b"[]", b"17", b'{"at_ms":5}', b'{"v":1}', b'{"v":1,"at_ms":5', b"\xff",
        b'{"v":1,"at_ms":"5"}', b'{"v":1,"at_ms":5,"mark":5}', b'{"v":1,"at_ms":5,"mark":[5]}',
        b'{"v":1,"at_ms":5,"delivered":[1]}', b'{"v":1,"at_ms":5,"delivered":{"T/0":5}}',
        b'{"v":1,"at_ms":5,"mark":["a","b"]}', b'{"v":1,"at_ms":5,"cut":["x"]}',
        b'{"v":1,"at_ms":5,"gone":[]}', b'{"v":1,"at_ms":5,"dead":7}', b'{"v":1,"at_ms":5,"group":null}',
    ],
)  # fmt: skip
def test_a_value_that_is_not_a_receipt_is_recognized(value: bytes | None) -> None:
    with pytest.raises(NotAReceipt):
        decode(value)


def test_a_receipt_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 2, but this blackbox reads version 1"):
        decode(b'{"v":2,"at_ms":5}')


def test_fields_of_a_later_version_are_ignored_in_a_receipt() -> None:
    assert decode(b'{"v":1,"at_ms":5,"dead":[7],"of a later version":1}') == Receipt(5, dead=[7])
    later = decode(b'{"v":1,"at_ms":5,"mark":[7,8,[],"of a later version"]}')
    assert later.mark == Mark(7, 8, [])


def test_a_receipt_ends_requests_of_every_outcome() -> None:
    receipt = Receipt(
        5,
        delivered={"orders/0": [(1, 70)], "bills/1": [(2, 80)]},
        dead=[3], expired=[4], invalid=[5], letters={"dead/0": [(3, 9)]}, void=[6],
    )  # fmt: skip

    assert sorted(receipt.removals()) == [1, 2, 3, 4, 5]


@given(receipts, st.data())
def test_a_receipt_without_void_outcomes_does_not_name_them(
    receipt: Receipt, data: st.DataObject
) -> None:
    ended = sorted(receipt.removals())
    void = data.draw(st.sets(st.sampled_from(ended)) if ended else st.just(set()))

    kept = receipt.without(void)

    assert sorted(kept.removals()) == [offset for offset in ended if offset not in void]
    assert all(offset not in void for pairs in kept.letters.values() for offset, _ in pairs) or (
        void.isdisjoint(ended)
    )
    assert all(kept.delivered.values())


def delivered(*requests: int) -> Receipt:
    return Receipt(1, delivered={"orders/0": [(offset, offset) for offset in requests]})


def barrier(*void: int) -> Receipt:
    return Receipt(1, void=list(void), barrier=True)


def ended(*in_order: Receipt) -> list[list[int]]:
    return [sorted(receipt.removals()) for _, receipt in without_void(enumerate(in_order))]


def test_an_outcome_declared_void_later_did_not_happen() -> None:
    assert ended(delivered(1, 2), barrier(2)) == [[1], []]


def test_a_void_does_not_apply_to_a_later_delivery() -> None:
    assert ended(delivered(1), barrier(1), delivered(1)) == [[], [], [1]]


def test_each_torn_receipt_is_voided_by_its_own_barrier() -> None:
    torn_twice = [delivered(1), barrier(1), delivered(1), barrier(1), delivered(1)]

    assert ended(*torn_twice) == [[], [], [], [], [1]]


def test_a_void_applies_to_all_receipts_that_recovery_may_check() -> None:
    between = [delivered(100 + n) for n in range(DOUBTFUL - 1)]

    assert ended(delivered(1), *between, barrier(1))[0] == []


@given(st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=20))
def test_receipts_stay_in_order_and_complete(journal: list[list[int]]) -> None:
    without_voids = [delivered(*offsets) for offsets in journal]

    assert list(without_void(enumerate(without_voids))) == list(enumerate(without_voids))
