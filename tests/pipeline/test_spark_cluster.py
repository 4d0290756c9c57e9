"""The pipeline on a standalone cluster, whose workers share nothing with the driver but the network."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.servers.spark_cluster import Cluster, freeze_tree, kill_tree, python_without_blackbox
from tests.support.world import World, until

pytestmark = [pytest.mark.service, pytest.mark.fault, pytest.mark.timeout(400)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as cluster:
        yield cluster


def test_executors_have_no_blackbox_of_their_own(tmp_path: Path) -> None:
    python = python_without_blackbox(tmp_path / "python")
    tried = subprocess.run(
        [python, "-c", "import confluent_kafka, pyarrow, pyspark, redis\nimport blackbox"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "No module named 'blackbox'" in tried.stderr


@pytest.mark.proof
@pytest.mark.parametrize("engine", ["spark"], indirect=True)
def test_a_killed_worker_under_load_loses_and_duplicates_nothing(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    killed = cluster.add_worker()
    cluster.add_worker()
    python = python_without_blackbox(tmp_path / "python")
    service = world.start_service(
        spark_master=cluster.master, spark_config=cluster.settings(python)
    ).wait_ready()
    world.ask(4000, within_s=6)
    until("some are delivered", lambda: len(world.received(world.targets[0])) > 500)

    kill_tree(killed)
    world.ask(2000, within_s=2)

    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict
    assert verdict.delivered == 6000
    until("every shard is open again", lambda: service.get("/readyz")[0] == 200)
    world.ask(500, within_s=1)
    assert world.wait_delivered().is_exact


@pytest.mark.proof
@pytest.mark.parametrize("engine", ["spark"], indirect=True)
def test_a_frozen_worker_is_given_up_within_half_a_minute(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    frozen = cluster.add_worker()
    cluster.add_worker()
    python = python_without_blackbox(tmp_path / "python")
    world.start_service(
        spark_master=cluster.master, spark_config=cluster.settings(python)
    ).wait_ready()
    until("its executor runs", psutil.Process(frozen.pid).children)
    world.ask(500, within_s=2)
    assert world.wait_delivered().is_exact

    freeze_tree(frozen)
    began = time.monotonic()
    world.ask(500, within_s=2)

    verdict = world.wait_delivered(timeout_s=120)
    assert verdict.is_exact, verdict
    took_s = time.monotonic() - began
    print(f"delivered {took_s:.0f} s after the worker was frozen")
    assert took_s < 90  # by Spark's defaults, 120 to 180 s


@pytest.mark.proof
@pytest.mark.parametrize("engine", ["spark"], indirect=True)
def test_a_driver_that_its_restarted_master_does_not_know_ends(
    world: World, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add_worker()
    python = python_without_blackbox(tmp_path / "python")
    service = world.start_service(
        spark_master=cluster.master, spark_config=cluster.settings(python)
    ).wait_ready()

    cluster.restart_master()

    until("the service has ended", lambda: service.process.poll() is not None, 180)
    assert service.process.returncode == 1
    assert "no executor for 60 s" in service.log.read_text().splitlines()[-1]
