"""Every request has the right outcome, whatever happens around a shard, and in any order.

Every order of a few requests, two owners and up to two faults is tried; with a walk and trimming
below its mark, often with fewer kinds of faults. BLACKBOX_TEST_MODEL_DEPTH=1
allows one more fault in each story: ten times the states, many minutes, several GB of memory.
"""

from __future__ import annotations

import os

import pytest
from _pytest.mark import ParameterSet

from tests.model.search import Search
from tests.model.shard import Fault, Model, Story
from tests.model.state import Record
from tests.model.terms import Rule

MORE_FAULTS = int(os.environ.get("BLACKBOX_TEST_MODEL_DEPTH", "0"))

A_REQUEST, NAMED, CANCEL, GAP = Record.REQUEST, Record.NAMED, Record.CANCEL, Record.GAP
COLD, PROMOTES_0, PROMOTES_1, RENEWS_0 = (
    Record.COLD,
    Record.PROMOTES_0,
    Record.PROMOTES_1,
    Record.RENEWS_0,
)
REPLACES_0, REPLACES_1 = Record.REPLACES_0, Record.REPLACES_1
CRASH, GROUP, BACK, EMPTY, FULL, TORN = Fault
ALL_BUT_FULL = CRASH, GROUP, BACK, EMPTY, TORN

CANCELLED = Story((NAMED, CANCEL))
REPLACED = Story((NAMED, NAMED))
BEHIND_A_GAP = Story((GAP, A_REQUEST))
TWO = Story((A_REQUEST, A_REQUEST))
TWO_ONE_BY_ONE = Story((A_REQUEST, A_REQUEST), limit=1)
ONE_BY_ONE_AND_A_CANCEL = Story((NAMED, A_REQUEST, CANCEL), limit=1)

MARKED = Story((A_REQUEST,), walks=1)
MARKED_TWO = Story((A_REQUEST, A_REQUEST), walks=1)
MARKED_CANCEL = Story((NAMED, CANCEL), walks=1)
IN_PLACE_OF_ANOTHER = Story((A_REQUEST, REPLACES_0), walks=1, kinds=ALL_BUT_FULL)
TOO_LATE_AND_NAMED = Story((A_REQUEST, NAMED, Record.NAMED_REPLACES_0), walks=1)
CHAIN = Story((A_REQUEST, REPLACES_0, REPLACES_1), walks=1)
PROMOTED = Story((COLD, PROMOTES_0), walks=1)
PROMOTED_TWICE = Story((COLD, PROMOTES_0, PROMOTES_0), walks=1)
RENEWED = Story((COLD, RENEWS_0, PROMOTES_1), walks=1)
ENDED_IN_THE_INDEX = Story((COLD, PROMOTES_0, Record.CANCELS_0), walks=1)
ENDED_WHILE_COLD = Story((COLD, RENEWS_0, Record.CANCELS_0, PROMOTES_1), walks=1)
CANCELLED_WHILE_COLD = Story((COLD, CANCEL, PROMOTES_0), walks=1)


LONG = pytest.mark.proof
LONG_RULES = {Rule.REMOVAL_POSITIONS, Rule.BARRIER, Rule.REBUILDER}


def needing(rule: Rule, *what: object) -> ParameterSet:
    return pytest.param(rule, *what, id=rule.name.lower(), marks=LONG if rule in LONG_RULES else ())


@pytest.mark.timeout(180 if MORE_FAULTS == 0 else 0)
@pytest.mark.parametrize(
    ("story", "faults"),
    [
        pytest.param(CANCELLED, 2, id="cancelled", marks=LONG),
        pytest.param(REPLACED, 1, id="replaced"),
        pytest.param(BEHIND_A_GAP, 2, id="behind a gap", marks=LONG),
        pytest.param(TWO_ONE_BY_ONE, 1, id="one by one", marks=LONG),
        pytest.param(ONE_BY_ONE_AND_A_CANCEL, 1, id="one by one, and a cancel", marks=LONG),
    ],
)
def test_every_request_has_one_outcome_in_every_history(story: Story, faults: int) -> None:
    found = Search(Model(story, faults + MORE_FAULTS), positions=True).run()

    print(found)
    assert found.failure is None, str(found)


