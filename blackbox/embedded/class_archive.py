"""`python -m blackbox.embedded.class_archive`: archives Kafka's classes, beside its jars, for faster starts."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from blackbox.embedded.jars import kafka_jars
from blackbox.embedded.java import find_java
from blackbox.embedded.kafka import EmbeddedKafka
from blackbox.support.class_archive import making

LEAVES_WITHIN_S = 120.0


def make() -> None:
    """Run a broker, and archive the classes that it loads. Takes about 10 s and 50 MB."""
    java = find_java()
    with making(kafka_jars(java, print), java) as flags, TemporaryDirectory() as folder:
        kafka = EmbeddedKafka(Path(folder, "kafka"), java_flags=flags)
        kafka.start()
        kafka.stop(LEAVES_WITHIN_S)


if __name__ == "__main__":
    make()
