from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from blackbox.api.cache import Cache
from blackbox.records.errors import IndexLost


class Made:
    """Records how often an answer was computed, and for which key."""

    def __init__(self, takes_s: float = 0.0, failure: Exception | None = None) -> None:
        self.times: list[int] = []
        self._takes_s = takes_s
        self._failure = failure

    def __call__(self, asked: int) -> str:
        self.times.append(asked)
        time.sleep(self._takes_s)
        if self._failure is not None:
            raise self._failure
        return f"{asked}, made {len(self.times)}"


def test_concurrent_requests_for_one_answer_compute_it_once() -> None:
    made = Made(takes_s=0.1)
    cache = Cache(made, 30)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(cache.get, [5] * 8)) == {"5, made 1"}
    assert made.times == [5]


def test_the_cache_has_one_answer_for_each_key() -> None:
    made = Made()
    cache = Cache(made, 30)
    assert [cache.get(one) for one in (1, 2, 1, 2)] == ["1, made 1", "2, made 2"] * 2


def test_an_expired_answer_is_computed_again_and_removed() -> None:
    made = Made()
    cache = Cache(made, 0.05)
    for one in (1, 2):
        cache.get(one)
    time.sleep(0.1)
    assert cache.get(1) == "1, made 3"
    assert list(cache._entries) == [1]


def test_an_error_is_cached_so_that_others_do_not_wait_for_it() -> None:
    made = Made(takes_s=0.1, failure=IndexLost("Redis does not answer"))
    cache = Cache(made, 0.2)
    for _ in range(5):
        with pytest.raises(IndexLost, match="Redis does not answer"):
            cache.get(1)
    assert made.times == [1]
    time.sleep(0.3)
    with pytest.raises(IndexLost):
        cache.get(1)
    assert made.times == [1, 1]
