"""The HTTP applications: probes and metrics, the API, and the web page."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from blackbox.admin.admin import Admin
from blackbox.api import dead_letters, pages, pausing, requests, schedules, stats
from blackbox.api.access import Access
from blackbox.api.access_middleware import AccessMiddleware, error_response
from blackbox.api.health import Health
from blackbox.api.metrics_text import MetricsText
from blackbox.api.pages import READS
from blackbox.api.turns import Turns
from blackbox.client import NotSent
from blackbox.config.settings import Settings
from blackbox.engine.metrics import Metrics
from blackbox.records.errors import IndexFull, RecoveryRequired

# Faults that one error names; a body can have a million.
FAULTS_NAMED = 10


def make_probes(service: Health, metrics: Metrics) -> FastAPI:
    """Probes and metrics only."""
    app = FastAPI(
        title="blackbox",
        version=version("blackbox"),
        # FastAPI's documentation pages load scripts from other sites.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )

    texts = MetricsText(metrics.registry)

    # Coroutines need none of the 40 threads, all of which may wait for Kafka or Redis.
    @app.api_route("/livez", methods=READS, include_in_schema=False)
    async def live() -> JSONResponse:
        return _probe("live", service.is_live(), stuck=list(map(str, service.stuck())))

    @app.api_route("/readyz", methods=READS, include_in_schema=False)
    async def ready() -> JSONResponse:
        closed = service.not_open()
        why = {str(one): text for one, text in service.why_not_open().items() if one in closed}
        more = {"why": why} if why else {}
        return _probe("ready", service.is_ready(), not_open=list(map(str, closed)), **more)

    @app.api_route("/metrics", methods=READS, include_in_schema=False)
    async def scrape(accept: Annotated[str, Header()] = "") -> Response:
        text, content_type = texts.answer(accept)
        return Response(text, headers={"Content-Type": content_type})

    return app


def make_app(service: Health, metrics: Metrics, admin: Admin, settings: Settings) -> FastAPI:
    """Probes, metrics, the API and the web page."""
    app = make_probes(service, metrics)
    access = Access(settings.hosts, *settings.api_tokens)
    turns = Turns()
    app.add_middleware(AccessMiddleware, access=access)
    app.include_router(requests.routes(admin, turns))
    app.include_router(stats.routes(admin, turns))
    app.include_router(dead_letters.routes(admin, access, turns))
    app.include_router(pausing.routes(admin, turns))
    app.include_router(schedules.routes(service, admin, turns, settings))
    app.include_router(pages.routes())

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    # Coroutines: a refusal must not wait for one of the threads.
    @app.exception_handler(HTTPException)
    async def failed(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # the client is gone; this avoids a traceback in the log

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        faults = error.errors()
        texts = [
            f"{fault['loc'][-1] if fault['loc'] else 'body'}: {fault['msg']}"
            for fault in faults[:FAULTS_NAMED]
        ]
        if len(faults) > FAULTS_NAMED:
            texts.append(f"and {len(faults) - FAULTS_NAMED} more")
        return JSONResponse({"error": "; ".join(texts), "refused": []}, 422)

    @app.exception_handler(RecoveryRequired)
    @app.exception_handler(NotSent)
    @app.exception_handler(IndexFull)
    async def unavailable(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 503, {"Retry-After": "5"})

    return app


def _probe(name: str, is_good: bool, **details: object) -> JSONResponse:
    content = {name: is_good, **details}
    return JSONResponse(content, 200 if is_good else 503, {"Cache-Control": "no-store"})
