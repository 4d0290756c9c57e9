"""Kafka's jars: fetched once, with the Ivy that PySpark contains, into the user's cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import platformdirs

from blackbox.embedded.guarded_process import (
    EmbeddedError,
    GuardedProcess,
    file_of_package,
    lock_folder,
)

KAFKA_VERSION = "4.1.0"
SCALA_VERSION = "2.13"
# Kafka itself depends on a logging interface only; without a binding its log is empty.
LOG_BINDING_VERSION = "2.24.3"
FETCH_DEADLINE_S = 600.0

IVY_MODULE = f"""<ivy-module version="2.0">
  <info organisation="blackbox" module="embedded-kafka"/>
  <dependencies>
    <dependency org="org.apache.kafka" name="kafka_{SCALA_VERSION}" rev="{KAFKA_VERSION}"
                conf="*->default"/>
    <dependency org="org.apache.logging.log4j" name="log4j-slf4j-impl"
                rev="{LOG_BINDING_VERSION}" conf="*->default"/>
  </dependencies>
</ivy-module>
"""


def kafka_jars(java: str, progress: Callable[[str], None], cache: Path | None = None) -> Path:
    """The folder with Kafka's jars; fetches them if it does not exist (about 43 MB, a minute)."""
    cache = cache or platformdirs.user_cache_path("blackbox")
    jars = cache / f"kafka_{SCALA_VERSION}-{KAFKA_VERSION}"
    if jars.is_dir():
        return jars
    cache.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(cache, deadline_s=FETCH_DEADLINE_S)
    try:
        # Another process may have fetched them while this one waited for the lock.
        if not jars.is_dir():
            progress(f"fetching Kafka {KAFKA_VERSION} into {jars}, once (43 MB)")
            _fetch(java, jars)
    finally:
        os.close(lock)
    return jars


def _fetch(java: str, jars: Path) -> None:
    ivy = find_ivy()
    with TemporaryDirectory(
        prefix="fetching-", dir=jars.parent, ignore_cleanup_errors=True
    ) as folder:
        scratch, fetched = Path(folder), Path(folder, "jars")
        (scratch / "ivy.xml").write_text(IVY_MODULE)
        command = [
            *(java, "-jar", str(ivy), "-cache", str(scratch / "cache")),
            *("-ivy", str(scratch / "ivy.xml"), "-types", "jar", "bundle"),
            *("-retrieve", str(fetched / "[artifact]-[revision].[ext]")),
        ]
        fetch = GuardedProcess(command, log=scratch / "ivy.log", disposable=scratch)
        try:
            code = fetch.wait(FETCH_DEADLINE_S)
        finally:
            fetch.kill()
        if code != 0 or not any(fetched.glob("kafka_*.jar")):
            raise EmbeddedError(
                f"cannot fetch Kafka {KAFKA_VERSION} (Ivy exited with {code}); check the network, "
                f"or copy the folder {jars} from a host that has it. Ivy's output:\n{fetch.tail()}"
            )
        # In one step, and on one file system: readers see all jars or none.
        with contextlib.suppress(FileExistsError):
            fetched.rename(jars)


def find_ivy() -> Path:
    if ivy := file_of_package("pyspark", "jars/ivy-*.jar"):
        return ivy
    raise EmbeddedError(
        "the embedded Kafka is fetched with the Ivy that PySpark contains, but PySpark is not "
        "installed; install blackbox with its spark extra, or `pip install pyspark`"
    )
