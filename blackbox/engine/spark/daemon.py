"""The parent of Spark's Python workers on this machine: it loads their modules once, before they fork.

A worker is then ready in milliseconds, even after one was killed, and shares this memory.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

import blackbox.engine.spark.dispatch_task
import blackbox.engine.spark.intake_task  # noqa: F401

if __name__ == "__main__":
    gc.freeze()
    manager()
