"""Processor time by process, and a description of the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import psutil
import redis

from bench.field import cpu_s
from blackbox.embedded import EmbeddedStack
from blackbox.embedded.jars import KAFKA_VERSION


class Clock:
    """Processor seconds of the workers, and of the servers that they use, since its creation."""

    def __init__(
        self, stack: EmbeddedStack, workers: list[psutil.Process], servers: Sequence[str]
    ) -> None:
        pids = {"Kafka": stack.kafka.pid, "Redis": stack.redis.pid}
        self._servers = {name: psutil.Process(pids[name]) for name in servers}
        self._workers = workers
        self._before = self._now()

    def read(self) -> dict[str, float]:
        return {name: seconds - self._before[name] for name, seconds in self._now().items()}

    def _now(self) -> dict[str, float]:
        found = {"workers": sum(cpu_s(one) for one in self._workers)}
        return found | {name: cpu_s(one) for name, one in self._servers.items()}


def machine(stack: EmbeddedStack) -> dict[str, str]:
    """The machine and the versions, on which the figures depend."""
    found = redis.Redis.from_url(stack.redis_url).info("server")
    memory_gb = psutil.virtual_memory().total / 2**30
    return {
        "processor": f"{os.cpu_count()} cores, {_processor()}",
        "memory": f"{memory_gb:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "Kafka": f"{KAFKA_VERSION}, one broker",
        "Redis": f"{found['redis_version']}, append-only file, fsync each second",
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
