"""Where Spark notes how far one query is, which nobody reads again: a query begins where Redis says."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "blackbox-checkpoint-"


class Checkpoint:
    """A folder that goes away with its query, or, if its driver was killed, when the next query of any driver begins."""

    def __init__(self) -> None:
        _sweep()
        self.folder, self._lock = _new()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _new() -> tuple[Path, int]:
    """Whoever sweeps may come between the folder and its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = _locked(folder)
        except OSError:
            continue
        if folder.exists():
            return folder, lock
        os.close(lock)


def _sweep() -> None:
    """Remove the folders whose drivers are gone, and their locks with them."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # a driver lives that has it, or another user does
            lock = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int:
    """Raises OSError while somebody else has it."""
    opened = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened
