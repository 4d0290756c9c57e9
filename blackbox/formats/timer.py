"""The format `timer`: an answer at a given second, in one of two protobuf contracts; see `docs/timers.md`."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from blackbox.formats.format import Format, Options, RefusedError, caller_id_of, caller_of, start_ms
from blackbox.formats.proto import timer_pb2 as older
from blackbox.formats.proto import xray_pb2 as current
from blackbox.records.request import Cancel, Reason, Record, Request

CREATE, CANCEL = 1, 2
ANSWER_TYPE = "xray.events.TimerExpired"


class Timer(Format):
    """Reads both contracts. All answers go to the output topic, under the key of their request."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._output_topic = options.output_topic

    def _read(self, record: Record, latest_ms: int) -> Request | Cancel:
        if record.value is None:
            raise RefusedError(Reason.EMPTY, "the record has no value; write a protobuf timer")
        try:
            timer = older.Timer.FromString(record.value)
            # the current contract has its correlation id inside its `request`
            if timer.HasField("correlation_id"):
                return self._older(timer, record, latest_ms)
            return self._current(current.TimerCreate.FromString(record.value), record, latest_ms)
        except DecodeError as error:
            detail = f"the value is not a protobuf timer: {error}; see docs/timers.md"
            raise RefusedError(Reason.NOT_PROTOBUF, detail) from None

    def _older(self, timer: older.Timer, record: Record, latest_ms: int) -> Request | Cancel:
        caller_id = caller_id_of(timer.correlation_id, "correlation_id")
        if timer.action == CANCEL:
            return Cancel(caller_id)
        if timer.action != CREATE:
            detail = f"action is {timer.action}; give 1 to create a timer, or 2 to cancel it"
            raise RefusedError(Reason.BAD_CANCEL, detail)
        if not timer.HasField("expire_at"):
            detail = "expire_at is missing; give the timer's expiry in Unix seconds"
            raise RefusedError(Reason.BAD_DUE_TIME, detail)
        answer = older.TimerExpired(
            header=timer.header if timer.HasField("header") else None,
            correlation_id=timer.correlation_id,
        )
        return self._request(
            answer.SerializeToString(), timer.expire_at, caller_id, record, latest_ms
        )

    def _current(
        self, timer: current.TimerCreate, record: Record, latest_ms: int
    ) -> Request | Cancel:
        asked = timer.request
        if not asked.correlation_id:
            remedy = "give one: it identifies the timer until it is delivered"
            raise RefusedError(Reason.BAD_ID, f"correlation_id is missing; {remedy}")
        caller_id = caller_id_of(asked.correlation_id, "correlation_id")
        is_create = asked.type.endswith("TimerCreate")
        if asked.type.endswith("TimerCancel") or (not timer.expire_at and not is_create):
            return Cancel(caller_id)
        answer = current.TimerExpired(response=current.Response(request=asked, type=ANSWER_TYPE))
        return self._request(
            answer.SerializeToString(deterministic=True),
            timer.expire_at,
            caller_id,
            record,
            latest_ms,
        )

    def _request(
        self, answer: bytes, expire_at_s: int, caller_id: str, record: Record, latest_ms: int
    ) -> Request:
        began_ms = start_ms(record, latest_ms)
        return Request(
            self._output_topic,
            answer,
            self._due_ms(expire_at_s * 1000, began_ms, f"expire_at {expire_at_s}"),
            record.key,
            record.headers,
            caller_of(record.headers),
            caller_id,
            None,
        )
