"""A Spark session that suits the pipeline, on this machine or on a cluster."""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession

import blackbox
from blackbox.support.class_archive import using

# How often Spark runs a failing task of a batch before the batch fails.
TRIES = 4

DEFAULTS = {
    # Batches of intake must not wait for the long-running tasks of dispatch.
    "spark.scheduler.mode": "FAIR",
    "spark.task.maxFailures": str(TRIES),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Otherwise PySpark calls the JVM for the caller's line, at each use of a column.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
    # Each batch and each window is a job, and Spark would remember the last 1,000.
    "spark.sql.ui.retainedExecutions": "10",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.log.level": "FATAL",
}
# Records that Spark sorts and shares are files there. Spark lets every user of this machine read them.
LOCAL_DIR = "spark.local.dir"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# Records do not pass through the JVM: it only has to start fast, and be small.
JAVA_FLAGS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
ON_THIS_MACHINE = {
    JAVA_OPTIONS: " ".join((*JAVA_FLAGS, *using(Path(pyspark.__file__).parent))),
    # Nothing outside this machine may reach Spark's ports.
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # Spark generates a secret; without one, every user of this machine reaches its block manager.
    "spark.authenticate": "true",
    "spark.pyspark.python": sys.executable,
    "spark.python.daemon.module": "blackbox.engine.spark.daemon",
}
ON_A_CLUSTER = {"spark.pyspark.python": "python3"}
# An executor whose host is gone keeps its shards, and the batch of all others, until Spark gives it up. By default that
# takes two to three minutes; with these, at most 25 s. Not on this machine, where the only executor cannot be gone, and
# seems to be after each pause of the process. They depend on each other: none is set if the operator sets one.
GIVES_UP_HOSTS = {
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "3s",
}
# Otherwise failed executors count for the whole life of a driver, which ends after three or a few more.
FORGIVES_FAILURES = {"spark.executor.failuresValidityInterval": "1h"}
FORGIVES_FAILURES_ON_YARN = "spark.yarn.executor.failuresValidityInterval"


def start_session(master: str, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Start Spark; `settings` are the operator's and override ours.

    On a cluster this package is sent to the executors; its dependencies must be in their Python
    (`spark.pyspark.python`, or the image), as Spark's own documentation describes.
    """
    settings = settings or {}
    own = DEFAULTS | (_on_this_machine if is_local(master) else _on_a_cluster)(settings)
    chosen: dict[str, Any] = own | dict(settings)
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Set before the session: otherwise workers use the system's python3.
    os.environ["PYSPARK_PYTHON"] = chosen["spark.pyspark.python"]
    builder = SparkSession.builder.master(with_slots(master)).appName("blackbox")
    session: SparkSession = builder.config(map=chosen).getOrCreate()
    if not is_local(master):
        session.sparkContext.addPyFile(str(_packed()))
    return session


def numbered(session: SparkSession, count: int) -> DataFrame:
    """The numbers 0, 1, …, one for each task."""
    return session.range(0, count, 1, max(1, count))


def is_local(master: str) -> bool:
    return master.startswith("local")


def with_slots(master: str) -> str:
    """A local master with two slots per core, at least four, for `local[*]`."""
    asked = re.fullmatch(r"local(?:\[(\*|\d+)(?:,(\d+))?\])?", master)
    if asked is None:
        return master
    threads, tries = asked[1] or "*", asked[2] or TRIES
    # Long-running tasks of dispatch take half of the slots.
    slots = max(4, 2 * (os.cpu_count() or 2)) if threads == "*" else max(2, int(threads))
    # With a local master, the number of tries is in its name; without one, no task is retried.
    return f"local[{slots},{tries}]"


def _on_this_machine(settings: Mapping[str, str]) -> dict[str, str]:
    own = dict(ON_THIS_MACHINE)
    if LOCAL_DIR not in settings:
        own[LOCAL_DIR] = str(_private_folder())
    return own


def _on_a_cluster(settings: Mapping[str, str]) -> dict[str, str]:
    own = dict(ON_A_CLUSTER)
    if GIVES_UP_HOSTS.keys().isdisjoint(settings):
        own |= GIVES_UP_HOSTS
    if (
        FORGIVES_FAILURES_ON_YARN not in settings
    ):  # which Spark reads only if the general one is not set
        own |= FORGIVES_FAILURES
    return own


def _packed() -> Path:
    """This package as a zip file that Python can import from, until this process exits."""
    source = Path(blackbox.__file__).parent
    # Spark serves the file from here to each new executor.
    target = _private_folder() / "blackbox.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(source.rglob("*.py")):
            archive.write(path, path.relative_to(source.parent))
    return target


def _private_folder() -> Path:
    """A folder that no other user can read, until this process exits."""
    folder = Path(tempfile.mkdtemp(prefix="blackbox-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Until this process ends: systemd-tmpfiles removes old files from /tmp, but not from a locked folder.
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    return folder
