"""The text of the metrics, rendered for all clients."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import (
    CONTENT_TYPE_PLAIN_0_0_4,
    choose_encoder,
    generate_latest,
)
from prometheus_client.openmetrics import exposition as openmetrics

# Of the thread, which also answers probes. What is left of it is saved up, to some renderings: a client
# that asks now and then gets what holds at that moment.
SHARE = 0.1
MOST_SAVED_S = 0.2

RENDERERS: dict[str, Callable[[CollectorRegistry], bytes]] = {
    CONTENT_TYPE_PLAIN_0_0_4: generate_latest,
    openmetrics.CONTENT_TYPE_LATEST: openmetrics.generate_latest,
}


class MetricsText:
    """Prometheus text, or OpenMetrics; not safe for use from two threads at once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._kept: dict[str, bytes] = {}
        self._saved_s, self._seen_s = MOST_SAVED_S, time.monotonic()

    def answer(self, accept: str) -> tuple[bytes, str]:
        """The text for a client with this Accept header, and its content type."""
        content_type, now_s = _content_type(accept), time.monotonic()
        self._saved_s = min(MOST_SAVED_S, self._saved_s + SHARE * (now_s - self._seen_s))
        self._seen_s = now_s
        if self._saved_s > 0 or content_type not in self._kept:
            self._kept[content_type] = RENDERERS[content_type](self._registry)
            self._saved_s -= time.monotonic() - now_s
        return self._kept[content_type], content_type


def _content_type(accept: str) -> str:
    """One of two, whatever version or escaping the client names: each has a text that is kept."""
    try:
        _, content_type = choose_encoder(accept)
    except TypeError:  # a version in this header that is not a number
        return CONTENT_TYPE_PLAIN_0_0_4
    is_open = content_type.startswith("application/openmetrics-text")
    return openmetrics.CONTENT_TYPE_LATEST if is_open else CONTENT_TYPE_PLAIN_0_0_4
