from __future__ import annotations

import socket
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from blackbox.embedded import EmbeddedError, EmbeddedKafka
from blackbox.embedded import embedded_server as embedded_server
from blackbox.embedded.kafka import new_cluster_id
from blackbox.embedded.tcp_ports import free_port
from tests.embedded.processes import is_alive


def create_topic(server: EmbeddedKafka, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(10)


def produce_in_a_transaction(server: EmbeddedKafka, topic: str, value: bytes) -> None:
    producer = Producer(
        {"bootstrap.servers": server.bootstrap_servers, "transactional.id": "embedded-test"}
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(topic, value)
    producer.commit_transaction(20)


def consumed_values(server: EmbeddedKafka, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer(
        {
            "bootstrap.servers": server.bootstrap_servers,
            "group.id": "embedded-test",
        }
    )
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    try:
        return [message.value() for message in consumer.consume(count, timeout=20)]
    finally:
        consumer.close()


@pytest.mark.proof
def test_a_restarted_or_killed_kafka_has_its_data_and_its_port(kafka: EmbeddedKafka) -> None:
    kafka.start()
    first_pid, address = kafka.pid, kafka.bootstrap_servers
    create_topic(kafka, "kept")
    produce_in_a_transaction(kafka, "kept", b"before stop")
    kafka.stop()
    assert not is_alive(first_pid)
    kafka.start()
    second_pid = kafka.pid
    produce_in_a_transaction(kafka, "kept", b"before kill")
    kafka.kill()
    assert not is_alive(second_pid)
    kafka.start()
    assert kafka.bootstrap_servers == address
    assert consumed_values(kafka, "kept", 2) == [b"before stop", b"before kill"]


@pytest.mark.proof
def test_a_port_occupied_in_the_meantime_is_replaced(
    kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupier:
        taken = occupier.getsockname()[1]
        ports = [taken]
        monkeypatch.setattr(
            embedded_server, "free_port", lambda: ports.pop() if ports else free_port()
        )
        kafka.start()
        assert kafka.bootstrap_servers != f"127.0.0.1:{taken}"
        assert not ports


def test_an_invalid_setting_raises_an_error_with_the_servers_message(
    kafka_is_there: None, tmp_path: Path
) -> None:
    server = EmbeddedKafka(tmp_path, settings={"num.io.threads": "none"})
    with pytest.raises(EmbeddedError, match=r"num\.io\.threads"):
        server.start()


def test_without_java_one_line_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmbeddedError, match="Java 17 or newer is needed") as refusal:
        EmbeddedKafka(tmp_path).start()
    assert "\n" not in str(refusal.value)


def test_a_java_home_without_java_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(EmbeddedError, match=f"JAVA_HOME is {tmp_path}, but there is no"):
        EmbeddedKafka(tmp_path).start()


@pytest.mark.parametrize(("version", "feature"), [("1.8.0_402", "8"), ("11.0.22", "11")])
def test_an_old_java_is_refused_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, feature: str
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(EmbeddedError, match=rf"but {java} is version {feature};"):
        EmbeddedKafka(tmp_path).start()


def test_a_cluster_id_is_one_that_kafka_accepts() -> None:
    for _ in range(1000):
        cluster_id = new_cluster_id()
        assert len(cluster_id) == 22
        assert "-" not in cluster_id
