"""The data pipeline on Spark: the verbs as an engine, and jobs on both journals."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("pyspark", "pandas", "pyarrow", "matplotlib", "jinja2")
"""What the extra `spark` brings."""


def missing_packages() -> list[str]:
    """Those of them that this installation does not have."""
    return [name for name in PACKAGES if find_spec(name) is None]
