"""`python -m blackbox.spark.class_archive`: archives Spark's classes, beside PySpark, for faster starts.

It also compiles PySpark's modules.
"""

from __future__ import annotations

from pathlib import Path

import pyspark

from blackbox.embedded.java import find_java
from blackbox.spark import compiled_modules
from blackbox.spark.spark_session import JAVA_FLAGS, JAVA_OPTIONS, numbered, start_session
from blackbox.support.class_archive import making

FOLDER = Path(pyspark.__file__).parent


def make() -> None:
    """Run what every start runs, and archive the classes that it loads."""
    with making(FOLDER, find_java()) as flags:
        session = start_session("local[2]", {JAVA_OPTIONS: " ".join((*JAVA_FLAGS, *flags))})
        # A query with a Python task: classes that are not loaded now are not in the archive.
        numbered(session, 2).mapInArrow(lambda rows: rows, "id long").count()
        gateway = session.sparkContext._gateway
        session.stop()
        assert gateway is not None
        gateway.shutdown()
        # The JVM ends when its stdin is closed, and writes the archive when it ends.
        gateway.proc.stdin.close()
        gateway.proc.wait(120)


if __name__ == "__main__":
    compiled_modules.make()
    make()
