"""A Kafka of two brokers: one that has all topics, and one whose partitions may have no leader, or not answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from blackbox.embedded import EmbeddedError, EmbeddedKafka
from blackbox.embedded.kafka import new_cluster_id
from blackbox.embedded.tcp_ports import HOST, free_port
from tests.support.world import World, until

WITH_RIGHTS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
    "broker.session.timeout.ms": "9000",  # the default: a hanging broker keeps its partitions for so long
}


class TwoBrokers:
    """One broker with all topics, and a second one for partitions with faults."""

    def __init__(self, folder: Path, behind: Callable[[int], int] = lambda port: port) -> None:
        """`behind` returns the port through which clients reach the second one."""
        cluster_id, controller = new_cluster_id(), free_port()
        voters = {"controller.quorum.voters": f"1@{HOST}:{controller}"}
        port, other_port = free_port(), free_port()
        listeners = f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}"
        first = WITH_RIGHTS | voters | {"listeners": listeners}
        self.first = EmbeddedKafka(
            folder / "first", port=port, settings=first, cluster_id=cluster_id
        )
        second = WITH_RIGHTS | voters | {"node.id": "2", "process.roles": "broker"}
        second["listeners"] = f"PLAINTEXT://{HOST}:{other_port}"
        second["advertised.listeners"] = f"PLAINTEXT://{HOST}:{behind(other_port)}"
        self.second = EmbeddedKafka(
            folder / "second", port=other_port, settings=second, cluster_id=cluster_id
        )
        self.is_frozen = False
        self._has_second = False

    def start(self, *, both: bool = True) -> None:
        self.first.start()
        servers = {"bootstrap.servers": self.first.bootstrap_servers}
        producer = Producer(servers | {"transactional.id": "first"})
        producer.init_transactions(30)  # so that Kafka's own topics exist
        consumer = Consumer(servers | {"group.id": "first"})

        def has_offsets() -> bool:
            with suppress(KafkaException):
                return bool(consumer.committed([TopicPartition("any", 0)], timeout=5))
            return False

        until("Kafka keeps offsets", has_offsets)
        consumer.close()
        self._has_second = both
        self.mend()

    def freeze(self) -> None:
        os.kill(self.second.pid, signal.SIGSTOP)
        self.is_frozen = True

    def mend(self) -> None:
        if self.is_frozen:
            os.kill(self.second.pid, signal.SIGCONT)
            self.is_frozen = False
        with suppress(EmbeddedError):  # it is running
            if self._has_second:
                self.second.start()

    def stop(self) -> None:
        self.mend()
        self.second.stop()
        self.first.stop()


class PlacedWorld(World):
    """Its topics are on the first broker, unless a test places them elsewhere."""

    def create(self, *topics: NewTopic) -> None:
        super().create(
            *(
                NewTopic(
                    one.topic,
                    one.num_partitions,
                    replica_assignment=one.replica_assignment or [[1]] * one.num_partitions,
                    config=one.config or {},
                )
                for one in topics
            )
        )
