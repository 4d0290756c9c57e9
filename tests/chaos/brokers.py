"""A Kafka cluster of three brokers. Each broker can be frozen or killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from confluent_kafka.admin import AdminClient, PartitionMetadata

from blackbox.embedded import EmbeddedKafka
from blackbox.embedded.kafka import SETTINGS, new_cluster_id
from blackbox.embedded.tcp_ports import HOST, free_port
from tests.support.world import until

COUNT = 3
TRANSACTIONS = "__transaction_state"
TRANSACTION_PARTITIONS = int(SETTINGS["transaction.state.log.num.partitions"])

REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "replica.lag.time.max.ms": "2000",
    "controlled.shutdown.enable": "false",
}


class Broker(EmbeddedKafka):
    """One of three brokers. Clients get the addresses of all brokers."""

    def __init__(
        self, number: int, cluster: Cluster, folder: Path, port: int, settings: dict[str, str]
    ) -> None:
        super().__init__(folder, port=port, settings=settings, cluster_id=cluster.id)
        self.number = number
        self.cluster = cluster

    @property
    def bootstrap_servers(self) -> str:
        return self.cluster.bootstrap_servers

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Cluster:
    """Three brokers that are also controllers. At least two must run."""

    def __init__(self, folder: Path) -> None:
        self.id = new_cluster_id()
        ports = [free_port() for _ in range(COUNT)]
        controllers = [free_port() for _ in range(COUNT)]
        self.bootstrap_servers = ",".join(f"{HOST}:{port}" for port in ports)
        voters = ",".join(f"{n}@{HOST}:{port}" for n, port in enumerate(controllers, 1))
        self.brokers = [
            Broker(
                number,
                self,
                folder / str(number),
                port,
                REPLICATED
                | {
                    "node.id": str(number),
                    "controller.quorum.voters": voters,
                    "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
                },
            )
            for number, (port, controller) in enumerate(zip(ports, controllers, strict=True), 1)
        ]

    def start(self) -> None:
        """Start the stopped brokers. No broker answers before two of them run."""
        with ThreadPoolExecutor(COUNT) as pool:
            list(pool.map(Broker.start, self.brokers))

    def kill(self) -> None:
        for broker in self.brokers:
            broker.kill()

    def thaw(self) -> None:
        for broker in self.brokers:
            broker.thaw()

    def coordinator_of(self, transactional_id: str) -> Broker:
        leader = self.transaction_log(transactional_id).leader
        return self.brokers[leader - 1]

    def transaction_log(self, transactional_id: str) -> PartitionMetadata:
        """The partition with the status of its transactions. The leader of the partition is the coordinator."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        found = admin.list_topics(TRANSACTIONS, timeout=10).topics[TRANSACTIONS]
        return found.partitions[java_hash(transactional_id) % TRANSACTION_PARTITIONS]

    def next_coordinator(self, transactional_id: str, after: Broker) -> Broker:
        """Wait until another broker is elected."""

        def elected() -> Broker | None:
            leader = self.transaction_log(transactional_id).leader
            return self.brokers[leader - 1] if leader not in (-1, after.number) else None

        return until("another coordinator is elected", elected)


def java_hash(text: str) -> int:
    """Java's `String.hashCode()` without its sign, as Kafka uses it."""
    found = 0
    for character in text:
        found = (31 * found + ord(character)) & 0xFFFFFFFF
    return found & 0x7FFFFFFF
