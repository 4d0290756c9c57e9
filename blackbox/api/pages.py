"""The web page and the API's documentation page: the files of the folder `page`, unchanged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Header, Response

READS = ["GET", "HEAD"]
PATHS = {"index.html": "/", "docs.html": "/docs"}
"""Other files are under `/page/`."""

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
GUARDED = {
    # Browsers compare the ETag at each use, so an upgrade never leaves a mix of old and new files.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def routes() -> APIRouter:
    """`/`, `/docs`, and the files they load."""
    router = APIRouter()
    for file in (files("blackbox.api") / "page").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = PATHS.get(file.name, f"/page/{file.name}")
            answer = _answer(file.read_bytes(), kind)
            router.add_api_route(path, answer, methods=READS, include_in_schema=False)
    return router


def _answer(content: bytes, kind: str) -> Callable[[str], Awaitable[Response]]:
    headers = GUARDED | {"Content-Type": kind, "ETag": f'"{sha256(content).hexdigest()[:32]}"'}

    async def answer(if_none_match: Annotated[str, Header()] = "") -> Response:
        # `in`: clients may list several, and proxies that compress make an ETag weak (`W/"…"`).
        if headers["ETag"] in if_none_match:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return answer
