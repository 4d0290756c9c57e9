"""A value as a JSON object, read exactly, and what is wrong with one that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from typing import Any, NoReturn

import orjson

from blackbox.formats.format import RefusedError, shown
from blackbox.records.request import Reason

# Above this size an error names no field and no key: Python's parser takes 0.2 s for 1 MB, and
# callers in other partitions wait.
MAX_EXPLAINED_BYTES = 10 << 10

_BLANKS = b" \t\r\n"
# Substitutes while JSON is split at its quotes: bytes that JSON cannot contain unescaped.
_ESCAPED_BACKSLASH, _ESCAPED_QUOTE = b"\x00", b"\x01"


def read_object(value: bytes | None, reason_of: Mapping[str, Reason]) -> dict[str, Any]:
    """Read an object whose fields are those in `reason_of`. Raises RefusedError, also for a duplicate key.

    A field `message` may hold any JSON, and its numbers stay as they were written. Elsewhere a number
    is what orjson reads: 1e2 becomes 100.0.
    """
    if not value:
        raise RefusedError(Reason.EMPTY, "the record has no value; write a JSON object")
    try:
        asked = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise _unreadable(value, str(error), reason_of) from None
    if type(asked) is not dict:
        detail = f"the value is {shown(asked)}; write a JSON object"
        raise RefusedError(Reason.NOT_AN_OBJECT, detail)
    return _as_written(value, asked)


def _as_written(value: bytes, asked: dict[str, Any]) -> dict[str, Any]:
    """The object that orjson read. A message that orjson would change is read exactly. Refuses duplicate keys."""
    try:
        read = orjson.dumps(asked)
    except orjson.JSONEncodeError:
        detail = "the value is nested deeper than 250 levels; send such a message as a string"
        raise RefusedError(Reason.NOT_JSON, detail) from None
    # equal except for blanks: orjson dropped no key and changed no number
    if read == value or read.translate(None, _BLANKS) == value.translate(None, _BLANKS):
        return asked
    written, parts = _split_at_quotes(value), _split_at_quotes(read)
    if len(written) != len(parts):  # orjson dropped a key, which is a string
        _refuse_duplicate_key(value)
    between_strings = b'"'.join(written[::2]).translate(None, _BLANKS).split(b'"')
    message = asked.get("message")
    is_as_read = between_strings == parts[::2] or message is None or type(message) is str
    if is_as_read or asked.get("encoding") is not None:
        return asked
    parts[::2] = between_strings
    return asked | {"message": orjson.Fragment(_exact_message(asked, parts))}


def _exact_message(asked: dict[str, Any], parts: list[bytes]) -> bytes:
    """The message with its strings as orjson writes them, and its numbers as the caller wrote them.

    `parts` are those of the whole value.
    """
    # without Python code for each number or name: a record of 1 MB can hold half a million
    fields = list(asked.items())
    at = list(asked).index("message")
    first = len(_split_at_quotes(orjson.dumps(dict(fields[:at])))) + 1
    last = len(parts) + 1 - len(_split_at_quotes(orjson.dumps(dict(fields[at + 1 :]))))
    exact = b'"'.join(parts[first:last])[1:-1]  # without the colon, and the comma or brace
    return exact.replace(_ESCAPED_QUOTE, rb"\"").replace(_ESCAPED_BACKSLASH, rb"\\")


def _split_at_quotes(text: bytes) -> list[bytes]:
    """Split JSON at the quotes of its strings: every second part is a string."""
    # backslashes first: in \\" the quote is not escaped
    whole = text.replace(rb"\\", _ESCAPED_BACKSLASH).replace(rb"\"", _ESCAPED_QUOTE)
    return whole.split(b'"')


def _refuse_duplicate_key(value: bytes) -> NoReturn:
    if len(value) <= MAX_EXPLAINED_BYTES:
        with suppress(RecursionError):  # orjson reads deeper nesting than Python
            json.loads(value, object_pairs_hook=_without_duplicates)
    raise RefusedError(Reason.DUPLICATE_KEY, "a key is written twice in one object; write it once")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, held in pairs:
        if name in members:
            detail = f"the key {shown(name)} is written twice in one object; write it once"
            raise RefusedError(Reason.DUPLICATE_KEY, detail)
        members[name] = held
    return members


class _NoNumber:
    def __init__(self, text: str) -> None:
        self.text = text


def _number(text: str) -> float | _NoNumber:
    number = float(text)
    return number if isfinite(number) else _NoNumber(text)


def _unreadable(value: bytes, complaint: str, reason_of: Mapping[str, Reason]) -> RefusedError:
    """Why orjson could not read it."""
    if not value.strip():
        return RefusedError(Reason.EMPTY, "the value has only blanks; write a JSON object")
    if len(value) > MAX_EXPLAINED_BYTES:
        return RefusedError(Reason.NOT_JSON, f"the value is not valid JSON: {complaint}")
    # the standard library reads more, such as NaN, and so can name the field
    try:
        asked = json.loads(
            value.decode(),
            object_pairs_hook=_without_duplicates,
            parse_int=_number,
            parse_float=_number,
            parse_constant=_NoNumber,
        )
    except (ValueError, RecursionError):
        asked = None
    for name in reason_of if isinstance(asked, dict) else ():
        held = asked.get(name)
        if isinstance(held, _NoNumber):
            detail = f"{name} is {shown(held.text)}, which is not a finite number; give one"
            return RefusedError(reason_of[name], detail)
        if not _is_writable(held):
            return RefusedError(reason_of[name], f"{name} is not valid JSON: {complaint}")
    return RefusedError(Reason.NOT_JSON, f"the value is not valid JSON: {complaint}")


def _is_writable(held: Any) -> bool:
    try:
        orjson.dumps(held)
    except orjson.JSONEncodeError:
        return False
    return True
