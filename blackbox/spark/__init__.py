"""Shared by the engine and the jobs on Spark: a session, both journals as tables, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

PACKAGES = ("pyspark", "pandas", "pyarrow", "matplotlib", "jinja2")
"""The packages of the extra `spark`."""


def missing_packages(needed: Sequence[str] = PACKAGES) -> list[str]:
    """The needed packages that are not installed."""
    return [name for name in needed if find_spec(name) is None]
