from __future__ import annotations

from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blackbox.records.request import (
    MAX_OFFSET,
    MAX_PARTITION,
    Shard,
    id_prefix,
    locate,
    member,
    request_id,
)

topics = st.text("abcXYZ019._-", min_size=1, max_size=249)
partitions = st.integers(0, MAX_PARTITION)
offsets = st.integers(0, MAX_OFFSET)


@given(topics, partitions, offsets)
def test_an_id_gives_the_shard_and_offset_of_its_request(
    topic: str, partition: int, offset: int
) -> None:
    shard = Shard(topic, partition)

    assert locate(request_id(shard, offset), ["other", topic]) == (shard, offset)


@given(topics, partitions, offsets)
def test_an_id_is_a_uuid_of_version_8(topic: str, partition: int, offset: int) -> None:
    parsed = UUID(request_id(Shard(topic, partition), offset))

    assert (parsed.version, parsed.variant) == (8, RFC_4122)


@given(partitions, offsets, partitions, offsets)
def test_two_requests_never_share_an_id(p1: int, o1: int, p2: int, o2: int) -> None:
    same_place = (p1, o1) == (p2, o2)

    assert (request_id(Shard("TB", p1), o1) == request_id(Shard("TB", p2), o2)) is same_place


@given(partitions, offsets, offsets)
def test_ids_of_one_shard_sort_by_offset(partition: int, one: int, other: int) -> None:
    shard = Shard("TB", partition)

    assert (request_id(shard, one) < request_id(shard, other)) is (one < other)


@given(partitions, offsets)
def test_an_id_ends_in_its_member_but_for_the_variant(partition: int, offset: int) -> None:
    tail = request_id(Shard("TB", partition), offset).replace("-", "")[16:]

    assert member(int(tail, 16) & MAX_OFFSET) == member(offset)


@given(st.lists(st.tuples(st.integers(0, 3), offsets)))
def test_equal_due_times_keep_journal_order(requests: list[tuple[int, int]]) -> None:
    in_journal_order = sorted(requests)

    assert sorted(requests, key=lambda r: (r[0], member(r[1]))) == in_journal_order


def test_the_layout_of_ids_never_changes() -> None:
    assert request_id(Shard("TB", 3), 1234) == "791b0ac3-4800-8003-8000-0000000004d2"
    assert request_id(Shard("TB", 0xABCDE), MAX_OFFSET) == "791b0ac3-48ab-8cde-bfff-ffffffffffff"
    assert id_prefix(Shard("TB", 3)) == "791b0ac3-4800-8003-"
    assert member(1234) == b"00000000000004d2"


def test_an_id_is_found_in_any_spelling_of_a_uuid() -> None:
    spelled = request_id(Shard("TB", 3), 1234).upper().replace("-", "")

    assert locate(spelled, ["TB"]) == (Shard("TB", 3), 1234)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a UUID"),
        ("r-17", "not a UUID"),
        ("791b0ac3-4800-4003-8000-0000000004d2", "UUIDv4"),
        ("791b0ac3-4800-8003-c000-0000000004d2", "not an id made by blackbox"),
        ("691b0ac3-4800-8003-8000-0000000004d2", "any of the request topics TB, TC"),
    ],
)
def test_a_foreign_id_is_refused_with_the_cause(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        locate(text, ["TB", "TC"])


@given(st.text(max_size=40))
def test_any_other_text_is_refused_as_an_id(text: str) -> None:
    with pytest.raises(ValueError, match="id"):
        locate(text, ["TB"])


@pytest.mark.parametrize("partition", [-1, MAX_PARTITION + 1])
def test_a_partition_without_room_in_an_id_is_refused(partition: int) -> None:
    with pytest.raises(ValueError, match="partition must be 0 to 1048575"):
        request_id(Shard("TB", partition), 0)


@pytest.mark.parametrize("offset", [-1, MAX_OFFSET + 1])
def test_an_offset_without_room_in_an_id_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match=f"offset {offset} must be"):
        request_id(Shard("TB", 0), offset)


def test_a_shard_and_a_source_print_as_documented() -> None:
    shard = Shard("TB", 3)

    assert (str(shard), shard.source(1234)) == ("TB-3", "TB/3@1234")
