"""Statistics over HTTP: pending requests by shard, by caller, by target and by due time."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from blackbox.admin.admin import Admin
from blackbox.api.cache import Cache
from blackbox.api.openapi import FAILURES
from blackbox.api.turns import Turns

PROFILE_STEPS = 60
# Callers, and targets, that are listed: callers choose names, and could make answers of megabytes.
NAMES = 100

# All viewers of the page share one answer: each costs reads of a thousand entries per shard.
KEPT_S = 1.0


Step = Annotated[
    int, Query(ge=1000, le=86_400_000, description="the length of a step of the profile, ms")
]


class ShardState(BaseModel):
    """Statistics of a shard."""

    shard: str = Field(description="topic and partition, such as TB-3")
    is_known: bool = Field(description="whether its index is in Redis")
    pending: int = Field(description="requests in the index, without the cold ones")
    cold: int = Field(description="requests in the cold tier")
    due_now: int = Field(description="pending requests that are due")
    oldest_overdue_ms: int = Field(description="how long the oldest of these has been due")
    next_due_in_ms: int | None = Field(None, description="time until the next one is due")


class Counts(BaseModel):
    """Statistics of all shards."""

    pending: int = Field(description="the sum of all shards, like `cold` and `due_now`")
    cold: int
    due_now: int
    oldest_overdue_ms: int = Field(description="the maximum of all shards")
    shards: list[ShardState]
    callers: dict[str, int] = Field(
        description=(
            "pending requests by caller, for the 100 callers with most of the `counted` ones; '': "
            "no name"
        )
    )
    callers_left_out: int = Field(description="how many more callers the `counted` requests have")
    targets: dict[str, int] = Field(
        description="pending requests by target, for the 100 targets with most of the `counted` ones"
    )
    targets_left_out: int = Field(description="how many more targets the `counted` requests have")
    counted: int = Field(
        description="how many requests were counted: the soonest 1,000 of each shard"
    )
    profile_from_ms: int = Field(description="when the first step begins, epoch ms")
    profile_step_ms: int = Field(description="the length of a step")
    profile: list[int] = Field(description="how many pending requests are due in each of 60 steps")


def routes(admin: Admin, turns: Turns) -> APIRouter:
    router = APIRouter(responses=FAILURES)
    cache = Cache(partial(_counts, admin), KEPT_S)

    @router.get("/stats", response_model_exclude_none=True, dependencies=[Depends(turns.read)])
    def stats(step_ms: Step = 60_000) -> Counts:
        """Count pending and overdue requests, by caller, by target, and by due time for sixty steps from now.

        The answer is up to a second old.
        """
        return cache.get(step_ms)

    return router


def _counts(admin: Admin, step_ms: int) -> Counts:
    now_ms = time.time_ns() // 1_000_000
    edges = [now_ms + step_ms * step for step in range(PROFILE_STEPS + 1)]
    found = admin.stats(now_ms, edges)
    shards = [
        ShardState(
            shard=str(shard),
            is_known=one.positions is not None,
            pending=one.pending,
            cold=one.cold,
            due_now=one.due_now,
            oldest_overdue_ms=now_ms - (one.oldest_due_ms or now_ms),
            next_due_in_ms=None if one.next_due_ms is None else one.next_due_ms - now_ms,
        )
        for shard, one in found.shards.items()
    ]
    return Counts(
        pending=sum(one.pending for one in shards),
        cold=sum(one.cold for one in shards),
        due_now=sum(one.due_now for one in shards),
        oldest_overdue_ms=max((one.oldest_overdue_ms for one in shards), default=0),
        shards=shards,
        callers=dict(found.callers.most_common(NAMES)),
        callers_left_out=max(0, len(found.callers) - NAMES),
        targets=dict(found.targets.most_common(NAMES)),
        targets_left_out=max(0, len(found.targets) - NAMES),
        counted=found.counted,
        profile_from_ms=now_ms,
        profile_step_ms=step_ms,
        profile=list(found.profile),
    )
