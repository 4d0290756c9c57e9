"""Archives of Java classes as a JVM holds them in memory, with which it starts in about half the time."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

NAME = "classes.jsa"
STATE = "classes.jsa.state"
"""Beside the archive: its size and modification time as it was made."""

SCRATCH = "classes-"


def using(folder: Path) -> tuple[str, ...]:
    """JVM flags that use the archive in this folder, if it is as it was made."""
    archive = folder / NAME
    try:
        # A JVM that starts from a damaged one crashes; one of other jars it ignores. A checksum of
        # 160 MB would take half a second at each start.
        is_as_made = (folder / STATE).read_bytes() == _state(archive)
    except OSError:
        return ()
    return _flags(archive) if is_as_made else ()


@contextmanager
def making(folder: Path, java: str) -> Iterator[tuple[str, ...]]:
    """JVM flags that write an archive at exit; it is in the folder once the context is left.

    Raises CalledProcessError if the JVM was killed while writing, or the disk is full; the folder is
    then unchanged. If two are made at once in the same folder, the first one fails.
    """
    # Left by a run that was killed.
    for left in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
        made = Path(scratch, NAME)
        yield (f"-XX:ArchiveClassesAtExit={made}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")
        # A JVM that starts from a truncated archive crashes, so another one tries it before it gets
        # its name. The crash log then goes with the scratch folder.
        crash = (f"-XX:ErrorFile={scratch}/crash.log", "-XX:-CreateCoredumpOnCrash")
        subprocess.run([java, *_flags(made), *crash, "-version"], check=True, capture_output=True)
        with made.open("rb") as archive:
            # Otherwise a power loss after the rename leaves a part of it.
            os.fsync(archive.fileno())
        made.rename(folder / NAME)
        # Until this is written, the archive is not used.
        (folder / STATE).write_bytes(_state(folder / NAME))


def _flags(archive: Path) -> tuple[str, ...]:
    return (f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def _state(archive: Path) -> bytes:
    about = archive.stat()
    # Whole seconds: tar and images keep no more of the time.
    return b"%d %d\n" % (about.st_size, about.st_mtime)
