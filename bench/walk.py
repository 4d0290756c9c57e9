"""The cost of a walk over all pending requests for the load at the same time.

Far requests stay pending in Redis, behind the same number of ended requests, which a walk has to pass. In
each round, the service stores and delivers a backlog, and then an even load. A walk for the low-water mark
runs in every second round. If the machine allows it, Redis never waits for a processor.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import redis
import typer

from bench.engines import ENGINES
from bench.field import PATIENCE_S, Field, cpu_s, lateness_ms, wait
from bench.ground import MESSAGE_BYTES
from bench.rebuild import OPENED, keep_for_ever
from bench.report import Progress, markdown, say
from blackbox.embedded import EmbeddedStack
from blackbox.engine.caretaker import FIRST_WALK_AFTER_S, WALKED_SHARE

FAR_S = 200 * 86_400
FAR_BYTES = 50
# A cancel without a request: it has ended when it is read.
NOTHING = b'{"id":"nobody","cancel":true}'

# Requests that become visible in Kafka at once. At most two parts wait there for intake.
PIECE = 500_000

MEMORY = "16gb"
NEVER_S = 86_400
AS_OLD_S = 10
"""The time from the start of the first walk to the measurement."""

STEADY_PER_S = 1000
SLOW_US, TOO_SLOW_US = 1000, 5000
LOG_LENGTH = 100_000
# The Redis commands of walks. Other code rarely uses the first.
OF_WALKS = ("zmscore", "zscan")

VOID = re.compile(r"no new low-water mark")


@dataclass(slots=True)
class Round:
    """The measurements of one service, from its start to its end."""

    ready_s: float = 0.0
    open_s: float = 0.0
    rate: float = 0.0
    cpu_us: float = 0.0
    late_ms: list[int] = field(default_factory=list)
    seconds: int = 0
    walked: int = 0
    slices: int = 0
    asked: dict[str, tuple[int, float]] = field(default_factory=dict)
    took_s: float = 0.0
    slow: dict[str, list[int]] = field(default_factory=dict)
    void: int = 0

    @property
    def p99_ms(self) -> int:
        return self.late_ms[int(len(self.late_ms) * 0.99)]

    @property
    def redis_share(self) -> float:
        """The share of time that Redis spent on the commands of walks."""
        return sum(calls * us for calls, us in self.asked.values()) / 1e6 / self.took_s

    def a_second(self, command: str) -> float:
        return self.asked[command][0] / self.took_s


class Ground(Field):
    """A request topic whose far requests stay pending, and the load beside them."""

    def __init__(self, stack: EmbeddedStack, partitions: int) -> None:
        super().__init__(stack, "walk", partitions, stack.folder)
        self.client: Any = redis.Redis.from_url(stack.redis_url, socket_timeout=PATIENCE_S)
        self.far = 0
        self._written = [0] * partitions
        # Without a cold tier, because a walk reads far requests in Redis.
        self.environment["BLACKBOX_HOT_HORIZON_S"] = "0"
        keep_for_ever(self, stack.bootstrap_servers)
        # A rewrite of the append-only file would happen in some rounds, and costs more than a walk.
        self.client.config_set("auto-aof-rewrite-percentage", 0)
        self.client.config_set("maxmemory", MEMORY)
        self.client.config_set("slowlog-log-slower-than", SLOW_US)
        self.client.config_set("slowlog-max-len", LOG_LENGTH)
        # A call's time is then that of the call, not the wait for a processor that others keep busy.
        with suppress(PermissionError):
            pid = int(self.client.info("server")["process_id"])
            os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(1))

    def fill(self, ended: int, pending: int) -> None:
        """Let a service read this number of requests that end at once, then this number of far ones."""
        self.use("process", NEVER_S)
        later = self._value(FAR_BYTES, int(time.time() + FAR_S) * 1000)
        with self.service():
            self._feed("ended requests", ended, NOTHING)
            self._feed("far requests", pending, later)
            wait("stored", lambda: self.stored(pending))
        self.far = pending

    def _feed(self, what: str, count: int, value: bytes) -> None:
        progress, before = Progress(what, count), sum(self._positions())

        def has_read(so_many: int) -> bool:
            done = min(count, sum(self._positions()) - before)
            progress(done)
            return done >= so_many

        for first in range(0, count, PIECE):
            self.write_alike(min(PIECE, count - first), value)
            wait("read", lambda first=first: has_read(first))  # type: ignore[misc]
        wait("read", lambda: has_read(count))

    def lose_marks(self) -> None:
        # A walk starts at the last mark. Without a mark, it passes all ended requests.
        for partition in range(self.partitions):
            self.client.hdel(f"blackbox:{{{self.requests}-{partition}}}:state", "mark")

    def use(self, engine: str, interval_s: float) -> None:
        """Set the engine of later services, and the interval of their walks."""
        self.environment |= {
            "BLACKBOX_ENGINE": engine,
            "BLACKBOX_TRIM_INTERVAL_S": f"{interval_s:.0f}",
        }

    def drain(self, requests: int) -> float:
        """The rates of intake and delivery for this number of requests that are due at once."""
        due_ms, before = int(time.time() * 1000), self._positions()
        self.write_alike(requests, self._value(MESSAGE_BYTES, due_ms))
        began = time.monotonic()
        least = requests // self.partitions
        wait(
            "all delivered",
            lambda: (
                all(b - a >= least for a, b in zip(before, self._positions(), strict=True))
                and self.pending() == self.far
            ),
        )
        return requests / (time.monotonic() - began)

    def slices(self) -> int:
        # Each slice of a walk asks for one score, and once a shard is open nothing else does.
        found = self.client.info("commandstats").get("cmdstat_zscore", {})
        return int(found.get("calls", 0))

    def asked(self) -> dict[str, tuple[int, float]]:
        """The number of commands of walks, and their average time in µs."""
        stats = self.client.info("commandstats")
        found = {name: stats.get(f"cmdstat_{name}", {}) for name in OF_WALKS}
        return {
            n: (int(f.get("calls", 0)), float(f.get("usec_per_call", 0))) for n, f in found.items()
        }

    def slow(self) -> dict[str, list[int]]:
        """The slowest calls of Redis by command, in µs."""
        found: dict[str, list[int]] = defaultdict(list)
        for entry in self.client.slowlog_get(LOG_LENGTH):
            found[entry["command"].split(b" ")[0].decode().upper()].append(entry["duration"])
        return dict(found)

    def forget_statistics(self) -> None:
        self.client.config_resetstat()
        self.client.slowlog_reset()

    def _positions(self) -> list[int]:
        return [
            int(self.client.hget(f"blackbox:{{{self.requests}-{p}}}:state", "requests") or 0)
            for p in range(self.partitions)
        ]

    def _value(self, size: int, due_ms: int) -> bytes:
        return json.dumps({"topic": self.target, "message": "m" * size, "at": due_ms}).encode()


@contextmanager
def watched(ground: Ground, found: Round) -> Iterator[None]:
    """Count the seconds, and the seconds with a slice of a walk."""
    over = threading.Event()

    def look() -> None:
        before = 0
        while not over.wait(1.0):
            slices = ground.slices()
            found.seconds += 1
            found.walked += slices > before
            before = slices

    ground.forget_statistics()
    began, watcher = time.monotonic(), threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        found.took_s = time.monotonic() - began
        found.slices, found.asked = ground.slices(), ground.asked()
        found.slow = ground.slow()


def measure(ground: Ground, requests: int, seconds: int, *, is_walking: bool) -> Round:
    """Each round has its own service, because the interval of walks is set at its start."""
    ground.lose_marks()
    found, began = Round(), time.monotonic()
    with ground.service() as service:
        found.ready_s = time.monotonic() - began
        found.open_s = max(float(s) for s in OPENED.findall(ground.log.read_text()))
        # A warm-up, because the first batches of a new process are slower.
        ground.drain(requests // 4)
        if is_walking:
            ground.forget_statistics()
            wait("a walk is under way", lambda: ground.slices() > 0)
        # The other service idles for the same time, because an idle service is slower at first.
        time.sleep(max(0.0, began + FIRST_WALK_AFTER_S + AS_OLD_S - time.monotonic()))
        with watched(ground, found):
            before = cpu_s(service)
            found.rate = ground.drain(requests)
            found.cpu_us = (cpu_s(service) - before) / requests * 1e6
            found.late_ms = lateness_ms(ground, STEADY_PER_S, seconds, ground.far)
        found.void = len(VOID.findall(ground.log.read_text()))
    return found


def main(
    pending: Annotated[
        int, typer.Option(help="The number of far requests, all in Redis.")
    ] = 10_000_000,
    ended: Annotated[
        int, typer.Option(help="The number of ended requests before them.")
    ] = 10_000_000,
    engines: Annotated[list[str], typer.Option(help="The engines to measure.")] = list(ENGINES),  # noqa: B006
    interval: Annotated[
        float, typer.Option(help="BLACKBOX_TRIM_INTERVAL_S; a walk takes most of it.")
    ] = 900,
    requests: Annotated[int, typer.Option(help="Requests in the backlog of a round.")] = 500_000,
    seconds: Annotated[int, typer.Option(help="Seconds of the even load of a round.")] = 20,
    rounds: Annotated[
        int, typer.Option(help="Rounds with a walk, and the same number without.")
    ] = 5,
    partitions: Annotated[int, typer.Option(help="Partitions of the request topic.")] = 4,
) -> None:
    """Alternate between services that walk and services that do not."""
    with EmbeddedStack() as stack:
        ground = Ground(stack, partitions)
        ground.fill(ended, pending)
        memory = ground.client.info("memory")["used_memory_human"]
        print(f"{ground.pending():,} pending, {memory} of Redis\n", flush=True)
        for engine in engines:
            found: dict[bool, list[Round]] = {False: [], True: []}
            for number in range(rounds):
                # The order alternates, so that no kind is always measured first.
                for is_walking in (True, False) if number % 2 else (False, True):
                    ground.use(engine, interval if is_walking else NEVER_S)
                    one = measure(ground, requests, seconds, is_walking=is_walking)
                    found[is_walking].append(one)
                    say(_line(engine, number + 1, is_walking, one))
            print(_table(engine, interval, found[False], found[True]), flush=True)


def _line(engine: str, number: int, is_walking: bool, found: Round) -> str:
    return (
        f"{engine} {number} {'with' if is_walking else 'without'} a walk: {found.rate:,.0f} /s, "
        f"{found.cpu_us:.1f} µs, p99 {found.p99_ms} ms, {found.slices:,} slices, "
        f"walk seen in {found.walked} of {found.seconds} s, ready after {found.ready_s:.1f} s"
    )


def _table(engine: str, interval_s: float, without: list[Round], walking: list[Round]) -> str:
    """Medians. Ratios compare the services of each round: their median and their range."""
    figures = {
        "taken in and delivered, /s": ("rate", ",.0f"),
        "processor of the service, µs a message": ("cpu_us", ".1f"),
        f"lateness at {STEADY_PER_S:,} /s, p99 ms": ("p99_ms", ",.0f"),
    }
    rows: list[list[str]] = []
    for name, (attribute, form) in figures.items():
        a, b = ([float(getattr(one, attribute)) for one in those] for those in (without, walking))
        ratios = sorted(there / here for here, there in zip(a, b, strict=True))
        ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        rows.append([name, f"{statistics.median(a):{form}}", f"{statistics.median(b):{form}}", ratio])  # fmt: skip
    shown: dict[str, Callable[[list[Round]], str]] = {
        "slices of a walk a second": lambda those: f"{sum(r.slices for r in those) / sum(r.took_s for r in those):.1f}",
        "ZMSCORE a second, µs each": lambda those: _asked(those, "zmscore"),
        "ZSCAN a second, µs each": lambda those: _asked(those, "zscan"),
        "Redis' time spent on both": lambda those: f"{statistics.median(r.redis_share for r in those):.2%}",
        "slowest ZMSCORE, ms": lambda those: _slowest(those, "ZMSCORE"),
        "slowest ZSCAN, ms": lambda those: _slowest(those, "ZSCAN"),
        "Redis calls over 5 ms": _too_slow,
        "seconds in which a walk was seen": lambda those: f"{sum(r.walked for r in those)} of {sum(r.seconds for r in those)}",
        "walks given up": lambda those: f"{sum(r.void for r in those)}",
        "open after s, at most": lambda those: f"{max(r.open_s for r in those):.2f}",
    }  # fmt: skip
    rows += [[name, show(without), show(walking), ""] for name, show in shown.items()]
    head = [
        f"{engine}, a walk in {interval_s * WALKED_SHARE:.0f} s",
        "without",
        "with a walk",
        "ratio",
    ]
    return markdown(head, rows) + "\n"


def _asked(rounds: list[Round], command: str) -> str:
    a_second = statistics.median(one.a_second(command) for one in rounds)
    return f"{a_second:.1f}, {statistics.median(one.asked[command][1] for one in rounds):.0f}"


def _slowest(rounds: list[Round], command: str) -> str:
    # Redis' slow log has single calls from a millisecond on, as configured above.
    slow = [us for one in rounds for us in one.slow.get(command, [])]
    return f"{max(slow) / 1000:.1f}" if slow else "below 1"


def _too_slow(rounds: list[Round]) -> str:
    found: dict[str, list[int]] = defaultdict(list)
    for one in rounds:
        for command, took_us in one.slow.items():
            found[command] += [us for us in took_us if us > TOO_SLOW_US]
    return (
        ", ".join(
            f"{name} {len(us)} (to {max(us) / 1000:.0f} ms)"
            for name, us in sorted(found.items())
            if us
        )
        or "none"
    )


if __name__ == "__main__":
    typer.run(main)
