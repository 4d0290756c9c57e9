"""The format `future`: a callback to be delivered at a given second; see `docs/timers.md`."""

from __future__ import annotations

import re

from google.protobuf.message import DecodeError

from blackbox.formats.format import Format, RefusedError, caller_of, shown, start_ms
from blackbox.formats.proto.future_pb2 import Future as Callback
from blackbox.records.request import Reason, Record, Request

_SECOND = re.compile(rb"-?[0-9]{1,18}")


class Future(Format):
    """Reads a protobuf `Future` under a key that is a unix second in decimal text."""

    def _read(self, record: Record, latest_ms: int) -> Request:
        callback = _callback(record.value)
        at_ms, began_ms = _second(record.key) * 1000, start_ms(record, latest_ms)
        due_ms = self._due_ms(at_ms, began_ms, f"the key {shown(record.key)}")
        return Request(
            self._target(callback.callBackTopic, "callBackTopic"),
            callback.callBack,
            due_ms,
            callback.callBackKey.encode(),
            record.headers,
            caller_of(record.headers),
            None,
            None,
        )


def _callback(value: bytes | None) -> Callback:
    if value is None:
        raise RefusedError(Reason.EMPTY, "the record has no value; write a protobuf Future")
    try:
        return Callback.FromString(value)
    except DecodeError as error:
        detail = f"the value is not a protobuf Future: {error}; see docs/timers.md"
        raise RefusedError(Reason.NOT_PROTOBUF, detail) from None


def _second(key: bytes | None) -> int:
    if key is not None and _SECOND.fullmatch(key):
        return int(key)
    given = "missing" if key is None else shown(key)
    detail = f"the key is {given}; give its expiry in Unix seconds, such as 1769842800"
    raise RefusedError(Reason.BAD_DUE_TIME, detail)
