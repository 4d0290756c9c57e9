"""The text of the metrics, rendered for all clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import (
    CONTENT_TYPE_PLAIN_0_0_4,
    choose_encoder,
    generate_latest,
)
from prometheus_client.openmetrics import exposition as openmetrics

# How often as long as its rendering took a text is kept. There are two texts, so both together take
# at most a tenth of the thread that also answers probes.
KEPT_TIMES = 20

RENDERERS: dict[str, Callable[[CollectorRegistry], bytes]] = {
    CONTENT_TYPE_PLAIN_0_0_4: generate_latest,
    openmetrics.CONTENT_TYPE_LATEST: openmetrics.generate_latest,
}


class _Kept(NamedTuple):
    text: bytes
    until_s: float


class MetricsText:
    """Prometheus text, or OpenMetrics; not safe for use from two threads at once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._kept: dict[str, _Kept] = {}

    def answer(self, accept: str) -> tuple[bytes, str]:
        """The text for a client with this Accept header, and its content type."""
        content_type = _content_type(accept)
        kept = self._kept.get(content_type)
        if kept is None or time.monotonic() >= kept.until_s:
            kept = self._kept[content_type] = self._render(content_type)
        return kept.text, content_type

    def _render(self, content_type: str) -> _Kept:
        began_s = time.monotonic()
        text = RENDERERS[content_type](self._registry)
        ended_s = time.monotonic()
        return _Kept(text, ended_s + KEPT_TIMES * (ended_s - began_s))


def _content_type(accept: str) -> str:
    """One of two, whatever version or escaping the client names: each has a text that is kept."""
    try:
        _, content_type = choose_encoder(accept)
    except TypeError:  # a version in this header that is no number
        return CONTENT_TYPE_PLAIN_0_0_4
    is_open = content_type.startswith("application/openmetrics-text")
    return openmetrics.CONTENT_TYPE_LATEST if is_open else CONTENT_TYPE_PLAIN_0_0_4
