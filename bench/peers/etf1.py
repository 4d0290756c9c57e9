"""kafka-message-scheduler of etf1, a Go program that needs only Kafka. The bench does not build it."""

from __future__ import annotations

import os
import re
import signal
import uuid
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from bench.field import wait
from bench.peers.blackbox_service import topic_bytes
from bench.peers.contestant import (
    Contestant,
    NotMeasured,
    Plan,
    Scheduled,
    Setting,
    Site,
    Workers,
)
from bench.peers.install import run
from bench.peers.kafka_topics import Record, Target, create, write
from bench.peers.results import Executions
from blackbox.embedded.tcp_ports import free_port

PARTITIONS = 4
# Schedules that were due while it was down are delivered if they are not older than this.
GRACE_S = 600


class Etf1(Contestant):
    name = "kafka-message-scheduler"
    target = "a Kafka topic"
    servers = ("Kafka",)
    recovery_s = 15.0
    settings = (
        Setting("one instance, a compacted topic of 4 partitions", "as its documentation has it"),
        Setting(f"SCHEDULE_GRACE_INTERVAL={GRACE_S}", "with 0, schedules that became due while it was down are dropped"),
        Setting("LOG_LEVEL=error", "by default it logs three lines for each message"),
        Setting("due times in whole seconds", "its format has no others"),
    )  # fmt: skip

    def __init__(self, site: Site, program: Path | None) -> None:
        self._site, self._program = site, program
        self._workers = Workers(site.folder / "etf1.log")
        self._run = ""
        self._target: Target | None = None

    def install(self) -> str:
        if self._program is None:
            raise NotMeasured(
                "no program was given; build its `cmd/kafka`, and name it with --etf1"
            )
        if not os.access(self._program, os.X_OK) or self._program.is_dir():
            raise NotMeasured("what --etf1 names is not a program")
        return _revision(self._program)

    def clear(self) -> None:
        self.close()
        self._run = f"etf1{uuid.uuid4().hex[:6]}"
        stack, appended = self._site.stack, {"message.timestamp.type": "LogAppendTime"}
        # Kafka's own timestamp of a schedule is not its due time, which is in a header.
        compacted = {"cleanup.policy": "compact", "retention.ms": "-1"}
        topics = {self._topic("in"): compacted, self._topic("history"): {}}
        create(stack, topics | {self._topic("out"): appended}, PARTITIONS)
        self._target = Target(stack, self._topic("out"), PARTITIONS)

    def _topic(self, name: str) -> str:
        return f"{self._run}.{name}"

    def start(self) -> None:
        port = free_port()
        variables = {
            "BOOTSTRAP_SERVERS": self._site.stack.bootstrap_servers,
            "SCHEDULES_TOPICS": self._topic("in"),
            "HISTORY_TOPIC": self._topic("history"),
            "GROUP_ID": self._run,
            "SERVER_ADDR": f"127.0.0.1:{port}",
            "METRICS_ADDR": f"127.0.0.1:{free_port()}",
            "SCHEDULE_GRACE_INTERVAL": str(GRACE_S),
            "LOG_LEVEL": "error",
        }
        command = [[str(self._program)]]
        self._workers.start(command, self._site.folder, dict(os.environ) | variables)
        wait("the scheduler is up", lambda: _answers(port))

    def schedule(self, plan: Plan) -> Scheduled:
        return write(self._site.stack, self._topic("in"), plan, self._encode)

    def _encode(self, number: int, message: str, due_ms: int) -> Record:
        due_s = -(-due_ms // 1000)
        key = f"{number}".encode()
        message = f"{message[:8]}{due_s * 1000:013d}{message[21:]}"
        headers: list[tuple[str, str | bytes | None]] = [
            ("scheduler-epoch", str(due_s)),
            ("scheduler-target-topic", self._topic("out")),
            ("scheduler-target-key", key),
        ]
        return Record(key, message.encode(), headers)

    def executed(self) -> int:
        assert self._target is not None
        return sum(self._target.ends().values())

    def executions(self) -> Executions:
        assert self._target is not None
        return self._target.executions()

    def workers(self) -> list[psutil.Process]:
        return self._workers.processes()

    def end(self, how: signal.Signals) -> None:
        self._workers.end(how)

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
            self._target = None

    def kafka_bytes(self) -> int:
        return topic_bytes(self._site, self._topic("in"))


def _revision(program: Path) -> str:
    """That of the checkout from which the program was built, if it is known."""
    try:
        found = re.search(
            r"vcs.revision=(\w{12})", run(["go", "version", "-m", str(program)], program.parent)
        )
    except NotMeasured:
        found = None
    return found.group(1) if found else "as built"


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/schedules", timeout=2):
            return True
    except (URLError, OSError):
        return False
