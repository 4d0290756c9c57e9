"""What commands log, to stderr."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

REPEAT_S = 60.0

QUIET = {"log_level": "0"}
"""For Kafka clients of commands: they would write to stderr by themselves."""


def printable(text: str) -> str:
    """The same on one line, without what a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class IsoFormatter(logging.Formatter):
    """`2026-01-31T08:00:00.123Z INFO blackbox.engine.process: text`, one line whatever is in the text."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        stamp = datetime.fromtimestamp(record.created, UTC)
        return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Indented, so that no line of it can pass for a happening of its own."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {printable(line)}" for line in lines)


class OncePerMinute(logging.Filter):
    """Lets a text of the Kafka client pass once a minute, whichever of the clients says it.

    While a broker is away, each of dozens of clients says so several times a second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != "blackbox.kafka":
            return True
        text = record.getMessage()
        what = text.rpartition("]: ")[2].partition(" (after")[0]
        if record.created - self._said.get(what, 0.0) < REPEAT_S:
            return False
        self._said[what] = record.created
        return True


def to_stderr() -> None:
    """One line per happening; of the libraries only warnings."""
    handler = logging.StreamHandler()
    handler.addFilter(OncePerMinute())
    handler.setFormatter(IsoFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("blackbox").setLevel(logging.INFO)
    # A look that is due while the one before still waits for a server is left out: as it should.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)


def silent() -> None:
    """Nothing: the command says in its own words what matters."""
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)
