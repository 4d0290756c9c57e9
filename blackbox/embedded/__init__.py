"""Real Kafka and real Redis on this host, for `--embedded`, the demo and the tests."""

from __future__ import annotations

from blackbox.embedded.guarded_process import EmbeddedError
from blackbox.embedded.kafka import EmbeddedKafka
from blackbox.embedded.redis import EmbeddedRedis
from blackbox.embedded.stack import OPEN_KAFKA, EmbeddedStack

__all__ = ["OPEN_KAFKA", "EmbeddedError", "EmbeddedKafka", "EmbeddedRedis", "EmbeddedStack"]
