"""The parent of Spark's Python workers on this machine: it loads their modules once, before they fork."""

from __future__ import annotations

import gc

from pyspark.daemon import manager

# Loaded for the workers: one that is forked from here is ready in milliseconds.
import blackbox.engine.spark.dispatch_task
import blackbox.engine.spark.intake_task  # noqa: F401

if __name__ == "__main__":
    # The collector of a worker must not write to these objects: workers share their memory.
    gc.freeze()
    manager()
