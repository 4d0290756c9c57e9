"""Contracts of request topics: from the bytes of a record to Request, Cancel or Invalid."""

from __future__ import annotations

from collections.abc import Callable

from blackbox.formats.terms import Format

__all__ = ["NAMES", "Format", "make_format", "may_have_caller_id"]

NAMES = ("countdown", "scheduler", "future", "timer")


def make_format(
    name: str,
    *,
    max_countdown_s: int,
    own_topics: Callable[[str], bool],
    may_recur: bool = True,
    topic: str = "",
    timer_output_topic: str = "",
    scheduler_grace_s: int | None = None,
) -> Format:
    """The contract of this name, for the records of `topic`. Raises ValueError for an unknown name."""
    from blackbox.formats.countdown import Countdown
    from blackbox.formats.future import Future
    from blackbox.formats.scheduler import Scheduler
    from blackbox.formats.timer import Timer

    if name == "countdown":
        return Countdown(max_countdown_s, own_topics, may_recur=may_recur)
    if name == "scheduler":
        return Scheduler(max_countdown_s, own_topics, topic=topic, grace_s=scheduler_grace_s)
    if name == "future":
        return Future(max_countdown_s, own_topics)
    if name == "timer":
        return Timer(max_countdown_s, own_topics, output_topic=timer_output_topic)
    raise ValueError(f"unknown format {name!r}; wanted: {', '.join(NAMES)}")


def may_have_caller_id(name: str) -> Callable[[bytes | None], bool]:
    """For the contract of this name, whether a record with this value may have a caller id.

    Much quicker than parsing; True where only parsing can decide.
    """
    return {"countdown": _names_an_id, "future": lambda value: False}.get(name, lambda value: True)


_BACKSLASH = ord("\\")


def _names_an_id(value: bytes | None) -> bool:
    if value is None:
        return False
    return value.find(b'"id"') >= 0 or (_BACKSLASH in value and b"\\u" in value)
