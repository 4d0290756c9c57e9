"""Limits on HTTP connections: how many may be open, and how long each phase may take."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from collections.abc import Iterable
from typing import Any, Literal, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from blackbox.api.http_parser import Parser, Refusal

logger = logging.getLogger("blackbox.http")

MOST = 512
"""Most connections open at once; fewer if the limit of open files is below four times this."""

# Connections that the system queues until they are accepted. If it is full, the system drops the
# SYN, and the client retries only after a second.
BACKLOG = 1024

HEAD_S = 10.0
"""Time for a request's head: from the connection, or the first byte of a later request, to its end."""

# Between two requests. Proxies close theirs after a minute, and must be the first to close: a
# request that is sent while the server closes is lost.
IDLE_S = 75.0

# Most bytes that one connection has parsed before others have their turn.
READ_BYTES = 16 << 10

# For the rest of a body that is not read, or of input that is refused. With an immediate close the client might miss the answer.
LEFTOVER_S = 2.0

UNREAD_S = 30.0
"""Time within which a client must read some part of its answer."""

# Within which it must read the whole: reading byte by byte, it could hold the connection forever.
TAKEN_S = 120.0

# Of all answers together: each may have megabytes, and there may be 512 connections.
MOST_UNREAD_BYTES = 64 << 20

LOGGED_EVERY_S = 60.0

Phase = Literal["head", "body", "answer", "taking", "leftover", "idle"]
# "body" is absent: AccessMiddleware limits it, and can still answer 408. So is "answer": the client
# waits for the service then.
_LIMITS: dict[Phase, float] = {
    "head": HEAD_S,
    "taking": TAKEN_S,
    "leftover": LEFTOVER_S,
    "idle": IDLE_S,
}


