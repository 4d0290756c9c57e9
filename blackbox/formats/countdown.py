"""The format `countdown`: one JSON object per request; see `docs/formats.md` for its fields."""

from __future__ import annotations

from base64 import b64decode
from difflib import get_close_matches
from typing import Any

import orjson

from blackbox.formats.format import (
    CALLER_HEADER,
    MAX_HEADERS,
    SHOWN_CHARS,
    Format,
    Options,
    RefusedError,
    caller_id_of,
    caller_of,
    instant_ms,
    is_caller_id,
    shown,
    start_ms,
    whole_ms,
)
from blackbox.formats.json_object import read_object
from blackbox.records.recurrence import ENDS_TOO_LARGE, cron, every, next_ms, without_follows
from blackbox.records.request import Cancel, Headers, Invalid, Reason, Record, Request

MAX_EXPIRES_AFTER_S = 10**12
# Each time the request is written again, as JSON, which may take up to six times as much.
MAX_RECURRING_BYTES = 128 << 10

_REASON_OF = {
    "topic": Reason.BAD_TOPIC,
    "message": Reason.BAD_MESSAGE,
    "countdown": Reason.BAD_DUE_TIME,
    "at": Reason.BAD_DUE_TIME,
    "id": Reason.BAD_ID,
    "cancel": Reason.BAD_CANCEL,
    "key": Reason.BAD_KEY,
    "headers": Reason.BAD_HEADERS,
    "encoding": Reason.BAD_ENCODING,
    "key_encoding": Reason.BAD_ENCODING,
    "expires_after": Reason.BAD_EXPIRY,
    "every": Reason.BAD_RECURRENCE,
    "cron": Reason.BAD_RECURRENCE,
    "timezone": Reason.BAD_RECURRENCE,
}
_CANCEL_FIELDS, _PLAIN_FIELDS, _NAMED_FIELDS = 2, 3, 4
_QUOTES_OF_USUAL = {_CANCEL_FIELDS: 6, _PLAIN_FIELDS: 10, _NAMED_FIELDS: 14}


class Countdown(Format):
    """Reads `{"topic": …, "message": …, "countdown": seconds}`."""

    is_written_by_blackbox = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._may_recur = options.may_recur

    def parse(self, record: Record, latest_ms: int) -> Request | Cancel | Invalid | None:
        # The usual ones first, which are read three times as fast. Three keys and two strings are
        # ten quotes: with no more of them, no key was dropped.
        _, timestamp_ms, _, value, headers, _, is_stamped = record
        try:
            asked = orjson.loads(value)  # type: ignore[arg-type]
            has_all = value.count(b'"') == _QUOTES_OF_USUAL[len(asked)]  # type: ignore[union-attr]
            has_all = has_all and len(headers) <= MAX_HEADERS
            if has_all and len(asked) == _CANCEL_FIELDS:
                if asked["cancel"] is True and is_caller_id(asked["id"]):
                    return Cancel(asked["id"])
                return super().parse(record, latest_ms)
            target, message, countdown = asked["topic"], asked["message"], asked["countdown"]
            caller_id = None if len(asked) == _PLAIN_FIELDS else asked["id"]
            if (
                has_all
                and target in self._usual_targets
                and type(message) is str
                and (type(countdown) is int or type(countdown) is float)
                and 0 <= countdown <= self._max_countdown_s
                and (len(asked) == _PLAIN_FIELDS or is_caller_id(caller_id))
            ):
                return Request(
                    target,
                    message.encode(),
                    (timestamp_ms if is_stamped or 0 <= timestamp_ms <= latest_ms else latest_ms)
                    + (countdown * 1000 if type(countdown) is int else whole_ms(countdown)),
                    None,
                    headers,
                    caller_of(headers),
                    caller_id,
                    None,
                )
        except (ValueError, TypeError, KeyError):
            pass  # the slow way finds what is wrong, if anything is
        return super().parse(record, latest_ms)

    def _read(self, record: Record, latest_ms: int) -> Request | Cancel:
        asked = read_object(record.value, _REASON_OF)
        if not asked.keys() <= _REASON_OF.keys():
            raise _unknown_field(asked)
        if asked.get("cancel") is not None:
            return _cancel(asked)
        target = self._target(asked.get("topic"))
        headers = without_follows(record.headers)
        is_new = headers is record.headers
        if "message" not in asked:
            if not is_new:
                raise RefusedError(Reason.BAD_RECURRENCE, ENDS_TOO_LARGE)
            detail = "message is missing; give one, or null for a tombstone"
            raise RefusedError(Reason.BAD_MESSAGE, detail)
        message = _message(asked["message"], asked.get("encoding"))
        began_ms = start_ms(record, latest_ms)
        recurs = _recurs(asked, message, self._max_countdown_s, began_ms, is_new=is_new)
        # the request for the next time is written in the transaction of the delivery
        if recurs is not None and not self._may_recur:
            needs = "a recurring request needs BLACKBOX_DELIVERY=exactly-once"
            raise RefusedError(Reason.BAD_RECURRENCE, f"{needs}; send one that does not recur")
        due_ms = self._first_due_ms(asked, recurs, began_ms)
        return Request(
            target,
            message,
            due_ms,
            _key(asked.get("key"), asked.get("key_encoding")),
            headers + _headers(asked.get("headers"), len(headers)),
            caller_of(record.headers),
            None if asked.get("id") is None else caller_id_of(asked["id"]),
            _expires_ms(asked.get("expires_after"), due_ms),
            recurs,
        )

    def _first_due_ms(self, asked: dict[str, Any], recurs: str | None, start_ms: int) -> int:
        countdown, at = asked.get("countdown"), asked.get("at")
        if recurs is None or countdown is not None:
            return self._asked_ms(countdown, at, start_ms)
        if at is not None:
            self._asked_ms(None, at, start_ms)  # refuses what is not an instant, or too far ahead
            # a grid keeps to where it began, also when that is past
            return max(0, instant_ms(at, "at"))
        first_ms = next_ms(recurs, start_ms, start_ms)
        return self._due_ms(first_ms, start_ms, "the first due time")

    def _asked_ms(self, countdown: Any, at: Any, start_ms: int) -> int:
        if (countdown is None) is (at is None):
            given = "neither countdown nor at is" if at is None else "both countdown and at are"
            raise RefusedError(Reason.BAD_DUE_TIME, f"{given} given; give exactly one of them")
        if at is None:
            return self._due_after_ms(countdown, start_ms, "countdown")
        return self._due_ms(instant_ms(at, "at"), start_ms, f"at {shown(at)}")


