"""The routes: is it alive, is it ready, what did it do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

from fastapi import FastAPI, Header, Response
from fastapi.responses import JSONResponse
from prometheus_client.exposition import choose_encoder

from blackbox.metrics import Metrics
from blackbox.request import Shard

READS = ["GET", "HEAD"]
NOT_STORED = {"Cache-Control": "no-store"}


class Health(Protocol):
    """What the probes ask of a service."""

    def is_live(self) -> bool: ...
    def is_ready(self) -> bool: ...
    def stuck(self) -> Sequence[Shard]: ...
    def not_open(self) -> Sequence[Shard]: ...


def make_app(service: Health, metrics: Metrics) -> FastAPI:
    """The application; without pages of documentation, which would load scripts from elsewhere."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.api_route("/livez", methods=READS)
    def live() -> JSONResponse:
        return _probe("live", service.is_live(), "stuck", service.stuck())

    @app.api_route("/readyz", methods=READS)
    def ready() -> JSONResponse:
        return _probe("ready", service.is_ready(), "not_open", service.not_open())

    @app.api_route("/metrics", methods=READS)
    def scrape(accept: Annotated[str, Header()] = "") -> Response:
        encode, content_type = choose_encoder(accept)
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})

    return app


def _probe(name: str, is_good: bool, which: str, shards: Sequence[Shard]) -> JSONResponse:
    content = {name: is_good, which: [str(shard) for shard in shards]}
    return JSONResponse(content, 200 if is_good else 503, NOT_STORED)
