"""Requests over HTTP: write, find, list, cancel, reschedule."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from blackbox.admin.admin import Admin
from blackbox.admin.changes import Cancelled, Rescheduled
from blackbox.admin.pending import Cursor, PendingFilter
from blackbox.admin.request_topics_writer import RefusedValue
from blackbox.api.access_middleware import small_body
from blackbox.api.answers import (
    CancelState,
    Ids,
    NewDueTime,
    NotTaken,
    Page,
    RefusedRequest,
    RequestState,
    RescheduledState,
)
from blackbox.api.openapi import (
    FAILURES,
    MANY_REQUESTS,
    NEW_DUE_TIME,
    NOT_FOUND,
    ONE_REQUEST,
    UNDETERMINED,
    After,
    CallerName,
    From,
    Id,
    Limit,
    OfCaller,
    ProxiedCallerName,
    Target,
    To,
)
from blackbox.api.turns import Turns
from blackbox.formats.format import caller_name

MOST_AT_ONCE = 10_000
MOST_DUE_BYTES = 64 << 10

B = TypeVar("B", bound=BaseModel)


def body_of(model: type[B], most_bytes: int) -> Callable[[Request], Awaitable[B]]:
    """A dependency that parses the body as JSON. Raises HTTPException 413 above `most_bytes`."""

    # Not FastAPI's own parsing, which wants a Content-Type of JSON: curl's default is another one.
    async def read(request: Request) -> B:
        # The limit must be small: the event loop parses the body, and each fault takes a kilobyte.
        body = await small_body(request, most_bytes)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            raise RequestValidationError(faults) from None

    return read


async def _whole_body(request: Request) -> bytes:
    return await request.body()


whole_body = Depends(_whole_body)
due_body = Depends(body_of(NewDueTime, MOST_DUE_BYTES))
WholeBody = Annotated[bytes, whole_body]
DueBody = Annotated[NewDueTime, due_body]


async def _caller(named: CallerName = None, proxied: ProxiedCallerName = None) -> str | None:
    """The caller's name. Raises HTTPException 422 for an invalid name, or two different ones."""
    given = {held for held in (named, proxied) if held}
    if not given:
        return None
    # Starlette decodes headers as latin-1; the name is UTF-8.
    names = {caller_name(held.encode("latin-1")) for held in given}
    [name, *others] = names
    if name is None or others:
        raise HTTPException(
            422, "CALLER_SERVICE or Caller-Service: give one name of 1 to 255 printable characters"
        )
    return name


Caller = Annotated[str | None, Depends(_caller)]


def routes(admin: Admin, turns: Turns) -> APIRouter:
    router = APIRouter(responses=FAILURES)
    _add_sending(router, admin, turns)
    _add_reading(router, admin, turns)
    _add_changes(router, admin, turns)
    return router


def _add_sending(router: APIRouter, admin: Admin, turns: Turns) -> None:
    # Body first: a slow client must not hold a turn.
    asks = [whole_body, Depends(turns.change)]

    @router.post(
        "/requests", status_code=201, response_model=Ids, openapi_extra=ONE_REQUEST, dependencies=asks,
    )  # fmt: skip
    async def ask(body: WholeBody, caller: Caller = None) -> Any:
        """Request a message; returns the request's id once Kafka has acknowledged it."""
        return _ids_or_refusal(await run_in_threadpool(admin.send, [body], caller))

    @router.post(
        "/requests/bulk", status_code=201, response_model=Ids, openapi_extra=MANY_REQUESTS, dependencies=asks,
    )  # fmt: skip
    async def send_many(body: WholeBody, caller: Caller = None) -> Any:
        """Request many messages; if one request is refused, none is written."""
        lines = _lines(body)
        return _ids_or_refusal(await run_in_threadpool(admin.send, lines, caller))


def _add_reading(router: APIRouter, admin: Admin, turns: Turns) -> None:
    looks = [Depends(turns.read)]

    @router.get("/requests", response_model_exclude_none=True, dependencies=looks)
    def pending(
        from_ms: From = None,
        to_ms: To = None,
        target: Target = None,
        caller: OfCaller = None,
        cursor: After = None,
        limit: Limit = 100,
    ) -> Page:
        """List pending requests, the soonest first, without the cold tier."""
        try:
            after = None if cursor is None else Cursor.read(cursor)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        found, next_ = admin.page(PendingFilter(from_ms, to_ms, target, caller), after, limit)
        return Page(
            requests=[RequestState.of_pending(one) for one in found],
            next=None if next_ is None else str(next_),
        )

    @router.get(
        "/requests/{id:path}", response_model_exclude_none=True, dependencies=looks,
        responses=NOT_FOUND,
    )  # fmt: skip
    def find(id: Id) -> RequestState:
        """Find the state of a request by its id, or by its caller's id while it is pending."""
        status = admin.find(id)
        if status is None:
            raise _unknown(id)
        return RequestState.of(status)


def _add_changes(router: APIRouter, admin: Admin, turns: Turns) -> None:
    changes = [Depends(turns.change)]

    @router.delete(
        "/requests/{id:path}", response_model_exclude_none=True, dependencies=changes,
        responses=NOT_FOUND | UNDETERMINED,
    )  # fmt: skip
    def cancel(id: Id) -> CancelState:
        """Cancel a pending request, or all under a caller's id; reports whether that was in time."""
        done = admin.cancel(id)
        _check(done, id)
        return CancelState.of(done)

    @router.patch(
        "/requests/{id:path}", response_model_exclude_none=True, dependencies=[due_body, *changes],
        responses=NOT_FOUND | UNDETERMINED, openapi_extra=NEW_DUE_TIME,
    )  # fmt: skip
    def reschedule(id: Id, due: DueBody) -> RescheduledState:
        """Deliver a pending request at another time; reports whether the change was in time."""
        try:
            done = admin.reschedule(id, countdown_s=due.countdown, at=due.at)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        _check(done, id)
        return RescheduledState.model_validate(done, from_attributes=True)


def _lines(body: bytes) -> list[bytes]:
    """The requests of a bulk body. Raises HTTPException 413 for too many, 422 for none."""
    # Counted before they are split: 16 MiB of newlines would become millions of objects.
    count = body.count(b"\n") + (not body.endswith(b"\n"))
    if count > MOST_AT_ONCE:
        raise HTTPException(
            413, f"the body has {count} lines; send at most {MOST_AT_ONCE}, or use `blackbox load`"
        )
    lines = [line.removesuffix(b"\r") for line in body.split(b"\n") if line.strip()]
    if not lines:
        raise HTTPException(422, "the body has no requests; send one per line")
    return lines


def _ids_or_refusal(found: list[str] | list[RefusedValue]) -> Any:
    refused = [one for one in found if isinstance(one, RefusedValue)]
    if not refused:
        return Ids(ids=[one for one in found if isinstance(one, str)])
    first = refused[0]
    answer = NotTaken(
        error=f"nothing was written; request {first.number}: {first.detail}",
        refused=[RefusedRequest(**asdict(one)) for one in refused],
    )
    return JSONResponse(answer.model_dump(), 422)


def _check(done: Cancelled | Rescheduled, id: str) -> None:
    """Raise HTTPException when nothing was done."""
    if done.outcome == "unknown":
        raise _unknown(id)
    if done.outcome == "undetermined":
        assert done.request is not None
        raise HTTPException(504, f"{done.request.id} was not changed: {done.request.detail}")


def _unknown(id: str) -> HTTPException:
    return HTTPException(404, f"{id[:80]!r}: no request has this id, and none is pending under it")
