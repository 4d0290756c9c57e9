from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, cast

import pytest

from blackbox.clock import Clock
from blackbox.dispatch import Dispatched
from blackbox.doubt import LabelsMoved
from blackbox.intake import Parsed, Taken
from blackbox.metrics import Metrics
from blackbox.owner import Hold, Owner
from blackbox.plan import Labels
from blackbox.recovery import Recovered
from blackbox.request import Shard

ANSWER_S = 10.0
NOTHING = Parsed(0, 0, [])


@dataclass
class Part:
    """Index, journal, recovery, intake and dispatch in one; the tests decide what a tick does."""

    ticks: SimpleQueue[int]
    during: list[Any] = field(default_factory=list)
    labels: Labels = field(default_factory=lambda: Labels(0, 0))
    first_due_ms: int | None = None
    next_due_ms: list[int | None] = field(default_factory=list)

    def open(self) -> Recovered:
        return Recovered(0, 0, 0)

    def store(self, parsed: Parsed, now_ms: int, meanwhile: Any = None) -> Taken:
        return Taken(1, 0, 0, 0, self.first_due_ms)

    def tick(self, now_ms: int) -> Dispatched:
        if self.during:
            self.during.pop(0)()
        self.ticks.put(now_ms)
        return Dispatched(next_due_ms=self.next_due_ms.pop(0) if self.next_due_ms else None)

    def load(self) -> Labels:
        return self.labels

    def close(self) -> None:
        raise OSError("closing may fail")


@pytest.fixture
def part() -> Part:
    return Part(SimpleQueue())


@pytest.fixture
def calls() -> list[tuple[str, object]]:
    return []


@pytest.fixture
def owner(part: Part, calls: list[tuple[str, object]]) -> Iterator[Owner]:
    all_in_one = cast(Any, part)
    hold = Hold(all_in_one, all_in_one, all_in_one, all_in_one, cast(Any, Quiet()), (part, part))
    owner = Owner(
        Shard("TB", 0),
        lambda _: hold,
        clock=Clock(),
        metrics=Metrics(),
        wake_up=True,
        stuck_after_s=60,
        opened=lambda o, offset: calls.append(("opened", offset)),
        doubted=lambda o: calls.append(("doubted", o)),
        ended=lambda o: calls.append(("ended", o)),
    )
    yield owner
    owner.stop()
    assert owner.join(ANSWER_S)


class Quiet:
    def close(self) -> None: ...


def test_what_is_stored_during_a_tick_and_due_soon_is_not_left_to_the_next_poll(
    owner: Owner, part: Part
) -> None:
    def store_something_due_soon() -> None:
        part.first_due_ms = Clock().earliest_ms() + 30
        assert owner.take(NOTHING)

    part.during = [lambda: None, lambda: None, store_something_due_soon]
    part.next_due_ms = [None, Clock().earliest_ms() + 5]
    owner.start()
    for _ in range(4):
        part.ticks.get(timeout=ANSWER_S)  # nobody polls: only the wake-up does it


def test_a_doubt_is_recovered_from_even_when_closing_fails(
    owner: Owner, part: Part, calls: list[tuple[str, object]]
) -> None:
    owner.start()
    part.ticks.get(timeout=ANSWER_S)
    owner.doubt(LabelsMoved("gone back"))
    part.ticks.get(timeout=ANSWER_S)
    part.ticks.get(timeout=ANSWER_S)
    assert [name for name, _ in calls[:3]] == ["opened", "doubted", "opened"]


def test_a_batch_behind_a_gap_is_not_stored_and_read_again_from_the_label(
    owner: Owner, part: Part, calls: list[tuple[str, object]]
) -> None:
    owner.start()
    part.ticks.get(timeout=ANSWER_S)
    part.ticks.get(timeout=ANSWER_S)
    assert not owner.take(Parsed(5, 9, []))
    assert calls == [("opened", 0), ("opened", 0)]
