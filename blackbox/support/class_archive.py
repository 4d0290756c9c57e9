"""Archives of Java classes as a JVM holds them in memory: with its own, one starts in about half the time."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

NAME = "classes.jsa"


def using(folder: Path) -> tuple[str, ...]:
    """Flags of a JVM that uses the archive in this folder, if there is one; one of other jars it ignores."""
    archive = folder / NAME
    if not archive.is_file():
        return ()
    return (f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")


@contextmanager
def making(folder: Path, java: str) -> Iterator[tuple[str, ...]]:
    """Flags of a JVM that leaves an archive at its end, which is in the folder once the context is left.

    CalledProcessError: that JVM was killed over it, or the disk is full; the folder is as before.
    """
    with TemporaryDirectory(dir=folder, prefix="classes-") as scratch:
        made = Path(scratch, NAME)
        yield (f"-XX:ArchiveClassesAtExit={made}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")
        # A JVM that starts from half of one crashes.
        subprocess.run([java, *using(Path(scratch)), "-version"], check=True, capture_output=True)
        made.rename(folder / NAME)
