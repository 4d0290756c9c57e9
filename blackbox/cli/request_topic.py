"""Which request topic a command writes to."""

from __future__ import annotations

from blackbox.cli.failures import BadUsage
from blackbox.control.control import WRITTEN
from blackbox.settings import Settings


def chosen(asked: str | None, settings: Settings) -> str:
    """The request topic asked for, or the first of its format. Raises BadUsage when none is right."""
    topics = settings.topics
    if asked is None:
        for topic, contract in topics.items():
            if contract == WRITTEN:
                return topic
        raise BadUsage(
            f"BLACKBOX_REQUEST_TOPICS={settings.request_topics}: none has the format {WRITTEN}, "
            "the only one that commands write"
        )
    if topics.get(asked, WRITTEN) != WRITTEN:
        raise BadUsage(
            f"--request-topic {asked!r}: its format is {topics[asked]}; commands write {WRITTEN} only"
        )
    return asked
