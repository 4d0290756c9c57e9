"""Messages for targets with a rate."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from blackbox.core import parking
from blackbox.core.due_batch import (
    LONGEST_RETRY_MS,
)  # fmt: skip
from blackbox.core.parking import band_at
from blackbox.core.rate_limit import TURNS_MS, next_turn_ms
from blackbox.index.connection import Clients
from blackbox.records.errors import (
    IndexLost,
    JournalLost,
)
from blackbox.records.request import Cancel, Reason, Shard
from blackbox.rules.target_rates import TargetRates
from tests.contract.held import NOW_MS, held
from tests.support.fakes import FakeTargets, FakeWriter
from tests.unit.dispatch.entries import (
    LETTERS,
    Make,
    Paced,
    Pend,
    letter,
    prefers_the_same_band,
    to,
    told,
)


def one_per_second(paced: Paced) -> TargetRates:
    return paced("[targets.orders]\nmessages_per_second = 1")


def test_a_batch_repeated_after_a_failed_commit_uses_no_more_of_the_rate(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    rates = one_per_second(paced)
    pend(*(to() for _ in range(20)))
    for later_s in range(10):
        writer.before["commit"] = JournalLost("no answer")
        with pytest.raises(JournalLost):
            make(rates=rates).tick(NOW_MS + 1000 * later_s)
    dispatch = make(rates=rates)

    for later_ms in range(10_000, 32_000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert writer.sent_to("orders") == list(range(20))


@pytest.mark.parametrize("rules", ["[targets.orders]\nmessages_per_second = 1000", ""])
def test_a_raised_or_removed_rate_applies_to_messages_that_wait_already(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced, rules: str
) -> None:
    dispatch = make(rates=one_per_second(paced))
    pend(*(to() for _ in range(100)))
    dispatch.tick(NOW_MS)
    assert writer.sent_to("orders") == [0]

    dispatch = make(rates=paced(rules))
    for later_ms in range(1000, 3000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert writer.sent_to("orders") == list(range(100))


def test_a_cancelled_backlog_uses_nothing_of_a_rate(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    dispatch = make(rates=one_per_second(paced))
    pend(*(to(caller_id=f"a{n}") for n in range(100)))
    dispatch.tick(NOW_MS)

    pend(*(Cancel(f"a{n}") for n in range(1, 100)), to(due_ms=NOW_MS + 1000))
    for later_ms in range(1000, 3000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert writer.sent_to("orders") == [0, 199]


def test_the_rate_of_a_target_is_that_of_its_own_cluster(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    rates = one_per_second(paced)
    for cluster in ("staging", "production"):
        pend(to())
        make(rates=rates, cluster=cluster).tick(NOW_MS)

    assert writer.sent_to("orders") == [0, 1]


def test_a_rate_that_redis_cannot_count_is_kept_and_delays_no_other_target(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced, monkeypatch: Any
) -> None:
    dispatch = make(rates=one_per_second(paced))
    trips = 0

    def silent(clients: Clients, *commands: Any) -> Any:
        nonlocal trips
        trips += 1
        raise IndexLost("no answer")

    monkeypatch.setattr(Clients, "together", silent)
    pend(*(to() for _ in range(5)), to("bills"))
    for later_ms in range(0, 3000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert (writer.sent_to("orders"), writer.sent_to("bills")) == ([0, 1, 2], [5])
    assert trips == 1, "each takes as long as a timeout"


def test_targets_with_a_rate_are_counted_together(
    make: Make, pend: Pend, paced: Paced, monkeypatch: Any
) -> None:
    slow = [f"slow-{number}" for number in range(5)]
    dispatch = make(
        rates=paced("".join(f"[targets.{to}]\nmessages_per_second = 1\n" for to in slow))
    )
    trips, together = 0, Clients.together

    def counting(clients: Clients, *commands: Any) -> Any:
        nonlocal trips
        trips += 1
        return together(clients, *commands)

    monkeypatch.setattr(Clients, "together", counting)
    pend(*(to(target) for target in slow * 3))
    dispatch.tick(NOW_MS)
    assert trips == 1
    dispatch.tick(NOW_MS + TURNS_MS)
    assert trips == 1, "this second is used up"

    pend(*(to(target, NOW_MS + 1000) for target in slow))
    dispatch.tick(NOW_MS + 1000 + TURNS_MS)
    assert trips == 3, "to look how many may come out, and to count them"


def test_shards_take_turns_in_the_rate_of_a_target() -> None:
    shards = [Shard("TB", partition) for partition in range(4)]
    seconds = range(NOW_MS, NOW_MS + 400_000, 1000)
    first = Counter(min(shards, key=lambda one: next_turn_ms(one, at_ms)) for at_ms in seconds)

    assert min(first[shard] for shard in shards) > 50


def test_parked_messages_come_out_as_soon_as_their_rate_allows(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    dispatch = make(rates=one_per_second(paced))
    pend(*(to() for _ in range(20)))
    now_ms, sent_ms = NOW_MS, dict[int, int]()
    for _ in range(100):
        did = dispatch.tick(now_ms)
        sent_ms |= {o: now_ms for o in writer.sent_to("orders") if o not in sent_ms}
        if not did.is_full:
            now_ms = did.next_due_ms or now_ms

    assert sorted(sent_ms) == sorted(sent_ms, key=lambda o: sent_ms[o])
    assert [at_ms // 1000 - NOW_MS // 1000 for at_ms in sent_ms.values()] == list(range(20))


def test_requests_with_expires_after_wait_for_a_rate_like_all_others(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced
) -> None:
    dispatch = make(rates=one_per_second(paced))
    pend(*(to() for _ in range(4)))
    for later_ms in range(0, 20_000, 100):
        if later_ms in range(0, 4000, 500):
            pend(to(due_ms=NOW_MS + later_ms, expires_ms=NOW_MS + later_ms + 5000))
        dispatch.tick(NOW_MS + later_ms)

    sent, expired = writer.sent_to("orders"), writer.sent_to(LETTERS)
    assert sent[:4] == list(range(4)), "none of them overtakes"
    assert sorted(sent + expired) == list(range(12))
    assert {told(letter(writer, offset))[0] for offset in expired} == {"expired"}


def test_a_target_whose_preferred_band_is_taken_waits_for_its_rate(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, paced: Paced
) -> None:
    other = prefers_the_same_band("orders")
    targets.refusals[other] = (Reason.UNREACHABLE, "no leader")
    dispatch = make(rates=one_per_second(paced))
    pend(to(other), *(to() for _ in range(100)))
    dispatch.tick(NOW_MS)
    for later_ms in range(1000, 4000, 100):
        dispatch.tick(NOW_MS + later_ms)
    assert writer.sent_to("orders") == [1, 2, 3, 4]

    dispatch = make(rates=paced("[targets.orders]\nmessages_per_second = 1000"))
    for later_ms in range(4000, 6000, 100):
        dispatch.tick(NOW_MS + later_ms)

    assert writer.sent_to("orders") == list(range(1, 101))


def test_a_backlog_whose_preferred_band_is_taken_is_not_read_in_each_second(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, paced: Paced
) -> None:
    other = prefers_the_same_band("orders")
    targets.refusals[other] = (Reason.UNREACHABLE, "no leader")
    rates = paced("[targets.orders]\nmessages_per_second = 10")
    dispatch = make(rates=rates, batch_limit=10)
    pend(to(other), *(to() for _ in range(200)))
    while dispatch.tick(NOW_MS).is_full:
        pass

    pend(to("bills", due_ms=NOW_MS + 1500))
    dispatch.tick(NOW_MS + 1500)

    assert writer.sent_to("bills") == [201]


def test_messages_over_a_rate_without_a_free_band_wait_for_a_minute_at_most(
    make: Make, pend: Pend, writer: FakeWriter, targets: FakeTargets, paced: Paced, client: Any,
    monkeypatch: Any,
) -> None:  # fmt: skip
    monkeypatch.setattr(parking, "bands_of", lambda target: iter([7]))
    targets.refusals["bills"] = (Reason.UNREACHABLE, "no leader")
    pend(to("bills"), *(to() for _ in range(100)))
    dispatch = make(rates=one_per_second(paced))
    dispatch.tick(NOW_MS)

    times = [score for score, _ in held(client).due if not band_at(score)]
    assert len(times) == 99
    assert NOW_MS < min(times) <= NOW_MS + 1000
    assert max(times) <= NOW_MS + LONGEST_RETRY_MS
    for later_ms in range(1000, 5000, 100):
        dispatch.tick(NOW_MS + later_ms)
    assert writer.sent_to("orders") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seen_after_ms", [0, 100, 1500])
def test_new_due_requests_do_not_overtake_a_backlog_under_a_rate(
    make: Make, pend: Pend, writer: FakeWriter, paced: Paced, seen_after_ms: int
) -> None:
    dispatch = make(rates=paced("[targets.orders]\nmessages_per_second = 10"))
    pend(*(to() for _ in range(40)))
    arriving = 0
    for passed_ms in range(0, 20_000, 100):
        if passed_ms % 200 == 0 and seen_after_ms <= passed_ms < 10_000:
            pend(to(due_ms=NOW_MS + passed_ms - seen_after_ms))
            arriving += 1
        dispatch.tick(NOW_MS + passed_ms)

    order = [one.offset for one in writer.committed]
    assert len(order) == 40 + arriving
    assert order[10:40] == list(range(10, 40))  # the first ten were sent while no others waited
    assert max(abs(place - offset) for place, offset in enumerate(order)) <= 10
