"""The monitor of a soak continues while a process is down, and reports an error while sampling."""

from __future__ import annotations

import os
from collections import deque

import pytest

from tests.soak.monitor import Monitor
from tests.support.world import until

OFTEN_S = 0.01


def test_a_restarted_process_is_sampled_again() -> None:
    here = {"service": os.getpid()}
    stages = deque([here, {}, {"service": 2**22 + 1}, here])
    with Monitor(lambda: stages.popleft() if len(stages) > 1 else here, OFTEN_S) as watch:
        until("sampled twice", lambda: any(len(life.samples) > 1 for life in watch.lives()))
    (life,) = watch.lives()
    assert (life.role, life.pid) == ("service", os.getpid())
    assert all(sample.memory_mb > 1 and sample.descriptors > 1 for sample in life.samples)


def test_an_error_while_sampling_is_raised_at_the_end() -> None:
    looks: list[bool] = []

    def lost() -> dict[str, int]:
        looks.append(True)
        raise RuntimeError("no such stage")

    with pytest.raises(RuntimeError, match="no such stage"), Monitor(lost, OFTEN_S):
        until("it has sampled", lambda: looks)
