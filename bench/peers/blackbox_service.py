"""blackbox as a service, on either engine."""

from __future__ import annotations

import json
import signal
import time
from importlib.metadata import version

import psutil

from bench.field import Field, Pod, wait
from bench.ground import HEADERS
from bench.peers.contestant import Contestant, NotMeasured, Plan, Scheduled, Setting, Site
from bench.peers.kafka_topics import Record, Target, write
from bench.peers.results import Executions

PARTITIONS = 4
READY_S = 180


class BlackboxService(Contestant):
    target = "a Kafka topic"
    servers = ("Redis", "Kafka")
    # Its client needs none, but a request counts as scheduled when the service has stored it in Redis.
    needs_worker_to_schedule = True
    settings = (
        Setting("one service, 4 partitions, exactly once", "the defaults"),
        Setting(
            "`schedule` ends when all requests are in Redis",
            "Kafka has them earlier, but only then are they ready for delivery",
        ),
    )

    def __init__(self, site: Site, engine: str) -> None:
        self._site, self._engine = site, engine
        self.name = f"blackbox, {engine} engine"
        self._field: Field | None = None
        self._target: Target | None = None
        self._pod: Pod | None = None

    def install(self) -> str:
        if self._engine == "spark":
            try:
                return f"{version('blackbox')}, Spark {version('pyspark')}"
            except ModuleNotFoundError as error:
                raise NotMeasured("pyspark is not installed") from error
        return version("blackbox")

    def clear(self) -> None:
        self.close()
        # New topics each time, with names of their own. Redis is emptied.
        field = self._field = Field(self._site.stack, self._engine, PARTITIONS, self._site.folder)
        self._target = Target(self._site.stack, field.target, PARTITIONS)
        self._pod = field.pod(f"{field.name}-0")

    def start(self) -> None:
        assert self._pod is not None
        self._pod.start()
        deadline = time.monotonic() + READY_S
        while not self._pod.is_ready():
            if time.monotonic() > deadline:
                raise NotMeasured(f"the service was not ready within {READY_S} s")
            time.sleep(0.1)

    def schedule(self, plan: Plan) -> Scheduled:
        field = self._field
        assert field is not None
        began, before = time.monotonic(), field.pending()
        found = write(self._site.stack, field.requests, plan, self._encode)
        if plan.per_s or plan.due_ms < time.time() * 1000:
            return found
        due_s = plan.due_ms / 1000
        wait("stored", lambda: field.pending() >= before + plan.count or time.time() > due_s)
        return Scheduled(time.monotonic() - began, found.cpu_s)

    def _encode(self, number: int, message: str, due_ms: int) -> Record:
        assert self._field is not None
        request = {"topic": self._field.target, "message": message, "at": due_ms}
        return Record(None, json.dumps(request).encode(), HEADERS)

    def executed(self) -> int:
        assert self._target is not None
        return sum(self._target.ends().values())

    def executions(self) -> Executions:
        assert self._target is not None
        return self._target.executions()

    def workers(self) -> list[psutil.Process]:
        assert self._pod is not None
        return [] if self._pod.pid is None else [psutil.Process(self._pod.pid)]

    def end(self, how: signal.Signals) -> None:
        if self._pod is None:
            return
        try:
            if how == signal.SIGTERM:
                self._pod.stop()
        finally:
            self._pod.crash()

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
        self._target = self._field = self._pod = None

    def kafka_bytes(self) -> int:
        assert self._field is not None
        return topic_bytes(self._site, self._field.requests)


def topic_bytes(site: Site, topic: str) -> int:
    """The size of a topic's segments."""
    segments = (site.stack.kafka.folder / "data").glob(f"{topic}-[0-9]*/*.log")
    return sum(path.stat().st_size for path in segments)