def _unknown_field(asked: dict[str, Any]) -> RefusedError:
    name = min(asked.keys() - _REASON_OF.keys())
    close = get_close_matches(name[:SHOWN_CHARS], _REASON_OF, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"known fields are {', '.join(_REASON_OF)}"
    return RefusedError(Reason.UNKNOWN_FIELD, f"unknown field {shown(name)}; {remedy}")


def _cancel(asked: dict[str, Any]) -> Cancel:
    others = sorted(name for name in asked.keys() - {"id", "cancel"} if asked[name] is not None)
    if asked["cancel"] is not True or others:
        beside = f" beside {', '.join(others)}" if others else ""
        given = f"cancel is {shown(asked['cancel'])}{beside}"
        detail = f'{given}; to cancel write {{"id": …, "cancel": true}} alone'
        raise RefusedError(Reason.BAD_CANCEL, detail)
    if asked.get("id") is None:
        raise RefusedError(Reason.BAD_ID, "id is missing; give the id to cancel")
    return Cancel(caller_id_of(asked["id"]))


def _message(message: Any, encoding: Any) -> bytes | None:
    if encoding is not None:
        return _base64("message", message, encoding)
    if type(message) is str:
        return message.encode()
    return None if message is None else orjson.dumps(message)


def _base64(name: str, held: Any, encoding: Any) -> bytes:
    if encoding != "base64":
        detail = f'the encoding of {name} is {shown(encoding)}; give "base64"'
        raise RefusedError(Reason.BAD_ENCODING, detail)
    try:
        if type(held) is str:
            return b64decode(held, validate=True)
        wrong = "not a string"
    except ValueError as error:
        wrong = f"not base64 ({error})"
    detail = f"{name} is {wrong}: {shown(held)}; encode it with padding and without line breaks"
    raise RefusedError(Reason.BAD_ENCODING, detail)


def _key(key: Any, encoding: Any) -> bytes | None:
    if encoding is not None:
        return _base64("key", key, encoding)
    if key is None:
        return None
    if type(key) is str:
        return key.encode()
    raise RefusedError(Reason.BAD_KEY, f"key is {shown(key)}; give a string")


def _headers(headers: Any, of_record: int) -> Headers:
    if headers is None:
        return []
    if type(headers) is not dict:
        detail = f"headers is {shown(headers)}; give an object of strings"
        raise RefusedError(Reason.BAD_HEADERS, detail)
    # together: blackbox may write the request again, with all of them as headers of the record
    if len(headers) + of_record > MAX_HEADERS:
        beside = f", and the record {of_record} headers" if of_record else ""
        detail = f"headers has {len(headers)} names{beside}; give at most {MAX_HEADERS}"
        raise RefusedError(Reason.BAD_HEADERS, detail)
    return [_header(name, held) for name, held in headers.items()]


def _header(name: str, held: Any) -> tuple[str, bytes]:
    # such a header on a message could pose as blackbox's own, or as another caller's
    is_ours = name.startswith("blackbox-") or name == CALLER_HEADER
    if is_ours or not name or not name.isprintable():
        detail = (
            f"header name {shown(name)}; give printable characters, not starting blackbox-, and not "
            f"{CALLER_HEADER}, which is a header of the request itself"
        )
        raise RefusedError(Reason.BAD_HEADERS, detail)
    if type(held) is not str:
        detail = f"header {shown(name)} is {shown(held)}; give a string"
        raise RefusedError(Reason.BAD_HEADERS, detail)
    return name, held.encode()


def _recurs(
    asked: dict[str, Any], message: bytes | None, longest_s: int, began_ms: int, *, is_new: bool
) -> str | None:
    each, fields, zone = asked.get("every"), asked.get("cron"), asked.get("timezone")
    if each is None and fields is None:
        if zone is None:
            return None
        raise RefusedError(Reason.BAD_RECURRENCE, "timezone is given without cron; remove it")
    if asked.get("id") is None:
        detail = "a recurring request needs an id, so that it can be cancelled; give one"
        raise RefusedError(Reason.BAD_ID, detail)
    if len(message or b"") > MAX_RECURRING_BYTES:
        given = f"message has {len(message or b'')} bytes"
        detail = f"{given}; a recurring one may have {MAX_RECURRING_BYTES}"
        raise RefusedError(Reason.BAD_RECURRENCE, detail)
    if fields is not None and each is not None:
        raise RefusedError(Reason.BAD_RECURRENCE, "both every and cron are given; give one of them")
    name, value = ("every", each) if fields is None else ("cron", fields)
    try:
        if fields is not None:
            recurs = cron(fields, zone, began_ms)
            if is_new:
                _check_wait(recurs, began_ms, longest_s)
            return recurs
        if zone is not None:
            raise ValueError("timezone is only for cron; remove it")
        return every(each, longest_s)
    except ValueError as error:
        raise RefusedError(Reason.BAD_RECURRENCE, f"{name} is {shown(value)}: {error}") from None


def _check_wait(recurs: str, began_ms: int, longest_s: int) -> None:
    # The request for each next time is a request with `at`: one that is too far ends the recurrence.
    # Not checked again in those requests, which may be for a time that is near enough.
    first_ms = next_ms(recurs, began_ms, began_ms)
    second_ms = next_ms(recurs, first_ms, first_ms)
    if second_ms - first_ms > longest_s * 1000:
        limit = f"{longest_s} s (BLACKBOX_MAX_COUNTDOWN_S)"
        raise ValueError(f"its times are more than {limit} apart; give one that matches sooner")


def _expires_ms(seconds: Any, due_ms: int) -> int | None:
    if seconds is None:
        return None
    if type(seconds) in {int, float} and 0 <= seconds <= MAX_EXPIRES_AFTER_S:
        return due_ms + whole_ms(seconds)
    detail = f"expires_after is {shown(seconds)}; give seconds from 0 to {MAX_EXPIRES_AFTER_S}"
    raise RefusedError(Reason.BAD_EXPIRY, detail)
