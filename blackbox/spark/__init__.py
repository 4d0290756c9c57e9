"""What the engine and the jobs on Spark share: a session, both journals as tables, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

PACKAGES = ("pyspark", "pandas", "pyarrow", "matplotlib", "jinja2")
"""What the extra `spark` brings."""


def missing_packages(needed: Sequence[str] = PACKAGES) -> list[str]:
    """Those that this installation does not have."""
    return [name for name in needed if find_spec(name) is None]
