"""Dead letters over HTTP: look, replay, discard."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from blackbox.admin.admin import Admin
from blackbox.api.access import Access
from blackbox.api.answers import Letters, LetterState, Places, PutAwayState
from blackbox.api.requests import FAILURES, body_of, json_body
from blackbox.journal.letterbox import MOST_SHOWN_BYTES

MOST_BYTES = 1 << 20
"""Of a body that names letters; a thousand of the longest take a third."""

MOST_TOLD_BYTES = 8 << 20
"""Of all keys and values in one answer."""

places_body = Depends(body_of(Places, MOST_BYTES))
Asked = Annotated[Places, places_body]
NAMED = json_body(Places.model_json_schema(), "which letters")


def routes(admin: Admin, access: Access) -> APIRouter:
    """Paths under `/dead-letters`."""
    router = APIRouter(responses=FAILURES)
    looks = [Depends(access.letters_turn), Depends(access.turn)]
    changes = [places_body, Depends(access.change_turn)]

    @router.get("/dead-letters", response_model_exclude_none=True, dependencies=looks)
    def lying(
        request: Request,
        reason: Annotated[str | None, Query(max_length=50)] = None,
        is_open: bool = True,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Letters:
        """The newest first, of those among the last 10,000 of each partition; `is_open=false`: also replayed and discarded ones.

        Keys and values only for those who may change things, and of each the first 10,000 bytes at
        most, of a thousand letters less: a letter is a whole message.
        """
        most_bytes = min(MOST_SHOWN_BYTES, MOST_TOLD_BYTES // (2 * limit))
        found = admin.letters(reason, is_open=is_open, limit=limit, most_bytes=most_bytes)
        told = partial(LetterState.of, with_record=access.may_operate(request))
        return Letters(letters=list(map(told, found)))

    @router.post("/dead-letters/replay", dependencies=changes, openapi_extra=NAMED)
    def replay(asked: Asked) -> PutAwayState:
        """Ask once more for what these letters asked for; each once, however often it is sent."""
        done = admin.put_away(asked.places, again=True)
        return PutAwayState(done=done.done, left=done.left)

    @router.post("/dead-letters/discard", dependencies=changes, openapi_extra=NAMED)
    def discard(asked: Asked) -> PutAwayState:
        """Put these letters away; they stay in Kafka, marked."""
        done = admin.put_away(asked.places, again=False)
        return PutAwayState(done=done.done, left=done.left)

    return router
