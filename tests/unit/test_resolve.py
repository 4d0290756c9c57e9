from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blackbox.core.plan import Carried, Change, Cold, Gap, Named, Plan, Positions, Replacement, View
from blackbox.core.resolve import resolve
from blackbox.records.entry import Entry
from blackbox.records.request import Cancel


def entry(caller_id: str | None = None, due_ms: int = 1) -> Entry:
    return Entry("orders", b"", due_ms, caller_id=caller_id)


def view(
    requests: int = 10,
    skipped: set[int] | None = None,
    holders: dict[str, int] | None = None,
    cold: set[int] | None = None,
    known_from: int = 0,
    named: dict[str, Named] | None = None,
) -> View:
    return View(
        Positions(requests, 0),
        skipped or set(),
        holders or {},
        cold or set(),
        known_from,
        named or {},
    )


@pytest.mark.parametrize(
    ("changes", "puts", "removals", "holders"),
    [
        ([], [], [], {}),
        ([(10, entry()), (12, entry())], [10, 12], [], {}),
        ([(10, entry("a"))], [10], [], {"a": 10}),
        ([(10, entry("a")), (11, entry("a"))], [11], [], {"a": 11}),
        ([(10, entry("a")), (11, entry("b"))], [10, 11], [], {"a": 10, "b": 11}),
        ([(10, entry("a")), (11, Cancel("a"))], [], [], {"a": None}),
        ([(10, entry("a")), (11, Cancel("b"))], [10], [], {"a": 10, "b": None}),
        ([(10, Cancel("a")), (11, entry("a"))], [11], [], {"a": 11}),
        ([(10, entry("a")), (11, Cancel("a")), (12, entry("a"))], [12], [], {"a": 12}),
        ([(10, entry("")), (11, entry(""))], [11], [], {"": 11}),
    ],
    ids=lambda part: repr(part) if not part or isinstance(part, list) else None,
)
def test_changes_of_one_batch_apply_in_order(
    changes: list[tuple[int, Change]],
    puts: list[int],
    removals: list[int],
    holders: dict[str, int | None],
) -> None:
    plan = resolve(changes, view())

    assert (list(plan.puts), plan.removals, plan.holders) == (puts, removals, holders)


def test_a_request_pending_since_earlier_is_replaced() -> None:
    plan = resolve([(10, entry("a"))], view(holders={"a": 3}))

    assert (list(plan.puts), plan.removals, plan.holders) == ([10], [3], {"a": 10})
    assert (plan.replaced, plan.cancelled) == (1, 0)


def test_a_request_pending_since_earlier_is_cancelled_once() -> None:
    plan = resolve([(10, Cancel("a")), (11, Cancel("a"))], view(holders={"a": 3}))

    assert (plan.puts, plan.removals, plan.holders) == ({}, [3], {"a": None})
    assert (plan.replaced, plan.cancelled) == (0, 1)


BY_ID = Cancel(None, "x")


def test_a_pending_request_is_cancelled_by_its_id_and_frees_its_caller_id() -> None:
    found = view(named={"x": Named(3, True, "a")}, holders={"a": 3})
    plan = resolve([(10, BY_ID), (11, BY_ID)], found)
    assert (plan.removals, plan.holders, plan.cancelled) == ([3], {"a": None}, 1)


def test_a_request_of_the_same_batch_is_cancelled_by_its_id() -> None:
    plan = resolve([(10, entry("a")), (11, BY_ID)], view(named={"x": Named(10, False, None)}))
    assert (plan.puts, plan.holders, plan.cancelled) == ({}, {"a": None}, 1)


def test_a_cancel_by_id_leaves_the_later_request_of_the_caller_id_alone() -> None:
    plan = resolve([(10, BY_ID)], view(named={"x": Named(3, True, "a")}, holders={"a": 5}))
    assert (plan.removals, plan.holders) == ([3], {"a": 5})


def test_a_cold_request_is_cancelled_by_its_id() -> None:
    plan = resolve([(10, BY_ID)], view(named={"x": Named(3, False, None)}, cold={3}))
    assert (plan.from_cold, plan.removals, plan.cancelled) == ({3}, [], 1)


@pytest.mark.parametrize("named", [{}, {"x": Named(3, False, None)}, {"x": Named(11, False, None)}])
def test_a_cancel_by_the_id_of_what_is_not_pending_changes_nothing(named: dict[str, Named]) -> None:
    plan = resolve([(10, BY_ID), (11, entry())], view(named=named))
    assert (list(plan.puts), plan.removals, plan.cancelled) == ([11], [], 0)


def test_a_future_dead_letter_is_not_cancelled_by_its_id() -> None:
    invalid = entry()._replace(reason="not-json")
    plan = resolve([(10, invalid), (11, BY_ID)], view(named={"x": Named(10, False, None)}))
    assert (list(plan.puts), plan.cancelled) == ([10], 0)


