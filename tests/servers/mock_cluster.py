"""Brokers that answer with errors a test chooses: librdkafka's own mock of a cluster.

For answers that real brokers give rarely, such as while a coordinator moves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka

PRODUCE, OFFSET_FETCH = 0, 9
"""The numbers of the requests in Kafka's protocol."""

_PRODUCER = 0


class MockCluster:
    """One broker with the topic `TB` of one partition."""

    def __init__(self, library: ctypes.CDLL, cluster: ctypes.c_void_p) -> None:
        self._library = library
        self._cluster = cluster
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        self.bootstrap_servers = library.rd_kafka_mock_cluster_bootstraps(cluster).decode()
        library.rd_kafka_mock_topic_create(cluster, b"TB", 1, 1)

    def answer(self, request: int, *errors: int) -> None:
        """The next requests of this number are answered with these errors, one each."""
        codes = (ctypes.c_int * len(errors))(*errors)
        push = self._library.rd_kafka_mock_push_request_errors_array
        push(self._cluster, ctypes.c_int16(request), ctypes.c_size_t(len(errors)), codes)

    def answer_after(self, delay_ms: int) -> None:
        """From now on, requests are carried out at once, and answered after this time."""
        self._library.rd_kafka_mock_broker_set_rtt(self._cluster, ctypes.c_int32(1), delay_ms)


@contextmanager
def mock_cluster() -> Iterator[MockCluster]:
    """In this process, for as long as the context lasts."""
    libraries = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    [path] = libraries.glob("librdkafka-*.so*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_conf_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    value = ctypes.create_string_buffer(512)
    library.rd_kafka_conf_set(conf, b"log_level", b"0", value, len(value))
    client = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, conf, value, len(value)))
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(client, 1))
    try:
        yield MockCluster(library, cluster)
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(client)
