"""The HTTP server of a service, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from threading import Thread

import uvicorn
from fastapi import FastAPI

from blackbox.api.connections import BACKLOG, Connection, accepted_at_once, limit_loop_errors
from blackbox.config.settings_error import SettingsError

START_S = 10.0
# Both are part of the five seconds in which a service must stop, even while Kafka or Redis hangs.
FINISH_S = 1
STOP_S = 3.0
_POLL_S = 0.01


class _Server(uvicorn.Server):
    """Sleeps until `end` is called; uvicorn's own loop polls ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        limit_loop_errors(self._loop)
        if not self.should_exit:
            await self._ended.wait()

    def end(self) -> None:
        """End the server from another thread; safe to call twice, or before it runs."""
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._ended.set)


class HttpServer:
    """Serves `app` on `host`:`port` (0: a free one), and on `also`, another `host:port`, if given."""

    def __init__(self, app: FastAPI, host: str, port: int, also: str | None = None) -> None:
        self._host = host
        self._given_port = port
        self._also = also
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Connection,
                backlog=accepted_at_once(),
                lifespan="off",
                ws="none",
                # Its own configuration installs handlers that do not escape control characters.
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=FINISH_S,
            )
        )
        self._sockets: list[socket.socket] = []
        self._thread = Thread(
            target=self._server.run, args=(self._sockets,), name="http", daemon=True
        )

    @property
    def port(self) -> int:
        """The port it listens on; known once `start` has returned."""
        if not self._sockets:
            raise RuntimeError("the HTTP server has no port yet; call start() first")
        return self._port

    def start(self) -> None:
        """Start, and return once it answers.

        Raises SettingsError when the address cannot be used, RuntimeError when the server does not start.
        """
        where = f"BLACKBOX_HTTP_HOST={self._host!r}, BLACKBOX_HTTP_PORT={self._given_port}"
        self._sockets.append(_listen(self._host, self._given_port, where))
        self._port = int(self._sockets[0].getsockname()[1])
        if self._also:
            host, _, port = self._also.rpartition(":")
            where = f"BLACKBOX_METRICS_ADDR={self._also!r}"
            self._sockets.append(_listen(host or None, int(port), where))
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the HTTP server on {self._host}:{self._port} did not start")
            time.sleep(_POLL_S)
        for one in self._sockets:
            # asyncio uses one number for the backlog and for how many it accepts per turn. uvicorn
            # got the small one; a second listen() changes the system's queue alone.
            one.listen(BACKLOG)

    def stop(self) -> None:
        """Finish open requests, for 1 s at most, and close. Safe to call twice, or before `start`."""
        self._server.end()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        for one in self._sockets:
            one.close()


def _listen(host: str | None, port: int, where: str) -> socket.socket:
    try:
        # AI_PASSIVE: without a host, as in `:9090`, the address is that of all interfaces.
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # `::` is all addresses of the host, as in its values of the chart: Python's default is IPv6 alone.
        is_both = address[0] == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(address[:2], family=family, dualstack_ipv6=is_both)
    except OSError as error:
        raise SettingsError(
            f"{where}: cannot listen: {error.strerror}; wanted: an address of this host and a free port (0: any)"
        ) from None
    # Accepted sockets inherit this. Without it each request on a reused connection waits 40 ms for
    # an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
