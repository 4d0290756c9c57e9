"""What commands print: nothing in it moves a terminal, whoever wrote it."""

from __future__ import annotations

import json
from typing import Any

import orjson

from blackbox import logs

SHOWN_CHARS = 400


def printable(text: str) -> str:
    """The same on one line, of bounded length, without what a terminal would obey."""
    shown = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
    return logs.printable(shown)


def as_json(held: Any, option: int = 0) -> str:
    """JSON on one line, in which everything that is not printable is escaped."""
    text = orjson.dumps(held, option=option).decode()
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]
