"""How a contract says that a record asks for nothing that can be done."""

from __future__ import annotations

import orjson

from blackbox.request import Reason

SHOWN_CHARS = 80


class RefusedError(Exception):
    """What was wrong: the fixed word, and a detail that names the value and the remedy."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def shown(held: object) -> str:
    """A value for a detail: short, and without characters that could forge a log line."""
    if isinstance(held, dict | list):
        return "an object" if isinstance(held, dict) else "an array"
    if not isinstance(held, str | bytes):
        return orjson.dumps(held).decode()[:SHOWN_CHARS]
    text = repr(held[:SHOWN_CHARS])
    is_whole = len(held) <= SHOWN_CHARS and len(text) <= SHOWN_CHARS + 3
    return text if is_whole else text[:SHOWN_CHARS] + "…"
