"""Logging of commands, to stderr."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

REPEAT_S = 60.0
MOST_TEXTS = 1000

# For Kafka clients of commands: librdkafka would otherwise write to stderr itself.
NO_CLIENT_LOG = {"log_level": "0"}


def printable(text: str) -> str:
    """The text on one line, with characters escaped that are not printable."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def iso(seconds: float) -> str:
    """Epoch seconds as `2026-01-31T08:00:00.123Z`."""
    stamp = datetime.fromtimestamp(seconds, UTC)
    return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class IsoFormatter(logging.Formatter):
    """`2026-01-31T08:00:00.123Z INFO blackbox.engine.process: text`, one line whatever is in the text."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return iso(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        # Indented, so that no line can be mistaken for a log line of its own.
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {printable(line)}" for line in lines)


class OncePerMinute(logging.Filter):
    """Passes each text of the Kafka client once a minute, whichever client logs it."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != "blackbox.kafka":
            return True
        # During a broker's outage, dozens of clients log the same several times a second. Their
        # name and the duration are cut off, or no two lines would be equal.
        text = record.getMessage()
        what = text.rpartition("]: ")[2].partition(" (after")[0]
        if record.created - self._said.get(what, 0.0) < REPEAT_S:
            return False
        if len(self._said) >= MOST_TEXTS:  # texts may contain a number that never comes again
            self._said.clear()
        self._said[what] = record.created
        return True


def to_stderr() -> None:
    """Log one line per event; of the libraries only warnings."""
    handler = logging.StreamHandler()
    handler.addFilter(OncePerMinute())
    handler.setFormatter(IsoFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("blackbox").setLevel(logging.INFO)
    # A job that is due while its last run still waits for a server is skipped, as intended.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)


def disable() -> None:
    """Log nothing: the command itself prints what matters."""
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)
