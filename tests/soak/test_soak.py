"""A short soak, which shows that the long one works."""

from __future__ import annotations

import pytest

from tests.soak.run import run
from tests.support.world import World

pytestmark = [pytest.mark.service, pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.mark.proof
def test_under_load_with_faults_nothing_is_lost_duplicated_or_early(world: World) -> None:
    soak = run(world, seconds=10, share=0.2, every_s=5, say=lambda what, done_s: None, flood=20_000)
    assert len(soak.faults) == 2
    assert len(soak.times) > 1000
    assert soak.broken() == (0, 0, 0)
