"""A single-node Kafka (KRaft) on the loopback interface."""

from __future__ import annotations

import base64
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from blackbox.embedded.embedded_server import START_DEADLINE_S, EmbeddedServer
from blackbox.embedded.guarded_process import EmbeddedError, GuardedProcess
from blackbox.embedded.jars import kafka_jars
from blackbox.embedded.java import find_java
from blackbox.embedded.tcp_ports import HOST, free_port, is_listening
from blackbox.support.class_archive import using

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
    # One broker cannot hold the three replicas that are the default of internal topics.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # By default, a first member waits three seconds for others.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # The default of 128 MB is allocated at the start.
    "log.cleaner.dedupe.buffer.size": str(32 * 1024 * 1024),
    # A broker that was killed can rejoin only when its old session has ended (default 9 s).
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


@dataclass(eq=False, repr=False)
class EmbeddedKafka(EmbeddedServer):
    """One Kafka broker and controller.

    `settings` are lines of server.properties; brokers of one cluster get the same `cluster_id`.
    `users` (name -> password) can log in with SCRAM-SHA-512 where `settings` ask for that; `client`
    are librdkafka settings with which `start` checks that the broker answers. `java_flags` replace the
    JVM flags that use an archive of classes.
    """

    NAME = "Kafka"

    _: KW_ONLY
    cluster_id: str | None = None
    users: Mapping[str, str] = field(default_factory=dict)
    client: Mapping[str, str] = field(default_factory=dict)
    java_flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._properties = self.folder / "server.properties"
        self._data = self.folder / "data"
        # A command without its last part, the class that it runs.
        self._java: list[str] = []

    @property
    def bootstrap_servers(self) -> str:
        return self.address

    def _launch(self, port: int, lock: int) -> tuple[GuardedProcess, Callable[[], bool]]:
        self._write_configuration(port)
        cluster_id = self._format()
        command = [*self._java, "kafka.Kafka", str(self._properties)]
        process = GuardedProcess(command, log=self.log, disposable=self.disposable, lock=lock)
        return process, partial(answers, port, cluster_id, self.client)

    def _prepare(self) -> None:
        java = find_java()
        jars = kafka_jars(java, self.progress)
        logging, temporary = self.folder / "log4j2.xml", self.folder / "tmp"
        logging.write_text(LOGGING)
        temporary.mkdir(exist_ok=True)
        properties = (f"-Dlog4j2.configurationFile={logging}", f"-Djava.io.tmpdir={temporary}")
        flags = (*JVM_FLAGS, *(self.java_flags or using(jars)), *properties)
        self._java = [java, *flags, "-cp", f"{jars}/*"]

    def _write_configuration(self, port: int) -> None:
        controller = free_port()
        settings = {
            **SETTINGS,
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
            "log.dirs": str(self._data),
            **self.settings,
        }
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self._properties.write_text("".join(lines))

    def _format(self) -> str:
        """Format the data folder, unless that was completed before; returns the cluster id."""
        marker = self.folder / "cluster-id"
        if marker.exists() and marker.read_text():
            return marker.read_text()
        shutil.rmtree(self._data, ignore_errors=True)
        cluster_id = self.cluster_id or new_cluster_id()
        storage_tool = [*self._java, "kafka.tools.StorageTool", "format"]
        scram = [f"SCRAM-SHA-512=[name={n},password={p}]" for n, p in self.users.items()]
        users = [part for each in scram for part in ("--add-scram", each)]
        done = subprocess.run(
            [*storage_tool, "-t", cluster_id, "-c", str(self._properties), *users],
            capture_output=True,
            text=True,
            timeout=START_DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            raise EmbeddedError(
                f"cannot format {self._data} for Kafka; StorageTool's output:\n"
                f"{(done.stdout + done.stderr).strip()}"
            )
        # Last: a folder whose formatting was interrupted has no marker, and is formatted again.
        marker.write_text(cluster_id)
        return cluster_id


def new_cluster_id() -> str:
    """A random cluster id in Kafka's form."""
    # StorageTool would take an id with a leading dash for an option.
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "_")


def answers(port: int, cluster_id: str, client: Mapping[str, str]) -> bool:
    """Whether a broker of this cluster answers on `port`."""
    # While nothing listens, an admin client would wait for its whole timeout.
    if not is_listening(port):
        return False
    admin = AdminClient({"bootstrap.servers": f"{HOST}:{port}", "log_level": 0, **client})
    try:
        return bool(admin.list_topics(timeout=5).cluster_id == cluster_id)
    except KafkaException:
        return False
