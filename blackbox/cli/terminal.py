"""Shared start and output of commands; printed data cannot send control characters to the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import orjson
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from blackbox.admin.request_topics_writer import WRITE_FORMAT
from blackbox.cli.error_exit import BadUsage
from blackbox.config.settings import Settings, load
from blackbox.support import logs

SHOWN_CHARS = 400
LONGEST_LINE = 10_000

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
RequestTopic = Annotated[
    str | None,
    typer.Option(help="The request topic; default: the first with the format countdown."),
]
Countdown = Annotated[float | None, typer.Option(help="Due time, in seconds from now.")]
At = Annotated[
    str | None,
    typer.Option(help="Due time, instead of --countdown: RFC 3339 with offset, or epoch ms."),
]


def load_silenced() -> Settings:
    """The settings; nothing is logged from here on, as the command itself prints what matters."""
    settings = load()
    logs.disable()
    return settings


def chosen_topic(request_topic: str | None, settings: Settings) -> str:
    """The given request topic, or the first with the format `countdown`. Raises BadUsage."""
    topics = settings.topics
    if request_topic is None:
        for topic, format_name in topics.items():
            if format_name == WRITE_FORMAT:
                return topic
        raise BadUsage(
            f"BLACKBOX_REQUEST_TOPICS={settings.request_topics}: none has the format {WRITE_FORMAT}, "
            "the only one that commands can write"
        )
    if topics.get(request_topic, WRITE_FORMAT) != WRITE_FORMAT:
        raise BadUsage(
            f"--request-topic {request_topic!r}: its format is {topics[request_topic]}; commands can write "
            f"{WRITE_FORMAT} only"
        )
    return request_topic


def typed_instant(at: str | None) -> str | int | None:
    # Digits are epoch ms. Any other text goes to the format as it is, which checks it.
    return int(at) if at is not None and re.fullmatch(r"-?[0-9]{1,18}", at) else at


def instant(ms: int | None) -> str:
    """Epoch ms as an ISO 8601 instant in UTC."""
    if ms is None:
        return "?"
    try:
        return logs.iso(ms / 1000)
    except (OverflowError, ValueError):
        return f"{ms} ms"


def printable(text: str) -> str:
    """The text on one line, shortened, without terminal control characters."""
    shown = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
    return logs.printable(shown)


def print_line(text: str, *, err: bool = False) -> None:
    """Print the text on one line, complete, without terminal control characters."""
    typer.echo(logs.printable(text), err=err)


def as_json(held: Any, option: int = 0) -> str:
    """JSON on one line with all non-printable characters escaped; named tuples become objects."""
    # JSON itself escapes control characters below U+0020 alone, not U+009B or U+202E.
    text = orjson.dumps(held, lambda one: one._asdict(), option).decode()
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)


class EscapedTable(Table):
    """A table whose cells send no control characters to the terminal, and are not parsed as markup."""

    # Here and not by each command: any text may come from a server or from a caller.
    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_escaped, cells), **options)


def _escaped(cell: RenderableType | None) -> RenderableType | None:
    if isinstance(cell, Text):
        return Text(logs.printable(cell.plain), style=cell.style)
    return Text(logs.printable(cell)) if isinstance(cell, str) else cell


def table(
    texts: Iterable[str] = (),
    numbers: Iterable[str] = (),
    footers: Mapping[str, str] | None = None,
) -> EscapedTable:
    shown = EscapedTable(box=SIMPLE_HEAD, pad_edge=False, show_footer=footers is not None)
    justified: dict[str, JustifyMethod] = dict.fromkeys(texts, "left")
    for name, justify in (justified | dict.fromkeys(numbers, "right")).items():
        footer = (footers or {}).get(name, "")
        shown.add_column(name, footer, justify=justify, overflow="fold")
    return shown


def print_whole(listed: EscapedTable) -> None:
    """Print a table without truncation: cells wrap on a terminal; other outputs get lines of full length."""
    console = Console()
    # rich takes 80 columns for a pipe, and would cut ids and due times that scripts read.
    if not console.is_terminal:
        options = console.options.update(width=LONGEST_LINE)
        console.width = max(1, Measurement.get(console, options, listed).maximum)
    console.print(listed)
