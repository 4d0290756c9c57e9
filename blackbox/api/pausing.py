"""Targets over HTTP: list the paused ones, pause, resume."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path
from pydantic import AfterValidator

from blackbox.admin.admin import Admin
from blackbox.api.answers import PausedTarget, PausedTargets
from blackbox.api.openapi import FAILURES
from blackbox.api.turns import Turns
from blackbox.records.request import is_topic_name


def _topic(name: str) -> str:
    # The pattern below, which OpenAPI shows, also matches `.` and `..`; Kafka refuses both.
    if not is_topic_name(name):
        raise ValueError("not a valid topic name")
    return name


Topic = Annotated[
    str,
    Path(pattern=r"^[A-Za-z0-9._-]{1,249}$", description="the target topic"),
    AfterValidator(_topic),
]


def routes(admin: Admin, turns: Turns) -> APIRouter:
    router = APIRouter(responses=FAILURES)
    changes = [Depends(turns.change)]

    @router.get("/targets/paused", dependencies=[Depends(turns.read)])
    def paused() -> PausedTargets:
        """List the paused targets, which get no messages until they are resumed."""
        return _answer(admin.paused())

    @router.post("/targets/{topic}/pause", dependencies=changes)
    def pause(topic: Topic) -> PausedTargets:
        """Stop delivery to this target within a second; requests that come due for it wait."""
        return _answer(admin.pause(topic))

    @router.post("/targets/{topic}/resume", dependencies=changes)
    def resume(topic: Topic) -> PausedTargets:
        """Resume delivery to this target; requests that waited follow within a minute."""
        return _answer(admin.resume(topic))

    return router


def _answer(paused: dict[str, int]) -> PausedTargets:
    return PausedTargets(
        paused=[PausedTarget(topic=t, since_ms=since_ms) for t, since_ms in sorted(paused.items())]
    )
