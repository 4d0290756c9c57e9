"""Whatever happens around a shard, and in whatever order: every request has the outcome it should.

Every order of a few requests, two owners and up to two faults is tried. BLACKBOX_TEST_MODEL_DEPTH=1
allows one fault more in each story: ten times the states, many minutes, several GB of memory.
"""

from __future__ import annotations

import os

import pytest

from tests.model.search import Search
from tests.model.shard import Model, Story
from tests.model.state import Record
from tests.model.terms import Rule

MORE_FAULTS = int(os.environ.get("BLACKBOX_TEST_MODEL_DEPTH", "0"))

A_REQUEST, NAMED, CANCEL, GAP = Record.REQUEST, Record.NAMED, Record.CANCEL, Record.GAP

CANCELLED = Story((NAMED, CANCEL))
REPLACED = Story((NAMED, NAMED))
BEHIND_A_GAP = Story((GAP, A_REQUEST))
TWO = Story((A_REQUEST, A_REQUEST))
TWO_ONE_BY_ONE = Story((A_REQUEST, A_REQUEST), limit=1)
ONE_BY_ONE_AND_A_CANCEL = Story((NAMED, A_REQUEST, CANCEL), limit=1)


@pytest.mark.timeout(180 if MORE_FAULTS == 0 else 0)
@pytest.mark.parametrize(
    ("story", "faults"),
    [
        pytest.param(CANCELLED, 2, id="cancelled"),
        pytest.param(REPLACED, 1, id="replaced"),
        pytest.param(BEHIND_A_GAP, 2, id="behind a gap"),
        pytest.param(TWO_ONE_BY_ONE, 1, id="one by one"),
        pytest.param(ONE_BY_ONE_AND_A_CANCEL, 1, id="one by one, and a cancel"),
    ],
)
def test_whatever_happens_every_request_has_its_one_outcome(story: Story, faults: int) -> None:
    found = Search(Model(story, faults + MORE_FAULTS), labels=True).run()

    print(found)
    assert found.failure is None, str(found)


NEEDED = [
    (Rule.POSITION, BEHIND_A_GAP, "never at rest"),
    (Rule.INTAKE_LABEL, TWO, "not pending"),
    (Rule.ONE_MULTI, CANCELLED, "not pending"),
    (Rule.DUE_ONLY, CANCELLED, "delivered early"),
    (Rule.DUE_LABELS, CANCELLED, "not pending"),
    (Rule.AHEAD, ONE_BY_ONE_AND_A_CANCEL, "delivered though ended before"),
    (Rule.COMMIT_FIRST, CANCELLED, "never delivered"),
    (Rule.REMOVAL_LABELS, TWO, "not pending"),
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
    [pytest.param(*needed, id=needed[0].name.lower()) for needed in NEEDED],
)
def test_without_one_of_the_rules_a_promise_is_broken(
    rule: Rule, story: Story, failure: str
) -> None:
    found = Search(Model(story, faults=2, without=frozenset({rule})), labels=False).run()

    print(f"without {rule!s}:\n{found}")
    assert found.failure is not None
    assert failure in found.failure, str(found)


def test_behind_a_fence_no_receipt_comes_between_an_owner_and_its_barrier() -> None:
    model = Model(CANCELLED, faults=1, without=frozenset({Rule.BETWEEN}))

    found = Search(model, labels=True).run()

    assert found.failure is None, str(found)
