"""Dead letters over HTTP: list, replay, discard."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from blackbox.admin.admin import Admin
from blackbox.api.access import Access
from blackbox.api.answers import Letters, LetterState, Places, PutAwayState
from blackbox.api.openapi import FAILURES, body_schema
from blackbox.api.requests import body_of
from blackbox.api.turns import Turns
from blackbox.journal.dead_letter_topic import MOST_SHOWN_BYTES

# Of a body that names letters; a thousand of the longest places take a third of it.
MOST_BYTES = 1 << 20

MOST_ANSWER_BYTES = 8 << 20
"""Most bytes of all keys and values in one answer, as they are sent."""

places_body = Depends(body_of(Places, MOST_BYTES))
NamedLetters = Annotated[Places, places_body]
LETTERS_BODY = body_schema(Places.model_json_schema(), "the places of the letters")

OfReason = Annotated[str | None, Query(max_length=50, description="only letters with this reason")]
IsOpen = Annotated[bool, Query(description="false: also replayed and discarded letters")]
Limit = Annotated[int, Query(ge=1, le=1000, description="the maximum number of letters")]


def routes(admin: Admin, access: Access, turns: Turns) -> APIRouter:
    router = APIRouter(responses=FAILURES)
    # Letters first: callers that wait for their turn there must not hold one of the eight reads.
    looks = [Depends(turns.letters), Depends(turns.read)]
    # Body first: a slow client must not hold a turn.
    closes = [places_body, Depends(turns.close_letters)]

    @router.get("/dead-letters", response_model_exclude_none=True, dependencies=looks)
    def list_letters(
        request: Request,
        reason: OfReason = None,
        is_open: IsOpen = True,
        limit: Limit = 100,
    ) -> Letters:
        """List dead letters, the newest first.

        Reads the last 10,000 records of each partition, and returns letters of the configured request topics.
        Only callers that may make changes get keys and values, cut to 10,000 bytes each, or less with a high
        `limit`.
        """
        # Half for the key, half for the value of each.
        most_sent_bytes = MOST_ANSWER_BYTES // (2 * limit)
        most_bytes = min(MOST_SHOWN_BYTES, most_sent_bytes)
        found = admin.letters(reason, is_open=is_open, limit=limit, most_bytes=most_bytes)
        is_operator = access.may_operate(request)
        return Letters(
            letters=[LetterState.of(one, most_sent_bytes, with_record=is_operator) for one in found]
        )

    @router.post("/dead-letters/replay", dependencies=closes, openapi_extra=LETTERS_BODY)
    def replay(asked: NamedLetters) -> PutAwayState:
        """Write the requests of these letters again; each letter once, however often this is called.

        After about 8 s, the rest of the letters is left: send their places again.
        """
        done = admin.close_letters(asked.places, replay=True)
        return PutAwayState(done=done.done, left=done.left)

    @router.post("/dead-letters/discard", dependencies=closes, openapi_extra=LETTERS_BODY)
    def discard(asked: NamedLetters) -> PutAwayState:
        """Mark these letters as discarded; they stay in Kafka."""
        done = admin.close_letters(asked.places, replay=False)
        return PutAwayState(done=done.done, left=done.left)

    return router
