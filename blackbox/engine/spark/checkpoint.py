"""Spark's checkpoint of one query. It is never read again: a query begins at the positions in Redis."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "blackbox-checkpoint-"


class Checkpoint:
    """A folder that is removed with its query or, if its driver was killed, at the next query of any driver."""

    def __init__(self) -> None:
        _sweep()
        self.folder, self._lock = _new()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _new() -> tuple[Path, int]:
    """Create and lock a folder."""
    # A sweep of another driver may come between creating and locking it: then create another.
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
    """Remove the folders whose drivers are gone."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # The kernel releases the lock of a killed driver.
        with suppress(OSError):  # its driver lives, or it is another user's
            lock = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int:
    """Open and lock the folder. Raises OSError while another process has it locked."""
    # O_NOFOLLOW: the folder for temporary files is shared, and another user may place a link there.
    opened = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened
