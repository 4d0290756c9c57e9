"""A record batch that brokers accept and the Kafka client cannot decompress."""

from __future__ import annotations

from confluent_kafka import KafkaError, Message, Producer

TOO_MANY_BYTES = 150_000_000
"""Of the batch when it is decompressed: the client takes 110 MB. Compressed it has a few kilobytes."""


def write_unreadable_batch(
    bootstrap_servers: str, topic: str, count: int, partition: int
) -> list[int]:
    """Write so many records in one batch; returns their offsets."""
    settings = {
        "bootstrap.servers": bootstrap_servers,
        "message.max.bytes": 1_000_000_000,
        "batch.size": 1_000_000_000,
        "queue.buffering.max.kbytes": 1_000_000,
        "compression.type": "zstd",
        "linger.ms": 60_000,
    }
    offsets: list[int] = []

    def written(error: KafkaError | None, message: Message) -> None:
        offset = message.offset()
        assert error is None, error
        assert offset is not None
        offsets.append(offset)

    producer = Producer(settings)
    for _ in range(count):
        value = bytes(TOO_MANY_BYTES // count)
        producer.produce(topic, value, partition=partition, on_delivery=written)
    assert producer.flush(60) == 0
    return offsets
