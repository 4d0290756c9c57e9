"""Shards that are not fetched, as a consumer's statistics show them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blackbox.journal.request_client import StarvedShards
from blackbox.records.request import Shard

Told = dict[str, Any]

BUSY, OTHER = Shard("TB", 0), Shard("TB", 1)


def statistics(
    *partitions: tuple[int, int], state: str = "active", leader: int = 1, queued: int = 0
) -> Told:
    """Statistics of TB with the next and the last stable offset of each partition; the last one has this leader."""
    about = {
        str(number): {
            "next_offset": at,
            "ls_offset": end,
            "fetch_state": state,
            "leader": 1,
            "fetchq_cnt": queued,
        }
        for number, (at, end) in enumerate(partitions)
    }
    about[str(len(partitions) - 1)]["leader"] = leader
    about["-1"] = {
        "next_offset": 0,
        "ls_offset": -1001,
        "fetch_state": "none",
        "leader": -1,
        "fetchq_cnt": 0,
    }
    return {"topics": {"TB": {"partitions": about}}}


def found(*told: Told, returned: int = 0) -> set[Shard]:
    """The starved shards after these statistics, in which broker 1 answers, and broker 2 does not.

    After each, the consumer returns this many messages.
    """
    shards = StarvedShards()
    answers = 0
    for one in told:
        answers += one.get("answers", 1)
        brokers = {"one": {"nodeid": 1, "rx": answers}, "two": {"nodeid": 2, "rx": 10}}
        shards(json.dumps(one | {"brokers": brokers}))
        shards.returned += returned
    return shards.found


def test_a_shard_with_records_of_which_none_is_fetched_is_starved() -> None:
    assert found(statistics((100, 900), (5, 9)), statistics((200, 900), (5, 9))) == {OTHER}


def test_it_is_not_once_it_is_fetched() -> None:
    told = (statistics((100, 900), (5, 9)), statistics((200, 900), (5, 9)))
    assert found(*told, statistics((300, 900), (9, 9))) == set()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(((100, 900), (9, 9)), ((200, 900), (9, 9)), id="no records"),
        pytest.param(((100, 900), (9, 9)), ((200, 900), (9, 12)), id="its first records just came"),
        pytest.param(((100, 900), (5, 9)), ((200, 900), (6, 9)), id="some are fetched"),
        pytest.param(((100, 900), (5, 9)), ((100, 900), (5, 9)), id="nothing is fetched at all"),
        pytest.param(((100, 900), (-1001, 9)), ((200, 900), (-1001, 9)), id="no offset yet"),
        pytest.param(((100, 900), (5, -1001)), ((200, 900), (5, -1001)), id="no end known"),
    ],
)
def test_other_shards_are_not(
    first: tuple[tuple[int, int], ...], second: tuple[tuple[int, int], ...]
) -> None:
    assert found(statistics(*first), statistics(*second)) == set()


def test_nor_are_shards_that_are_not_read() -> None:
    told = [statistics((at, 900), (5, 9), state="stopped") for at in (100, 200)]
    assert found(*told) == set()


@pytest.mark.parametrize("leader", [2, -1])
def test_nor_are_shards_whose_broker_answers_nobody(leader: int) -> None:
    told = [statistics((at, 900), (5, 9), leader=leader) for at in (100, 200, 300)]
    assert found(*told) == set()


def test_nor_are_those_whose_records_wait_for_this_process() -> None:
    assert found(*(statistics((at, 900), (5, 9), queued=3) for at in (100, 200, 300))) == set()


def test_a_shard_is_starved_when_all_that_was_fetched_before_has_been_returned() -> None:
    """All shards of a consumer share one queue, which never empties while the process is slower than the fetches."""
    told = [statistics((at, 900), (5, 9), queued=300) for at in range(100, 700, 100)]

    assert found(*told[:4], returned=100) == set()
    assert found(*told[:5], returned=100) == {OTHER}


def test_times_in_which_nothing_was_asked_for_do_not_count() -> None:
    """A consumer whose queue is full asks for nothing."""
    told = [statistics((at, 900), (5, 9), queued=300) for at in range(100, 700, 100)]
    told.insert(3, told[2] | {"answers": 0})

    assert found(*told[:5], returned=100) == {OTHER}


def test_a_shard_that_is_never_fetched_is_starved_although_no_other_is_fetched_either() -> None:
    told = [statistics((100, 100), (5, 9))] * 6
    assert found(*told[:3]) == set()
    assert found(*told) == {OTHER}


@pytest.mark.parametrize("look", [1, 2])
def test_what_was_queued_and_is_never_returned_does_not_hide_a_starved_shard(look: int) -> None:
    """As are statistics, and records of shards that another process took over."""
    told = [statistics((5, 9), queued=int(number == look)) for number in range(6)]
    assert found(*told, returned=0) == {Shard("TB", 0)}
