"""Small files by which the driver tells the process that plans Spark's batches."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file at once: the plan never reads a part of it."""
    written = path.with_suffix(".new")
    written.write_bytes(content)
    os.replace(written, path)
