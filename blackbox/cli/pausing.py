"""`blackbox pause` and `blackbox resume`: stop and resume delivery to a target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Annotated

import typer

from blackbox.admin.admin import Admin
from blackbox.cli.error_exit import BadUsage, error_exit
from blackbox.cli.terminal import load_silenced
from blackbox.records.request import is_topic_name

Topic = Annotated[str, typer.Argument(help="The target topic.")]


def pause(topic: Topic) -> None:
    """Stop delivery to a target within a second; requests that come due for it wait."""
    if topic not in _change(topic, Admin.pause):
        text = f"{topic} is not paused: no request topic exists yet; pause it once the service runs"
        raise error_exit(text)
    typer.echo(f"{topic} is paused; `blackbox resume {topic}` resumes it")


def resume(topic: Topic) -> None:
    """Resume delivery to a paused target; requests that waited follow within a minute."""
    _change(topic, Admin.resume)
    typer.echo(f"{topic} is not paused; waiting messages follow within a minute")


def _change(topic: str, change: Callable[[Admin, str], dict[str, int]]) -> dict[str, int]:
    if not is_topic_name(topic):
        raise BadUsage(f"{topic!r} is not a valid topic name")
    with closing(Admin(load_silenced())) as admin:
        return change(admin, topic)