LONGER = [
    pytest.param(MARKED_CANCEL._replace(kinds=(EMPTY, BACK), walks=2), 0, id="two marks"),
    pytest.param(IN_PLACE_OF_ANOTHER, 0, id="replaced, whatever fails"),
    pytest.param(TOO_LATE_AND_NAMED._replace(kinds=(EMPTY,)), 0, id="too late"),
    pytest.param(CHAIN._replace(kinds=(EMPTY,)), 0, id="chain"),
]


@pytest.mark.timeout(180 if MORE_FAULTS == 0 else 0)
@pytest.mark.parametrize(
    ("story", "faults"),
    [
        pytest.param(MARKED_TWO, 1, id="two", marks=LONG),
        pytest.param(MARKED_TWO._replace(kinds=(EMPTY, FULL)), 2, id="no room", marks=LONG),
        pytest.param(MARKED_CANCEL, 1, id="cancelled"),
        pytest.param(
            MARKED_CANCEL._replace(kinds=(EMPTY, CRASH, BACK)), 2, id="rebuilt twice", marks=LONG
        ),
        pytest.param(
            IN_PLACE_OF_ANOTHER._replace(kinds=(EMPTY, BACK, TORN)), 1, id="replaced", marks=LONG
        ),
        pytest.param(
            IN_PLACE_OF_ANOTHER._replace(kinds=(EMPTY, FULL)), 2, id="replaced, no room", marks=LONG
        ),
        pytest.param(
            IN_PLACE_OF_ANOTHER._replace(is_apart=True, kinds=(EMPTY, BACK, GROUP)),
            1,
            id="replaced by a stream",
            marks=LONG,
        ),
        pytest.param(PROMOTED, 1, id="promoted"),
        pytest.param(PROMOTED_TWICE._replace(kinds=(EMPTY, FULL)), 2, id="promoted twice"),
        pytest.param(RENEWED, 1, id="renewed", marks=LONG),
        pytest.param(CANCELLED_WHILE_COLD, 1, id="cancelled while cold"),
        pytest.param(
            ENDED_IN_THE_INDEX._replace(kinds=(EMPTY, BACK)), 1, id="ended by its id in the index"
        ),
        pytest.param(
            ENDED_WHILE_COLD._replace(kinds=(EMPTY, BACK)),
            1,
            id="ended by its id while cold",
            marks=LONG,
        ),
        pytest.param(MARKED._replace(kinds=(EMPTY, GROUP)), 2, id="other owners", marks=LONG),
        pytest.param(MARKED._replace(kinds=(EMPTY, GROUP), is_once=False), 2, id="at least once"),
        *(LONGER if MORE_FAULTS else ()),
    ],
)
def test_trimming_below_a_mark_loses_no_request_in_any_history(story: Story, faults: int) -> None:
    found = Search(Model(story, faults + MORE_FAULTS), positions=True).run()

    print(found)
    assert found.failure is None, str(found)


NEEDED = [
    (Rule.POSITION, BEHIND_A_GAP, "never at rest"),
    (Rule.ONE_MULTI, CANCELLED, "not pending"),
    (Rule.DUE_ONLY, CANCELLED, "delivered early"),
    (Rule.DUE_POSITIONS, CANCELLED, "not pending"),
    (Rule.AHEAD, ONE_BY_ONE_AND_A_CANCEL, "delivered though ended before"),
    (Rule.COMMIT_FIRST, CANCELLED, "never delivered"),
    (Rule.REMOVAL_POSITIONS, TWO, "delivered twice"),
    (Rule.WATCH, CANCELLED, "delivered though ended before"),
    (Rule.NO_RECONNECT, CANCELLED, "delivered twice"),
    (Rule.SHARD_ID, CANCELLED, "delivered twice"),
    (Rule.FENCE_FIRST, CANCELLED, "never delivered"),
    (Rule.WITNESS, CANCELLED, "never delivered"),
    (Rule.BARRIER, TWO_ONE_BY_ONE, "never delivered"),
    (Rule.VOID, CANCELLED, "never delivered"),
    (Rule.SKIP, CANCELLED, "delivered twice"),
    (Rule.CATCH_UP, CANCELLED, "delivered though ended before"),
]


