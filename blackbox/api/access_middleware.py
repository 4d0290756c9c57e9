"""Checks before a request reaches its route: access, and the size of the body."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blackbox.api.access import Access

# Parsing a query takes the time of all connections, and a head has room for thousands.
MOST_PARAMETERS = 100

MOST_BYTES = 16 << 20
BODY_WITHIN_S = 60.0

MOST_HELD_BYTES = 64 << 20
"""Most bytes of all bodies together, until they are answered."""

# Of each body, not counted: 512 connections with 64 KiB each hold 32 MiB, and few bodies need more.
FREE_BYTES = 64 << 10


class AccessMiddleware:
    """Admits requests by their headers alone; the body of a refused request is not read."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._held = _HeldBytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                request = Request(scope)
                # Not a dependency: FastAPI reads the body before it evaluates dependencies.
                self._access.check(request)
                _check_query(request)
                _check_length(request, MOST_BYTES)
            except HTTPException as refusal:
                await error_response(refusal)(scope, receive, send)
                return
            with closing(_Body(receive, self._held)) as body:
                await self._app(scope, body.receive, send)
        else:
            await self._app(scope, receive, send)


def error_response(refusal: HTTPException) -> JSONResponse:
    """The answer to a request that is refused or fails."""
    return JSONResponse({"error": refusal.detail}, refusal.status_code, refusal.headers)


class _HeldBytes:
    count = 0


class _Body:
    """The body as the app receives it.

    Raises HTTPException 413 for its size, 408 for its deadline, 503 for the size of all bodies.
    """

    def __init__(self, receive: Receive, held: _HeldBytes) -> None:
        self._receive = receive
        self._held = held
        self._read = 0
        self._until_s = math.inf
        self._is_whole = False

    def close(self) -> None:
        self._held.count -= self._counted()
        self._read = 0

    def _counted(self) -> int:
        return max(0, self._read - FREE_BYTES)

    async def receive(self) -> Message:
        if self._is_whole:  # only a disconnect can follow, at any time
            return await self._receive()
        # One deadline from the first read on: with one per part, a client could send bytes forever.
        self._until_s = min(self._until_s, asyncio.get_running_loop().time() + BODY_WITHIN_S)
        try:
            async with asyncio.timeout_at(self._until_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the body did not arrive within {BODY_WITHIN_S:g} s"
            ) from None
        self._is_whole = not message.get("more_body", False)
        self._take(len(message.get("body", b"")))
        return message

    def _take(self, count: int) -> None:
        before = self._counted()
        self._read += count
        self._held.count += self._counted() - before
        if self._read > MOST_BYTES:
            raise _too_large(MOST_BYTES)
        if self._counted() > 0 and self._held.count > MOST_HELD_BYTES:
            self.close()  # now, or other growing bodies would be refused as well
            why = f"the bodies of all open requests exceed {MOST_HELD_BYTES} bytes; try again"
            raise HTTPException(503, why, {"Retry-After": "1"})


async def small_body(request: Request, most_bytes: int) -> bytes:
    """The body, for routes with a lower limit. Raises HTTPException 413 for a larger one."""
    _check_length(request, most_bytes)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            raise _too_large(most_bytes)
    return bytes(body)


def _check_query(request: Request) -> None:
    if request.scope["query_string"].count(b"&") >= MOST_PARAMETERS:
        raise HTTPException(400, f"the query has more than {MOST_PARAMETERS} parameters")


def _check_length(request: Request, most_bytes: int) -> None:
    # A chunked body has no Content-Length; it is counted while it is read.
    length = request.headers.get("Content-Length", "0")
    if not length.isdecimal() or int(length) > most_bytes:
        raise _too_large(most_bytes)


def _too_large(most_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body exceeds {most_bytes} bytes; send less at once")