def test_records_below_the_position_are_ignored() -> None:
    plan = resolve([(8, entry("a")), (9, Cancel("b"))], view(holders={"b": 3}))

    assert plan == Plan(holders={"b": 3})


def test_a_skipped_request_is_not_stored() -> None:
    plan = resolve([(10, entry()), (11, entry("a"))], view(skipped={10, 11}))

    assert (plan.puts, plan.removals, plan.holders) == ({}, [], {"a": None})


def test_a_skipped_request_still_ends_the_one_it_replaced() -> None:
    changes: list[tuple[int, Change]] = [
        (10, entry("b")),
        (11, entry("a")),
        (12, entry("b")),
    ]
    plan = resolve(changes, view(skipped={11, 12}, holders={"a": 3}))

    assert (plan.puts, plan.removals, plan.holders) == ({}, [3], {"a": None, "b": None})


def test_a_view_is_not_changed_by_planning() -> None:
    held = {"a": 3}

    resolve([(10, Cancel("a"))], view(holders=held))

    assert held == {"a": 3}


caller_ids = st.sampled_from(["a", "b", "c"])
changes_of_callers = st.one_of(
    st.none() | caller_ids.map(entry), caller_ids.map(Cancel), st.just(entry())
)


@given(
    st.lists(changes_of_callers, max_size=12),
    st.sets(st.integers(0, 11)),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_a_journal_gives_the_same_entries_in_batches_of_any_size(
    journal: list[Change | None], skipped: set[int], one_cut: int, other_cut: int
) -> None:
    cuts = [0, *sorted((one_cut, other_cut)), len(journal)]
    entries: set[int] = set()
    holders: dict[str, int] = {}
    for first, last in pairwise(cuts):
        batch = [(o, c) for o, c in enumerate(journal[first:last], first) if c is not None]
        plan = resolve(batch, View(Positions(first, 0), skipped, holders))
        entries = (entries | plan.puts.keys()) - set(plan.removals)
        holders = {name: offset for name, offset in plan.holders.items() if offset is not None}

    assert (entries, holders) == _by_definition(journal, skipped)


def _by_definition(
    journal: list[Change | None], skipped: set[int]
) -> tuple[set[int], dict[str, int]]:
    """A request is pending unless it was removed or a later change names its caller id."""
    last = {change.caller_id: o for o, change in enumerate(journal) if change is not None}
    pending = {
        offset
        for offset, change in enumerate(journal)
        if isinstance(change, Entry)
        and offset not in skipped
        and (change.caller_id is None or last[change.caller_id] == offset)
    }
    named = {c: offset for c, offset in last.items() if c is not None and offset in pending}
    return pending, named


def carried(
    previous: int, caller_id: str | None = None, *, is_cold: bool = False, origin: int = 1 << 60
) -> Carried:
    asked = Cold(caller_id) if is_cold else entry(caller_id)
    return Carried(previous, min(previous, origin), caller_id, asked)


def test_a_request_beyond_the_horizon_is_cold_and_keeps_its_caller_id() -> None:
    plan = resolve([(10, Cold("a")), (11, Cold(None))], view())

    assert (plan.puts, plan.to_cold, plan.holders) == ({}, {10, 11}, {"a": 10})


@pytest.mark.parametrize("ending", [Cancel("a"), entry("a"), Cold("a")])
def test_a_cold_request_is_ended_like_any_other(ending: Change) -> None:
    together = resolve([(10, Cold("a")), (11, ending)], view())
    later = resolve([(11, ending)], view(holders={"a": 3}, cold={3}))

    assert 10 not in together.to_cold
    assert (later.from_cold, later.removals) == ({3}, [])
    assert later.replaced + later.cancelled == 1


def test_a_carried_request_replaces_the_cold_one() -> None:
    plan = resolve([(12, carried(3, "a"))], view(holders={"a": 3}, cold={3}))

    assert (list(plan.puts), plan.from_cold, plan.holders) == ([12], {3}, {"a": 12})
    assert (plan.carried, plan.replaced) == ({12}, 0)


def test_a_renewed_request_stays_cold() -> None:
    plan = resolve([(12, carried(3, "a", is_cold=True))], view(holders={"a": 3}, cold={3}))

    assert (plan.puts, plan.to_cold, plan.from_cold) == ({}, {12}, {3})
    assert plan.holders == {"a": 12}


def test_a_request_is_carried_once_even_if_several_records_carry_it() -> None:
    changes: list[tuple[int, Change]] = [(12, carried(3)), (13, carried(3)), (14, carried(12))]

    assert list(resolve(changes, view(cold={3})).puts) == [12]


@pytest.mark.parametrize("ending", [Cancel("a"), entry("a")])
def test_a_request_that_ended_before_it_was_carried_stays_ended(ending: Change) -> None:
    plan = resolve([(11, ending), (12, carried(3, "a"))], view(holders={"a": 3}, cold={3}))

    assert 12 not in plan.puts


def test_a_hot_request_is_not_carried() -> None:
    assert resolve([(10, entry()), (12, carried(10)), (13, carried(3))], view()).puts.keys() == {10}


def test_a_delivered_carried_request_ends_the_request_that_it_carried() -> None:
    changes: list[tuple[int, Change]] = [(10, entry()), (12, carried(10)), (13, carried(3))]
    plan = resolve(changes, view(skipped={12, 13}))

    assert (plan.puts, set(plan.removals)) == ({}, {3, 10})


def test_a_delivered_carried_request_ends_its_original_request() -> None:
    changes: list[tuple[int, Change]] = [
        (10, entry()),
        (12, carried(10, is_cold=True)),
        (13, carried(12, origin=10)),
    ]

    assert resolve(changes, view(skipped={13})).puts == {}


def behind(known_from: int = 5, told: int = 14, ignored: tuple[int, ...] = ()) -> View:
    """An index that starts at `begun_at`; receipts have recorded the verdicts below `told`."""
    named = {"id of 3": Named(3, False, None), "id of 9": Named(9, False, None)}
    found = view(known_from=known_from, named=named)
    return found._replace(verdicts_below=told, ignored=set(ignored))


TOO_LATE = entry()._replace(reason="too-late")


@pytest.mark.parametrize(
    ("told", "ignored", "counts"),
    [(14, (), True), (13, (), True), (12, (), False), (14, (12,), False), (14, (11, 13), True)],
)
def test_the_recorded_verdict_decides_on_a_carried_record_of_an_unknown_request(
    told: int, ignored: tuple[int, ...], counts: bool
) -> None:
    plan = resolve([(12, carried(3, "a"))], behind(told=told, ignored=ignored))

    assert (list(plan.puts), plan.holders) == (([12], {"a": 12}) if counts else ([], {}))
    assert plan.ignored == (set() if counts else {12})


@pytest.mark.parametrize(
    ("told", "ignored", "counts"),
    [(14, (), True), (13, (), True), (12, (), False), (14, (12,), False), (14, (11, 13), True)],
)
def test_the_recorded_verdict_decides_on_a_replacement_of_an_unknown_request(
    told: int, ignored: tuple[int, ...], counts: bool
) -> None:
    change = Replacement("id of 3", None, entry(), TOO_LATE)

    plan = resolve([(12, change)], behind(told=told, ignored=ignored))

    assert plan.puts == {12: entry() if counts else TOO_LATE}
    assert (plan.replaced, plan.ignored) == ((1, set()) if counts else (0, {12}))


def test_recorded_verdicts_do_not_apply_to_requests_that_the_index_knows() -> None:
    changes: list[tuple[int, Change]] = [
        (12, carried(9)),
        (13, Replacement("id of 9", None, entry(), TOO_LATE)),
    ]

    plan = resolve(changes, behind())

    assert (plan.puts, plan.ignored) == ({13: TOO_LATE}, {12, 13})


@pytest.mark.parametrize("told", [{"ignored": {13}}, {"too_late": {13}}])
def test_a_replacement_recorded_as_too_late_stays_too_late(
    told: dict[str, set[int]],
) -> None:
    named = {"x": Named(3, True, "a")}
    found = view(holders={"a": 3}, named=named)._replace(**told)  # type: ignore[arg-type]

    plan = resolve([(13, Replacement("x", None, entry(), TOO_LATE))], found)

    assert (plan.puts, plan.removals, plan.ignored) == ({13: TOO_LATE}, [], {13})


@pytest.mark.parametrize("is_cold", [True, False], ids=["renewed", "delivered"])
def test_a_first_id_has_the_same_effect_in_batches_of_any_size(
    is_cold: bool,
) -> None:
    skipped = set() if is_cold else {11}
    changes: list[tuple[int, Change]] = [
        (11, carried(3, "a", is_cold=is_cold)),
        (12, Replacement("id of 3", None, entry(), TOO_LATE)),
    ]
    named = {"id of 3": Named(3, False, None)}
    cut = view(skipped=skipped, cold={11} if is_cold else set(), named=named)

    at_once = resolve(changes, view(skipped=skipped, cold={3}, named=named))
    later = resolve(changes[1:], cut)

    for plan in (at_once, later):
        assert (plan.puts, plan.ignored) == ({12: TOO_LATE}, {12})
    assert at_once.to_cold == ({11} if is_cold else set())


def test_a_delivered_carried_record_counts_even_if_recorded_as_ignored() -> None:
    plan = resolve([(12, carried(3, "a"))], behind(ignored=(12,))._replace(skipped={12}))

    assert (plan.puts, plan.carried, plan.ignored) == ({}, {12}, set())


def test_a_cancel_by_the_first_id_ends_the_carried_entry() -> None:
    found = view(named={"x": Named(7, True, "a", origin=3)}, holders={"a": 7})

    plan = resolve([(10, BY_ID)], found)

    assert (plan.removals, plan.holders, plan.cancelled) == ([7], {"a": None}, 1)


def test_a_cancel_by_the_first_id_ends_a_renewed_request_when_it_is_carried() -> None:
    found = view(named={"x": Named(3, False, None)}, cold={5})._replace(
        has_cold=True, renewed_below=4
    )

    at_once = resolve(
        [(10, BY_ID), (11, carried(5, "a", origin=3)), (12, carried(11, origin=3))], found
    )
    later = resolve([(11, carried(5, "a", origin=3))], found._replace(cancelled_cold={3: 10}))

    assert at_once.cancelled_cold == {3: 10}
    for plan in (at_once, later):
        assert (plan.puts, plan.to_cold, plan.from_cold, plan.cancelled) == ({}, set(), {5}, 1)
        assert 11 in plan.ignored


@pytest.mark.parametrize(
    ("renewed_below", "known_from", "stored"),
    [(0, 0, {}), (3, 0, {}), (4, 0, {3: 10}), (0, 4, {3: 10})],
    ids=["none renewed", "an earlier one renewed", "perhaps renewed", "unknown to the index"],
)
def test_a_cancel_by_id_is_stored_only_if_its_request_may_have_been_renewed(
    renewed_below: int, known_from: int, stored: dict[int, int]
) -> None:
    found = view(named={"x": Named(3, False, None)}, cold={5}, known_from=known_from)._replace(
        has_cold=True, renewed_below=renewed_below
    )

    assert resolve([(10, BY_ID)], found).cancelled_cold == stored


def test_a_request_that_is_renewed_in_the_same_batch_is_cancelled_by_its_first_id() -> None:
    found = view(named={"x": Named(3, False, None)}, cold={3})._replace(has_cold=True)
    renewal = Carried(3, 3, None, Cold(None))

    plan = resolve([(10, renewal), (11, BY_ID), (12, carried(10, origin=3))], found)

    assert (plan.puts, plan.renewed_below, plan.cancelled_cold) == ({}, 4, {3: 11})


def test_a_cancel_ends_no_later_request() -> None:
    found = view(named={"x": Named(12, False, None)})._replace(
        has_cold=True, cancelled_cold={12: 10}, renewed_below=13
    )

    assert resolve([(10, BY_ID)], found).cancelled_cold == {}
    assert resolve(
        [(11, carried(5, origin=4))], found._replace(cold={5}, cancelled_cold={4: 11})
    ).moved == {4: 11}


def test_a_cancel_by_id_of_an_unknown_request_changes_nothing() -> None:
    plan = resolve([(12, Cancel(None, "id of 3"))], behind())

    assert (plan.puts, plan.removals, plan.cancelled) == ({}, [], 0)


def test_records_that_count_are_not_ignored() -> None:
    found = view(named={"x": Named(3, True, None)}, cold={4})
    changes: list[tuple[int, Change]] = [
        (10, Replacement("x", None, entry(), TOO_LATE)),
        (11, Replacement("x", None, entry(), TOO_LATE)),
        (12, carried(4)),
        (13, carried(4)),
        (14, entry()),
    ]

    assert resolve(changes, found).ignored == {11, 13}


@pytest.mark.parametrize(("named", "counts"), [(3, False), (5, True), (9, True), (10, False)])
def test_records_that_name_a_removed_unread_request_count_up_to_a_limit(
    named: int, counts: bool
) -> None:
    found = view(named={"x": Named(named, False, None)})._replace(gap=Gap(5, 10, 20))
    late = Replacement("x", None, entry(), TOO_LATE)

    carry = resolve([(18, carried(named)), (21, carried(named))], found)
    replace = resolve([(19, late), (20, late)], found)

    assert carry.puts == ({18: entry()} if counts else {})
    assert replace.puts == {19: entry() if counts else TOO_LATE, 20: TOO_LATE}


@pytest.mark.parametrize(
    ("is_pending", "puts", "removals", "holder"),
    [(True, [10], [3, 5], 10), (False, [10], [], 5)],
)
def test_only_a_timely_replacement_ends_the_request_with_its_caller_id(
    is_pending: bool, puts: list[int], removals: list[int], holder: int
) -> None:
    named = {"id of 3": Named(3, is_pending, None)}
    late = entry()._replace(reason="too-late")
    change = Replacement("id of 3", "daily", entry("daily"), late)

    plan = resolve([(10, change)], view(holders={"daily": 5}, named=named))

    assert (list(plan.puts), plan.removals, plan.holders["daily"]) == (puts, removals, holder)
    assert (plan.puts[10] is late) is not is_pending
