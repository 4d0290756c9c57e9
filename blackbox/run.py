"""Wiring: from settings to a running service with its HTTP server, until it is told to stop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Event, Lock, Thread

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_when_event_set,
    wait_exponential,
)
from tenacity.nap import sleep_using_event

from blackbox.api.serve import HttpServer
from blackbox.check import Finding, findings
from blackbox.doubt import Doubt
from blackbox.metrics import Metrics
from blackbox.service import Service
from blackbox.settings import Settings

logger = logging.getLogger("blackbox.run")

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
START_S = 0.5
"""How long a stop waits for a start in flight."""


class Unsound(Exception):
    """Kafka or Redis is set up so that the promises cannot be held: the service refuses to start."""

    def __init__(self, refused: Sequence[Finding]) -> None:
        super().__init__("\n".join(f"{finding.text}; {finding.remedy}" for finding in refused))
        self.refused = refused


def serve(settings: Settings, stop: Event) -> None:
    """Run the service until `stop` is set, then stop it; bounded by about 4 s.

    While Kafka or Redis is away at the start, it is alive, not ready, and keeps trying. Raises
    Unsound when `check` refuses what it finds, SettingsError when the HTTP address is taken.
    """
    metrics = Metrics()
    service = Service(settings, metrics)
    http = HttpServer(service, metrics, settings.http_host, settings.http_port)
    http.start()
    logger.info("health and metrics on http://%s:%d", settings.http_host, http.port)
    start = _Start(service, settings, stop)
    start.begin()
    try:
        stop.wait()
        logger.info("stopping")
    finally:
        start.end()
        http.stop()
    if start.failure is not None:
        raise start.failure
    logger.info("stopped")


class _Start:
    """Starts the service in a thread of its own, for as long as it takes.

    The caller's thread stays free, so that a signal is noticed while a client waits for a server.
    """

    def __init__(self, service: Service, settings: Settings, stop: Event) -> None:
        self._service = service
        self._settings = settings
        self._stop = stop
        self._lock = Lock()
        self._is_started = False
        self.failure: Exception | None = None

    def begin(self) -> None:
        Thread(target=self._run, name="start", daemon=True).start()

    def end(self) -> None:
        """Stop what was started; what still waits for a server is left to the end of the process."""
        if self._lock.acquire(timeout=START_S) and self._is_started:
            self._service.stop()

    def _run(self) -> None:
        again = Retrying(
            retry=retry_if_exception_type(Doubt),
            wait=wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            stop=stop_when_event_set(self._stop),
            sleep=sleep_using_event(self._stop),
            before_sleep=_say_that_it_waits,
            reraise=True,
        )
        try:
            again(self._check)
            again(self._start)
        except Exception as reason:
            if not self._stop.is_set():
                self.failure = reason
                self._stop.set()

    def _check(self) -> None:
        found = findings(self._settings)
        for finding in found:
            if finding.severity == "warn":
                logger.warning("%s; %s", finding.text, finding.remedy)
        if refused := [finding for finding in found if finding.severity == "refuse"]:
            raise Unsound(refused)

    def _start(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            self._service.start()
            self._is_started = True
        topics = ", ".join(f"{topic}:{form}" for topic, form in self._settings.topics.items())
        logger.info(
            "started: %s, %s, group %s", topics, self._settings.delivery, self._settings.group_id
        )


def _say_that_it_waits(attempt: RetryCallState) -> None:
    assert attempt.outcome is not None
    assert attempt.next_action is not None
    logger.warning(
        "not started yet: %s; trying again in %.1f s",
        attempt.outcome.exception(), attempt.next_action.sleep,
    )  # fmt: skip
