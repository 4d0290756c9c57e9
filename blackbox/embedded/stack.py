"""Kafka and Redis together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex, token_urlsafe
from typing import Self

from blackbox.embedded import orphan_guard
from blackbox.embedded.kafka import EmbeddedKafka
from blackbox.embedded.redis import EmbeddedRedis

# A password for Kafka would be needed in each client of the demo, the tutorial and the tests.
OPEN_KAFKA = (
    "every user of this machine can read, write and delete the topics of this Kafka: it is for "
    "demos and tests"
)
"""A warning for everyone who starts this Kafka."""


class EmbeddedStack:
    """Kafka and Redis in `folder`, from entering the context to leaving it.

    A given folder is kept. Without one, a temporary folder is used and removed at the end, even
    when this process is killed.
    """

    def __init__(
        self, folder: Path | None = None, *, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self._temporary = folder is None
        # Not created here: a caller that is interrupted before it has the stack could not remove it.
        self.folder = (folder or Path(tempfile.gettempdir(), f"blackbox-{token_hex(8)}")).resolve()
        disposable = self.folder if self._temporary else None
        self.kafka = EmbeddedKafka(self.folder / "kafka", disposable=disposable, progress=progress)
        # Other users of this machine reach the loopback interface, and could have Redis write files.
        password = {"requirepass": token_urlsafe(24)}
        self.redis = EmbeddedRedis(
            self.folder / "redis", settings=password, disposable=disposable, progress=progress
        )

    @property
    def bootstrap_servers(self) -> str:
        return self.kafka.bootstrap_servers

    @property
    def redis_url(self) -> str:
        return self.redis.url

    def start(self) -> None:
        """Start both; if one of them fails, neither is left running."""
        try:
            if self._temporary:
                self.folder.mkdir(mode=0o700, exist_ok=True)
            # Kafka takes longer, and only the main thread notices Ctrl-C.
            with ThreadPoolExecutor(1) as pool:
                redis = pool.submit(self.redis.start)
                self.kafka.start()
                redis.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            redis = pool.submit(self.redis.stop)
            self.kafka.stop()
            redis.result()
        if self._temporary:
            orphan_guard.remove(str(self.folder))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
