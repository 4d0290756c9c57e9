"""Shared by the engine and the jobs on Spark: a session, both journals as tables, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

# As in the extra `spark` of pyproject.toml.
PACKAGES = ("pyspark", "pandas", "pyarrow", "matplotlib", "jinja2")


def missing_packages(needed: Sequence[str] = PACKAGES) -> list[str]:
    return [name for name in needed if find_spec(name) is None]
