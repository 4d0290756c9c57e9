"""A single-node Kafka (KRaft) on the loopback interface."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from blackbox.embedded.errors import EmbeddedError
from blackbox.embedded.jars import kafka_jars
from blackbox.embedded.java import find_java
from blackbox.embedded.ports import HOST, free_port, is_listening, says_port_taken
from blackbox.embedded.process import GuardedProcess, ServerDiedError, lock_folder

START_DEADLINE_S = 60.0
STOP_GRACE_S = 10.0
START_ATTEMPTS = 5

# Measured on two cores: the serial collector with C1 alone starts in 1.5 s (G1 with C2: 1.9 s) and
# takes 217 k/s in transactions of 1,000 within its first seconds (164 k/s), 414 k/s in 5,000.
JVM_FLAGS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",
)

SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # The default of 128 MB is allocated at the start.
    "log.cleaner.dedupe.buffer.size": str(32 * 1024 * 1024),
    # A broker that was killed is let in again only when its old session has ended (default 9 s).
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
}

LOGGING = """<Configuration status="ERROR">
  <Appenders>
    <Console name="out"><PatternLayout pattern="%d %p %m (%c)%n%rEx{3}"/></Console>
  </Appenders>
  <Loggers><Root level="WARN"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
"""


class EmbeddedKafka:
    """One Kafka broker and controller whose data live in `folder`.

    Without `port` a free one is taken at the first start; it then stays, also over `kill()`.
    `settings` are lines of server.properties and win over the defaults; brokers of one cluster are
    given the same `cluster_id`. `users` (name -> password) can log in with SCRAM-SHA-512 where
    `settings` ask for that; `client` are settings of librdkafka by which the start can ask whether
    the broker answers. `disposable` names a folder to be removed should this process die without
    `stop()`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        cluster_id: str | None = None,
        users: Mapping[str, str] | None = None,
        client: Mapping[str, str] | None = None,
        disposable: Path | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._folder = folder.resolve()
        self._port = port
        self._settings = dict(settings or {})
        self._cluster_id = cluster_id
        self._users = dict(users or {})
        self._client = dict(client or {})
        self._disposable = disposable
        self._progress = progress or (lambda _: None)
        self._process: GuardedProcess | None = None

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def log(self) -> Path:
        """What the broker logs, warnings and worse."""
        return self._folder / "kafka.log"

    @property
    def bootstrap_servers(self) -> str:
        """`host:port`; known once `start()` has returned, and the same after a restart."""
        if self._port is None:
            raise EmbeddedError("the embedded Kafka has no port yet; call start() first")
        return f"{HOST}:{self._port}"

    @property
    def pid(self) -> int:
        """The pid of the java process."""
        if self._process is None:
            raise EmbeddedError("the embedded Kafka does not run; call start() first")
        return self._process.pid

    def start(self) -> None:
        """Return when the broker answers (2-3 s; 4 s after a kill); does nothing if it runs.

        EmbeddedError: no Java, no jars, the folder is in use, or the broker ended or is silent.
        """
        if self._process is not None and self._process.is_running:
            return
        java = find_java()
        jars = kafka_jars(java, self._progress)
        (self._folder / "tmp").mkdir(parents=True, exist_ok=True)
        lock = lock_folder(self._folder)
        try:
            self._start(java, jars, lock)
        finally:
            os.close(lock)

    def stop(self) -> None:
        """Graceful, killed after 10 s; does nothing if it does not run."""
        if self._process is not None:
            self._process.stop(STOP_GRACE_S)
            self._process = None

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _start(self, java: str, jars: Path, lock: int) -> None:
        self._progress(f"starting Kafka in {self._folder}")
        for attempt in range(1, START_ATTEMPTS + 1):
            port = self._port or free_port()
            self._write_configuration(port)
            cluster_id = self._format(java, jars)
            process = self._spawn(java, jars, lock)
            try:
                process.wait_until(
                    partial(answers, port, cluster_id, self._client),
                    name="the embedded Kafka",
                    deadline_s=START_DEADLINE_S,
                )
            except ServerDiedError as error:
                if not says_port_taken(error.log) or attempt == START_ATTEMPTS:
                    raise
                continue
            self._port, self._process = port, process
            return

    def _java(self, java: str, jars: Path) -> list[str]:
        logging = self._folder / "log4j2.xml"
        return [
            *(java, *JVM_FLAGS, f"-Dlog4j2.configurationFile={logging}"),
            *(f"-Djava.io.tmpdir={self._folder / 'tmp'}", "-cp", f"{jars}/*"),
        ]

    def _spawn(self, java: str, jars: Path, lock: int) -> GuardedProcess:
        command = [*self._java(java, jars), "kafka.Kafka", str(self._properties)]
        return GuardedProcess(command, log=self.log, disposable=self._disposable, lock=lock)

    @property
    def _properties(self) -> Path:
        return self._folder / "server.properties"

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _write_configuration(self, port: int) -> None:
        controller = free_port()
        settings = {
            **SETTINGS,
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
            "log.dirs": str(self._data),
            **self._settings,
        }
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self._properties.write_text("".join(lines))
        (self._folder / "log4j2.xml").write_text(LOGGING)

    def _format(self, java: str, jars: Path) -> str:
        """Format the data folder unless that was once completed; the cluster id."""
        marker = self._folder / "cluster-id"
        if marker.exists() and marker.read_text():
            return marker.read_text()
        shutil.rmtree(self._data, ignore_errors=True)
        cluster_id = self._cluster_id or new_cluster_id()
        storage_tool = [*self._java(java, jars), "kafka.tools.StorageTool", "format"]
        scram = [f"SCRAM-SHA-512=[name={n},password={p}]" for n, p in self._users.items()]
        users = [part for each in scram for part in ("--add-scram", each)]
        done = subprocess.run(
            [*storage_tool, "-t", cluster_id, "-c", str(self._properties), *users],
            capture_output=True,
            text=True,
            timeout=START_DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip()
            raise EmbeddedError(f"cannot format {self._data} for Kafka; StorageTool said:\n{said}")
        marker.write_text(cluster_id)
        return cluster_id


def new_cluster_id() -> str:
    """A random cluster id as Kafka writes them: never starts with a dash."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "_")


def answers(port: int, cluster_id: str, client: Mapping[str, str]) -> bool:
    """Whether the broker of this very cluster answers on `port`."""
    if not is_listening(port):
        return False
    admin = AdminClient({"bootstrap.servers": f"{HOST}:{port}", "log_level": 0, **client})
    try:
        return bool(admin.list_topics(timeout=5).cluster_id == cluster_id)
    except KafkaException:
        return False
