"""The current rules: the file is read again when it has changed."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from threading import Lock

from blackbox.rules.rules import Rules, RulesError, parse

logger = logging.getLogger("blackbox.rules")

LOOK_S = 1.0


class RulesFile:
    """The rules of one file, at most 1 s old. Safe from any thread.

    A file that cannot be used any more changes nothing: the last usable rules stay in force, and
    `problem` says what is wrong.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises RulesError if it cannot be used."""
        self._path = path
        self._lock = Lock()
        # the state before the text: a change in between is read at the next look
        self._state = self._look()
        self._rules = self._read()
        self._looked_s = time.monotonic()
        self.problem: str | None = None

    def rules(self) -> Rules:
        now = time.monotonic()
        # one thread looks; the others do not wait, and use the rules that are there
        if now - self._looked_s >= LOOK_S and self._lock.acquire(blocking=False):
            try:
                self._looked_s = now
                self._read_if_changed()
            finally:
                self._lock.release()
        return self._rules

    def _read_if_changed(self) -> None:
        state = self._look()
        if state == self._state:
            return
        self._state = state
        try:
            self._rules, self.problem = self._read(), None
            logger.info("%s was read again; its rules are now in effect", self._path)
        except RulesError as error:
            self.problem = str(error)
            logger.error("%s; the previous rules stay in effect", error)

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        # ctime and inode: corrected permissions and a copy with its time do not change mtime
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _read(self) -> Rules:
        try:
            return parse(self._path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
            raise RulesError(f"BLACKBOX_CALLERS_FILE={self._path}: {why}") from None
        except RulesError as error:
            raise RulesError(f"BLACKBOX_CALLERS_FILE={self._path}: {error}") from None
