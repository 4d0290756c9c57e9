"""A caller that floods partition 0 of a topic: a process that takes only the processor time left over by all others."""

from __future__ import annotations

import os
import sys

from confluent_kafka import Producer

LOWEST = 19
MOST_UNSENT = 2000


def main(bootstrap_servers: str, topic: str, records: str) -> None:
    """Write standard input so many times."""
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    value = sys.stdin.buffer.read()
    settings = {"bootstrap.servers": bootstrap_servers, "compression.type": "lz4"}
    producer = Producer(settings | {"linger.ms": 20, "enable.idempotence": True})
    for _ in range(int(records)):
        while len(producer) > MOST_UNSENT:
            producer.poll(0.01)
        headers: list[tuple[str, str | bytes | None]] = [("CALLER_SERVICE", b"flood")]
        producer.produce(topic, value, partition=0, headers=headers)
    assert producer.flush(60) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