@pytest.mark.parametrize(
    ("rule", "story", "failure"),
    [needing(*needed) for needed in NEEDED],
)
def test_without_any_one_of_the_rules_a_guarantee_is_broken(
    rule: Rule, story: Story, failure: str
) -> None:
    found = Search(Model(story, faults=2, without=frozenset({rule})), positions=False).run()

    print(f"without {rule!s}:\n{found}")
    assert found.failure is not None
    assert failure in found.failure, str(found)


WRONG = "was in time, and is dead, or the other way round"
NEEDED_BY_MARKS = [
    (Rule.PENDING, MARKED, (EMPTY,), 1, "not pending"),
    (Rule.POSITIONS_FIRST, MARKED_TWO, (EMPTY,), 1, "not pending"),
    (Rule.COMMITTED, MARKED_CANCEL, (EMPTY,), 1, "delivered twice"),
    (Rule.PAIRS, MARKED_TWO, (EMPTY,), 1, "delivered twice"),
    (Rule.VERDICTS_LAST, IN_PLACE_OF_ANOTHER, (EMPTY,), 1, WRONG),
    (Rule.VERDICTS, IN_PLACE_OF_ANOTHER, (EMPTY,), 1, WRONG),
    (Rule.TELLING, IN_PLACE_OF_ANOTHER, (EMPTY,), 1, "never delivered"),
    (Rule.TOLD_FIRST, IN_PLACE_OF_ANOTHER, (EMPTY,), 1, "never delivered"),
    (Rule.UNKNOWN, PROMOTED_TWICE, (EMPTY,), 1, "delivered twice"),
    (Rule.BELOW_START, MARKED_CANCEL, (BACK,), 1, "delivered though ended before"),
    (Rule.STAYS, MARKED, (EMPTY, CRASH), 2, "delivered twice"),
    (Rule.WAITS, MARKED, (EMPTY, GROUP), 2, "delivered twice"),
    (Rule.ADOPTED, MARKED, (EMPTY, BACK), 2, "delivered twice"),
    (Rule.GONE_SKIP, MARKED, (EMPTY, FULL), 2, "delivered twice"),
    (Rule.CAUGHT_UP, MARKED_TWO, (EMPTY, FULL), 3, "delivered twice"),
    (Rule.REBUILDER, MARKED, (EMPTY, GROUP), 3, "delivered twice"),
    (Rule.EARLY, IN_PLACE_OF_ANOTHER, (EMPTY, FULL), 2, "delivered though ended before"),
    (Rule.EARLY_COUNTS, IN_PLACE_OF_ANOTHER, (EMPTY, FULL), 2, "not pending"),
    (Rule.EARLY_READ, IN_PLACE_OF_ANOTHER, (EMPTY, FULL), 3, "not pending"),
    (Rule.LEAVING, IN_PLACE_OF_ANOTHER, (EMPTY,), 1, WRONG),
    (Rule.ENDED, ENDED_WHILE_COLD, (EMPTY,), 1, "delivered though ended before"),
    (Rule.APART, IN_PLACE_OF_ANOTHER._replace(is_apart=True), (BACK,), 1, "never delivered"),
]


@pytest.mark.parametrize(
    ("rule", "story", "kinds", "faults", "failure"),
    [needing(*needed) for needed in NEEDED_BY_MARKS],
)
def test_without_any_one_of_the_rules_of_marks_a_guarantee_is_broken(
    rule: Rule, story: Story, kinds: tuple[Fault, ...], faults: int, failure: str
) -> None:
    model = Model(story._replace(kinds=kinds), faults, without=frozenset({rule}))

    found = Search(model, positions=False).run()

    print(f"without {rule!s}:\n{found}")
    assert found.failure is not None
    assert failure in found.failure, str(found)


def test_a_walk_that_does_not_check_redis_finds_a_wrong_mark() -> None:
    blind = frozenset({Rule.TOKEN, Rule.CONNECTION, Rule.POSITIONS})

    found = Search(Model(MARKED_CANCEL._replace(kinds=(BACK,)), 1, blind), positions=False).run()

    print(found)
    assert found.failure is not None
    assert "not pending" in found.failure


def test_after_fencing_no_receipt_is_written_before_the_barrier() -> None:
    model = Model(CANCELLED, faults=1, without=frozenset({Rule.BETWEEN}))

    found = Search(model, positions=True).run()

    assert found.failure is None, str(found)
