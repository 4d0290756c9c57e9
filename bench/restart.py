"""The time without deliveries when an owner crashes, is restarted, or is replaced.

Requests become due evenly in every partition. After each event, the bench measures the longest time without a
delivery in any partition.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from confluent_kafka import Consumer, TopicPartition

from bench.field import LONGEST_S, Field, Pod, wait
from bench.report import markdown, say
from blackbox.embedded import EmbeddedStack

PER_S = 200
# Between two events, so that requests become due evenly again.
CALM_S = LONGEST_S + 2

READ_S = 0.5


def crash_and_restart(pods: list[Pod]) -> None:
    pods[0].crash()
    pods[0].start()


def crash_beside_another(pods: list[Pod]) -> None:
    pods[0].crash()


def graceful_restart(pods: list[Pod]) -> None:
    pods[0].stop()
    pods[0].start()


def rolling_update(pods: list[Pod]) -> None:
    for pod in pods:
        pod.stop()
        pod.start()
        wait("the new one is ready", pod.is_ready)


EVENTS: dict[str, tuple[int, Callable[[list[Pod]], None]]] = {
    "crash, started again": (1, crash_and_restart),
    "crash, beside another": (2, crash_beside_another),
    "graceful restart": (1, graceful_restart),
    "rolling update of three": (3, rolling_update),
}
"""The number of services, and the event that happens to them."""


@contextmanager
def load(field: Field) -> Iterator[None]:
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            field.write_paced(PER_S, 1.0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


class Delivered:
    """The times of deliveries of each partition of the request topic, as a consumer of the target sees them."""

    def __init__(self, stack: EmbeddedStack, field: Field) -> None:
        servers = {"bootstrap.servers": stack.bootstrap_servers, "group.id": "bench"}
        self._consumer = Consumer(servers | {"isolation.level": "read_committed"})
        self._partitions = field.partitions
        ends = [TopicPartition(field.target, p, offset) for p, offset in field.ends().items()]
        self._consumer.assign(ends)

    def longest_gap_s(self, since_ms: int) -> float:
        """The longest time without a delivery in any partition, until now."""
        at: defaultdict[str, list[int]] = defaultdict(list)
        while messages := self._consumer.consume(10_000, READ_S):
            for message in messages:
                source = dict(message.headers() or [])["blackbox-source"]
                assert isinstance(source, bytes)
                at[source.decode().partition("@")[0]].append(message.timestamp()[1])
            # The load continues, so the read ends at messages that are delivered about now.
            # Every partition must deliver again: a gap that still lasts would not be counted.
            now_ms = time.time() * 1000
            if len(at) == self._partitions and all(
                times[-1] > now_ms - READ_S * 1000 for times in at.values()
            ):
                break
        assert len(at) == self._partitions, at.keys()
        gaps = [
            later - earlier
            for times in map(sorted, at.values())
            for earlier, later in pairwise(times)
            if later >= since_ms
        ]
        return max(gaps) / 1000

    def close(self) -> None:
        self._consumer.close()


def measure(
    stack: EmbeddedStack, engine: str, what: str, times: int, partitions: int, folder: Path
) -> list[float]:
    count, happen = EVENTS[what]
    field = Field(stack, engine, partitions, folder)
    found: list[float] = []
    with ExitStack() as ending:
        pods = [field.pod(f"{engine}-{number}") for number in range(count)]
        for pod in pods:
            ending.callback(pod.stop)
            pod.start()
        ending.enter_context(load(field))
        wait("all are ready", lambda: all(pod.is_ready() for pod in pods))
        delivered = Delivered(stack, field)
        ending.callback(delivered.close)
        for number in range(times):
            # The gap of an earlier event must not count for this one.
            wait("all are ready", lambda: all(pod.is_ready() for pod in pods))
            time.sleep(CALM_S)
            since_ms = int(time.time() * 1000)
            happen(pods)
            wait(
                "the others are ready",
                lambda: all(pod.is_ready() for pod in pods[what == BESIDE :]),
            )
            time.sleep(CALM_S)
            found.append(delivered.longest_gap_s(since_ms))
            say(f"{engine}, {what}, {number + 1} of {times}: {found[-1]:.2f} s")
            if what == BESIDE:
                pods[0].start()
    return found


BESIDE = "crash, beside another"


def main(
    engines: Annotated[list[str], typer.Option(help="The engines.")] = ["process", "spark"],  # noqa: B006
    events: Annotated[list[str], typer.Option(help="The events.")] = list(EVENTS),  # noqa: B006
    times: Annotated[int, typer.Option(help="The number of times for each event.")] = 20,
    partitions: Annotated[int, typer.Option(help="Partitions of the request topic.")] = 4,
) -> None:
    """Print the longest time without a delivery in some partition: median, least and most."""
    rows: list[list[str]] = []
    with EmbeddedStack() as stack:
        for engine in engines:
            for what in events:
                found = measure(stack, engine, what, times, partitions, stack.folder)
                figures = (statistics.median(found), min(found), max(found))
                rows.append([f"{engine}: {what}", *(f"{s:.2f}" for s in figures)])
    print(markdown(["longest gap, s", "median", "least", "most"], rows))


if __name__ == "__main__":
    typer.run(main)
