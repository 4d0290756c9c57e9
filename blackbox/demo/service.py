"""The demo's service: a process of its own that is told nothing but its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.request import urlopen

from blackbox.embedded import EmbeddedStack
from blackbox.embedded.ports import HOST, free_port
from blackbox.embedded.process import GuardedProcess

START_DEADLINE_S = 120.0
STOP_GRACE_S = 6.0
RETRIES = 1
"""A target that does not exist becomes a dead letter after one more try, so that the demo ends."""


class DemoService:
    """`blackbox run` against the stack, from entering the context to leaving it."""

    def __init__(self, stack: EmbeddedStack, *, engine: str) -> None:
        self._port = free_port()
        self.log: Path = stack.folder / "service.log"
        self._process = GuardedProcess(
            [
                "env",
                *(argument for name in _inherited() for argument in ("-u", name)),
                *(f"{name}={value}" for name, value in self._environment(stack, engine).items()),
                *(sys.executable, "-m", "blackbox", "run"),
            ],
            log=self.log,
        )

    @property
    def http(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    def wait_ready(self) -> None:
        """Until it owns its shards and all are open. Raises EmbeddedError, with the end of its log."""
        self._process.wait_until(
            self._is_ready, name="the blackbox service", deadline_s=START_DEADLINE_S
        )

    def tail(self) -> str:
        """The last lines it logged."""
        return self._process.tail()

    def stop(self) -> None:
        self._process.stop(STOP_GRACE_S)

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.http}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _environment(self, stack: EmbeddedStack, engine: str) -> dict[str, str]:
        return {
            "BLACKBOX_KAFKA_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
            "BLACKBOX_REDIS_URL": stack.redis_url,
            "BLACKBOX_ENGINE": engine,
            "BLACKBOX_RETRIES": str(RETRIES),
            "BLACKBOX_HTTP_PORT": str(self._port),
        }


def _inherited() -> list[str]:
    return [name for name in os.environ if name.startswith("BLACKBOX_")]
