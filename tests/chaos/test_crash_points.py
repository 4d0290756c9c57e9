"""The crash points name functions that exist."""

from __future__ import annotations

import pytest

from tests.chaos.crash_points import MARKING, PROMOTING, REBUILDING, STEPS, Step

POINTS = STEPS | REBUILDING | MARKING | PROMOTING


@pytest.mark.parametrize("step", POINTS.values(), ids=POINTS)
def test_each_crash_point_is_a_function_of_the_product(step: Step) -> None:
    names = (step.names,) if isinstance(step.names, str) else step.names
    assert all(callable(getattr(step.owner, name)) for name in names)
