"""Connections of strangers: how many there may be, and how long each may take."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from typing import Any, Literal, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("blackbox.http")

MOST = 512
"""Open at once; fewer where the process may not have four times as many files."""

BACKLOG = 1024
"""Kept by the system until they are accepted; whoever meets a full one tries again after a second."""

HEAD_S = 10.0
"""From the connection, or the first byte of another request, to the end of its head."""

IDLE_S = 75.0
"""Between two requests. Proxies drop theirs after a minute, and must be the first to do so."""

LEFTOVER_S = 2.0
"""For the rest of a body that nobody reads. Closed at once, the client might never see the answer."""

UNREAD_S = 30.0
"""In which a client takes something of its answer."""

TAKEN_S = 120.0
"""In which it takes the whole: byte by byte one could be held for ever."""

TOLD_EVERY_S = 60.0

Phase = Literal["head", "body", "answer", "taking", "leftover", "idle"]
_LIMITS: dict[Phase, float] = {
    "head": HEAD_S,
    "taking": TAKEN_S,
    "leftover": LEFTOVER_S,
    "idle": IDLE_S,
}
"""How long each may take; `Door` limits bodies, and says so to the client."""


def most_open() -> int:
    """As many connections as leave three quarters of this process' files to Kafka, Redis and Spark."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else max(1, min(MOST, files // 4))


def accepted_at_once() -> int:
    """In each turn of the loop, and three turns pass before one that is too many is closed."""
    return max(1, most_open() // 8)


class Seldom:
    """Lets one line through in a while: what strangers cause must not fill the log."""

    def __init__(self) -> None:
        self._next_s = -math.inf

    def may_tell(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + TOLD_EVERY_S
        return True

    def filter(self, record: logging.LogRecord) -> bool:
        """For a logger: errors always, anything less seldom."""
        return record.levelno >= logging.ERROR or self.may_tell()


class Connection(H11Protocol):
    """uvicorn's, with a cap that new connections do not feel, and deadlines.

    uvicorn's `limit_concurrency` would answer probes with 503 while others idle. Here a connection
    beyond the cap takes the place of the one that has waited longest for its client.
    """

    _phase: Phase = "head"
    _since_s = 0.0
    _is_ended = False
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_full = Seldom()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._enter("head")
        if len(self.connections) > most_open():
            self._make_room()

    def _make_room(self) -> None:
        others = cast("set[Connection]", self.connections)
        waiting = [one for one in others if one._phase != "answer" and not one._is_ended]
        min(waiting, key=lambda one: one._since_s)._end()
        if self._is_full.may_tell():
            logger.warning(
                "%d HTTP connections are open, the most there may be; each new one closes the one that "
                "has waited longest for its client",
                most_open(),
            )

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Only where no answer has begun; uvicorn's own fails there, and the log has a traceback."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what the app answers yet is for nobody
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self._end()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()
        self._expect_less()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
        self._look()

    def timeout_keep_alive_handler(self) -> None:
        """Not uvicorn's: it starts before the answer is taken, and waits for that for ever."""

    def _expect_less(self, before: float = math.inf) -> None:
        """Of the answer to be taken, each time the client had a while."""
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self._end()
        else:
            self._unread = self.loop.call_later(UNREAD_S, self._expect_less, left)

    def _look(self) -> None:
        phase = self._now()
        if phase != self._phase:
            self._enter(phase)

    def _now(self) -> Phase:
        is_answered = self.cycle is None or self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY:
            return "leftover" if is_answered else "body"
        if self.flow.write_paused:
            return "taking"
        if not is_answered:
            asks_on = bool(self.conn.trailing_data[0])  # there is always an answer to such a client
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
        """At once: a close would wait for a client that does not take its answer."""
        self._is_ended = True
        self.transport.abort()


def tell_seldom(loop: asyncio.AbstractEventLoop) -> None:
    """Have this loop say only now and then that no connection can be accepted, or that one failed."""
    not_accepted, broken = Seldom(), Seldom()

    def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("protocol"), Connection):
            if broken.may_tell():
                loop.default_exception_handler(context)
        elif "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif not_accepted.may_tell():
            logger.error(
                "no HTTP connection can be accepted: %s; raise the limit of open files (ulimit -n)",
                context.get("exception"),
            )

    loop.set_exception_handler(failed)


logging.getLogger("uvicorn.error").addFilter(Seldom())  # "Invalid HTTP request received."
