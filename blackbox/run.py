"""Wiring: from settings to a running service with its HTTP server, until it is stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Protocol

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_when_event_set,
    wait_exponential,
)
from tenacity.nap import sleep_using_event

from blackbox.admin.admin import Admin
from blackbox.api.access import CLOSED, Access
from blackbox.api.app import make_app
from blackbox.api.health import Health
from blackbox.api.serve import HttpServer
from blackbox.config.check import findings
from blackbox.config.settings import Half, Settings
from blackbox.engine.metrics import Metrics
from blackbox.engine.process import ProcessEngine
from blackbox.records.errors import RecoveryRequired
from blackbox.support import interpreter

logger = logging.getLogger("blackbox.run")

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
# How long a stop waits for a start, then for work in flight. Together with HTTP less than the five
# seconds that a stop may take; the next owner recovers what takes longer.
START_S = 0.5
STOP_S = 3.5


class UnsafeConfiguration(Exception):
    """Kafka or Redis is configured so that the guarantees cannot hold: the service refuses to start."""


class Engine(Health, Protocol):
    """The part of a service that calls the verbs."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


def make_engine(
    settings: Settings, metrics: Metrics, only: Half | None, failed: Callable[[Exception], None]
) -> Engine:
    """The engine that the settings ask for."""
    if settings.engine == "process":
        return ProcessEngine(settings, metrics)
    # Not at the top: the process engine runs without pyspark.
    from blackbox.engine.spark.driver import SparkEngine

    return SparkEngine(settings, metrics, only=only, failed=failed)


def serve(settings: Settings, stop: Event, only: Half | None = None) -> bool:
    """Run the engine until `stop` is set, then stop it, within about 4 s.

    Returns whether everything has ended; otherwise some threads still wait for a server, and the
    process must exit without them. Raises UnsafeConfiguration when `check` refuses what it finds,
    SettingsError when the HTTP address is taken.
    """
    if Access(settings.hosts, *settings.api_tokens).is_closed:
        logger.warning("HTTP on %s: %s", ", ".join(settings.hosts), CLOSED)
    # Before the first thread: arenas that exist already are not given up.
    interpreter.tune()
    metrics = Metrics()
    start = _EngineStart(settings, stop)
    engine = make_engine(settings, metrics, only, start.fail)
    admin = Admin(settings)
    app = make_app(engine, metrics, admin, settings)
    http = HttpServer(app, settings.http_host, settings.http_port, settings.metrics_addr)
    # Before the engine: probes answer from the start on, alive but not ready, even while Kafka or
    # Redis does not answer.
    http.start()
    logger.info("health and metrics on http://%s:%d", settings.http_host, http.port)
    start.begin(engine)
    try:
        stop.wait()
        logger.info("stopping")
    finally:
        # The engine first, as deliveries stop; probes and metrics answer until then.
        has_ended = start.end(STOP_S)
        http.stop()
        admin.close()
    if start.failure is not None:
        raise start.failure
    logger.info(
        "stopped"
        if has_ended
        else "exited with deliveries in flight; the next owner will recover them"
    )
    return has_ended


class _EngineStart:
    """Starts the engine in a thread of its own, for as long as it takes."""

    def __init__(self, settings: Settings, stop: Event) -> None:
        self._settings = settings
        self._stop = stop
        self._lock = Lock()
        self._started: Engine | None = None
        self.failure: Exception | None = None

    def begin(self, engine: Engine) -> None:
        # The main thread stays free: Python runs signal handlers only there, and a client that
        # waits for a server would hold them up.
        Thread(target=self._run, args=(engine,), name="start", daemon=True).start()

    def end(self, timeout_s: float) -> bool:
        """Stop what was started; False when that, or a start in flight, takes longer."""
        if not self._lock.acquire(timeout=START_S):
            return False
        if self._started is None:
            return True
        # In a thread, as it may wait for a server that hangs. A daemon does not keep the process.
        ending = Thread(target=self._started.stop, name="stop", daemon=True)
        ending.start()
        ending.join(timeout_s)
        return not ending.is_alive()

    def fail(self, reason: Exception) -> None:
        """Stop because the engine cannot go on, and let the process end with this reason."""
        if not self._stop.is_set():
            self.failure = reason
            self._stop.set()

    def _run(self, engine: Engine) -> None:
        again = Retrying(
            retry=retry_if_exception_type(RecoveryRequired),
            wait=wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            stop=stop_when_event_set(self._stop),
            sleep=sleep_using_event(self._stop),
            before_sleep=_log_retry,
            reraise=True,
        )
        try:
            again(self._check)
            again(self._start, engine)
        except Exception as reason:
            self.fail(reason)

    def _check(self) -> None:
        found = findings(self._settings)
        for finding in found:
            if finding.severity == "warn":
                logger.warning("%s; %s", finding.text, finding.remedy)
        refused = [f"{one.text}; {one.remedy}" for one in found if one.severity == "refuse"]
        if refused:
            raise UnsafeConfiguration("\n".join(refused))

    def _start(self, engine: Engine) -> None:
        # A stop that waits for this lock must find the engine started, or never started.
        with self._lock:
            if self._stop.is_set():
                return
            engine.start()
            self._started = engine
        topics = ", ".join(
            f"{topic}:{format_name}" for topic, format_name in self._settings.topics.items()
        )
        settings = self._settings
        logger.info(
            "started: %s engine, %s, %s, group %s",
            settings.engine, topics, settings.delivery, settings.group_id,
        )  # fmt: skip


def _log_retry(attempt: RetryCallState) -> None:
    assert attempt.outcome is not None
    assert attempt.next_action is not None
    logger.warning(
        "not started yet: %s; retrying in %.1f s",
        attempt.outcome.exception(), attempt.next_action.sleep,
    )  # fmt: skip