def most_open() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The other three quarters are for Kafka, Redis and Spark.
    return MOST if files == resource.RLIM_INFINITY else max(1, min(MOST, files // 4))


def accepted_at_once() -> int:
    """How many connections one turn of the event loop accepts."""
    # An excess connection is closed only three turns later; until then all of them take files.
    return max(1, most_open() // 8)


class LogLimit:
    """Lets one log line of these `levels` through per `LOGGED_EVERY_S`."""

    def __init__(self, levels: range = range(logging.CRITICAL + 1)) -> None:
        self._levels = levels
        self._next_s = -math.inf
        self._left_out = 0

    # Clients cause these lines, and must not be able to fill the log.
    def allows(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._left_out += 1
            return False
        self._next_s = now_s + LOGGED_EVERY_S
        return True

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno not in self._levels:
            return True
        if not self.allows():
            return False
        if self._left_out:
            text = record.getMessage().rstrip()
            record.msg, record.args = f"{text} ({self._left_out} more were not logged)", ()
            self._left_out = 0
        return True


class Connection(H11Protocol):
    """uvicorn's protocol with deadlines, and a limit that does not turn new connections away.

    uvicorn's `limit_concurrency` would answer probes with 503 while others are idle. Here a connection
    beyond the limit closes the one that has waited longest for its client.
    """

    conn: Parser
    _phase: Phase = "head"
    _since_s = 0.0
    _is_ended = False
    _is_refused = False
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _full_log = LogLimit()
    _unread_log = LogLimit()

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn = Parser()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # what recv() gets
        self._enter("head")
        if len(self.connections) > most_open():
            _make_room(one for one in self._all() if one._may_be_closed())
            if self._full_log.allows():
                logger.warning(
                    "%d HTTP connections are open, the maximum; each new one closes the one that "
                    "has waited longest for its client",
                    most_open(),
                )

    def _all(self) -> list[Connection]:
        # uvicorn removes an aborted connection in connection_lost, which runs in a later turn.
        return [one for one in cast("set[Connection]", self.connections) if not one._is_ended]

    def _may_be_closed(self) -> bool:
        """Whether it may be closed for a new one: not while its request is being answered."""
        # Unless the answer has begun. A list of schedules waits without limit between two pages.
        return self._phase != "answer" or self.cycle.response_started

    def _bound_unread(self) -> None:
        """Close those that have waited longest for their clients while all of them hold too much."""
        while True:
            unread = [one for one in self._all() if one.flow.write_paused]
            held = sum(one.transport.get_write_buffer_size() for one in unread)
            if held <= MOST_UNREAD_BYTES:
                return
            _make_room(unread)
            if self._unread_log.allows():
                logger.warning(
                    "clients have left more than %d bytes of answers unread, the maximum; the "
                    "connections that have waited longest are closed",
                    MOST_UNREAD_BYTES,
                )

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            self._update_phase()

    def send_400_response(self, msg: str) -> None:
        # Once an answer has begun, h11 refuses another one: uvicorn's own method raises.
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app's answer cannot be sent any more
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(self.conn.refusal or Refusal(400, msg))
        else:
            self._end()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, and ignore what else the client sends: with an immediate close, it might miss the answer."""
        text = refusal.text.encode()
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        headers.append(("content-length", str(len(text))))
        reason = STATUS_PHRASES[refusal.status]
        is_head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
        answer = h11.Response(status_code=refusal.status, headers=headers, reason=reason)
        body = [] if is_head else [h11.Data(data=text)]
        for event in (answer, *body, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self._is_refused = True
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        # A pipelined request waits until this answer has left: a client holds one answer at most.
        # With a limit of 0, writing pauses if anything is left.
        self.transport.set_write_buffer_limits(0)
        if not self.flow.write_paused:
            self._go_on()
        self._update_phase()

    def _go_on(self) -> None:
        self.transport.set_write_buffer_limits()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_phase()
        self._expect_less()
        self._bound_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
        if self.cycle is not None and self.cycle.response_complete:
            self._go_on()
        self._update_phase()

    def timeout_keep_alive_handler(self) -> None:
        """Disable uvicorn's timer: it starts before the answer is read, and waits for that without limit."""

    def _expect_less(self, before: float = math.inf) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self._end()
        else:
            self._unread = self.loop.call_later(UNREAD_S, self._expect_less, left)

    def _update_phase(self) -> None:
        phase = self._current_phase()
        if phase != self._phase:
            self._enter(phase)

    def _current_phase(self) -> Phase:
        if self._is_refused:
            return "leftover"
        is_answered = self.cycle is None or self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY:
            return "leftover" if is_answered else "body"
        if self.flow.write_paused:
            return "taking"
        if not is_answered:
            asks_on = bool(self.conn.trailing_data[0])  # a pipelining client has an answer to read
            return "taking" if asks_on else "answer"
        has_begun = self.cycle is None or bool(self.conn.trailing_data[0])
        return "head" if has_begun else "idle"

    def _enter(self, phase: Phase) -> None:
        self._phase, self._since_s = phase, self.loop.time()
        if self._deadline is not None:
            self._deadline.cancel()
        limit_s = _LIMITS.get(phase)
        self._deadline = None if limit_s is None else self.loop.call_later(limit_s, self._end)

    def _end(self) -> None:
        self._is_ended = True
        # close() would wait for a client that does not read its answer.
        self.transport.abort()


def _make_room(waiting: Iterable[Connection]) -> None:
    """Close the one that has waited longest for its client."""
    min(waiting, key=lambda one: one._since_s)._end()


def limit_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Limit how often this loop logs that connections cannot be accepted, or that one failed."""
    not_accepted, broken = LogLimit(), LogLimit()

    def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("protocol"), Connection):
            if broken.allows():
                loop.default_exception_handler(context)
        # asyncio reports a failed accept, such as EMFILE, here; only the text tells it from others.
        elif "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif not_accepted.allows():
            logger.error(
                "cannot accept HTTP connections: %s; raise the limit of open files (ulimit -n)",
                context.get("exception"),
            )

    loop.set_exception_handler(failed)


# Two limits, so that invalid requests, which are cheap to send, do not hide an error.
_uvicorn = logging.getLogger("uvicorn.error")
_uvicorn.addFilter(LogLimit(range(logging.ERROR)))  # "Invalid HTTP request received."
_uvicorn.addFilter(LogLimit(range(logging.ERROR, logging.CRITICAL + 1)))  # those with a traceback
