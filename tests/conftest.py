"""Servers and worlds that tests share: one real Kafka and one real Redis for the whole run."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from hypothesis import HealthCheck, settings

from blackbox.embedded import EmbeddedError, EmbeddedRedis, EmbeddedStack
from blackbox.embedded.redis import find_redis
from tests.support.alone import Alone
from tests.support.guarantees import NO_TOOL, GuaranteedTests
from tests.support.proof import ProofPage
from tests.support.world import AT_LENGTH, World

PROOF = bool(os.environ.get("BLACKBOX_TEST_PROOF")) or AT_LENGTH
"""Whether all tests run."""

# Without a deadline: the duration of an example depends on the machine, not on the product.
settings.register_profile(
    "patient",
    deadline=None,
    max_examples=200 if PROOF else 30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")

PROOF_PAGE = os.environ.get("BLACKBOX_TEST_PROOF_PAGE")
"""Where to write the page with the results, if at all."""

SHARES_BY_SESSION = Path("/proc/sys/kernel/sched_autogroup_enabled")
"""Whether Linux divides the processors between sessions first, and only then by the priorities of processes."""

LOG_TOLD = 4000
"""How much of a service's log to show, in characters."""


def pytest_configure(config: pytest.Config) -> None:
    # Then a writer of the lowest priority takes the processor of the broker, which has a session of
    # its own. Linux does not do this in a container, which has a control group.
    if AT_LENGTH and SHARES_BY_SESSION.exists() and SHARES_BY_SESSION.read_text() != "0\n":
        raise pytest.UsageError(
            "lateness at length is measured without automatic groups: "
            "sysctl -w kernel.sched_autogroup_enabled=0"
        )
    if not hasattr(config, "workerinput"):  # one process sees the reports of all
        config.pluginmanager.register(GuaranteedTests(is_proof=PROOF))
        if PROOF_PAGE:
            config.pluginmanager.register(ProofPage(Path(PROOF_PAGE)))
    cache = getattr(config, "cache", None)  # without the plugin for it, one worker runs all
    if cache is not None:
        config.pluginmanager.register(Alone(cache.mkdir("alone")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `proof` run only in `make proof`, and those marked `at_length` only at length.

    Those that run alone come first: later, all workers would wait until a long test of another one has ended.
    """
    left_out = set() if AT_LENGTH else {"at_length"} if PROOF else {"at_length", "proof"}
    long = [item for item in items if left_out & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]
    items.sort(key=lambda item: item.get_closest_marker("alone") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failing test of services shows their logs."""
    report = yield
    worlds = [argument for argument in item.funcargs.values() if isinstance(argument, World)]
    for world in worlds if report.failed else ():
        for log in sorted(world.folder.glob("service-*.log")):
            report.sections.append((log.name, log.read_text()[-LOG_TOLD:]))
    return report


def missing(reason: str) -> NoReturn:
    """A server that cannot be started skips on a laptop and fails in CI."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def missing_tool(reason: str) -> NoReturn:
    """The same for a tool that the README does not require; a guarantee that needs it is reported as not shown."""
    missing(f"{NO_TOOL}{reason}")


@pytest.fixture(scope="session")
def redis_7() -> str:
    """The server of a Redis of 7.0 or newer; the bundled one is older, and has no TLS."""
    try:
        server, version = find_redis()
    except EmbeddedError as error:
        missing(str(error))
    if version < (7, 0):
        missing_tool(f"{server} is older than 7.0; install redis-server 7.0 or newer")
    return server


@pytest.fixture(scope="session")
def stack() -> Iterator[EmbeddedStack]:
    """Kafka and Redis, started once."""
    embedded = EmbeddedStack()
    try:
        embedded.start()
    except EmbeddedError as error:
        missing(str(error))
    yield embedded
    # a graceful stop of Kafka takes ten seconds after so many topics
    embedded.kafka.kill()
    embedded.redis.kill()
    embedded.stop()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """Which engine the services of the test's world run; `both_engines` runs a test on each."""
    return getattr(request, "param", "process")


@pytest.fixture
def world(stack: EmbeddedStack, tmp_path: Path, engine: str) -> Iterator[World]:
    """Topics of the test's own on the shared servers, and services that end with the test."""
    with World(stack.kafka, stack.redis, tmp_path, engine) as world:
        yield world


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A Redis that the test may empty, cut or kill."""
    redis = EmbeddedRedis(tmp_path / "redis")
    redis.start()
    yield redis
    redis.stop()


@pytest.fixture
def fragile_world(
    stack: EmbeddedStack, own_redis: EmbeddedRedis, tmp_path: Path, engine: str
) -> Iterator[World]:
    """A world with its own Redis."""
    with World(stack.kafka, own_redis, tmp_path, engine) as world:
        yield world


@pytest.fixture
def quick_cleaner(stack: EmbeddedStack) -> Iterator[None]:
    """A broker that compacts continuously, instead of every 15 s."""
    admin = AdminClient({"bootstrap.servers": stack.kafka.bootstrap_servers})
    [broker] = admin.list_topics(timeout=10).brokers

    def change(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry("log.cleaner.backoff.ms", "50", incremental_operation=operation)
        whole = ConfigResource(ResourceType.BROKER, str(broker), incremental_configs=[entry])
        for future in admin.incremental_alter_configs([whole]).values():
            future.result(30)

    change(AlterConfigOpType.SET)
    yield
    change(AlterConfigOpType.DELETE)
