"""Archives of Java classes as a JVM holds them in memory, with which it starts in about half the time."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

NAME = "classes.jsa"


def using(folder: Path) -> tuple[str, ...]:
    """JVM flags that use the archive in this folder, if any; the JVM ignores an archive of other jars."""
    archive = folder / NAME
    if not archive.is_file():
        return ()
    return (f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")


@contextmanager
def making(folder: Path, java: str) -> Iterator[tuple[str, ...]]:
    """JVM flags that write an archive at exit; it is in the folder once the context is left.

    Raises CalledProcessError if the JVM was killed while writing, or the disk is full; the folder is
    then unchanged.
    """
    with TemporaryDirectory(dir=folder, prefix="classes-") as scratch:
        made = Path(scratch, NAME)
        yield (f"-XX:ArchiveClassesAtExit={made}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")
        # A JVM that starts from a truncated archive crashes.
        subprocess.run([java, *using(Path(scratch)), "-version"], check=True, capture_output=True)
        made.rename(folder / NAME)
