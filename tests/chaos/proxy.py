"""TCP proxies that cut connections, delay data, and lose requests or replies."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from typing import Any, Protocol, TypeVar, cast

import hiredis

from blackbox.embedded.tcp_ports import HOST, free_port

T = TypeVar("T")

NOTHING = object()


class Wire(Protocol):
    """Finds requests and replies in the bytes of one connection."""

    def requests(self, data: bytes) -> list[tuple[str | int, int]]:
        """The requests that these bytes complete: the kind and number of each."""

    def replies(self, data: bytes) -> list[int]:
        """The numbers of the requests whose replies these bytes complete."""


class RedisWire:
    """Requests are identified by the name of their command."""

    def __init__(self) -> None:
        self._sent, self._answered = 0, 0
        self._asking = hiredis.Reader(notEnoughData=NOTHING)
        self._answering = hiredis.Reader(notEnoughData=NOTHING)

    def requests(self, data: bytes) -> list[tuple[str | int, int]]:
        self._asking.feed(data)
        found: list[tuple[str | int, int]] = []
        while (command := cast(Any, self._asking.gets())) is not NOTHING:
            self._sent += 1
            found.append((command[0].decode().upper(), self._sent))
        return found

    def replies(self, data: bytes) -> list[int]:
        self._answering.feed(data)
        first = self._answered
        while self._answering.gets() is not NOTHING:
            self._answered += 1
        return list(range(first + 1, self._answered + 1))


class KafkaWire:
    """Requests are identified by the number of their API."""

    def __init__(self) -> None:
        self._asking = bytearray()
        self._answering = bytearray()

    def requests(self, data: bytes) -> list[tuple[str | int, int]]:
        self._asking += data
        return [(_number(f[:2]), _number(f[4:8])) for f in _frames(self._asking)]

    def replies(self, data: bytes) -> list[int]:
        self._answering += data
        return [_number(frame[:4]) for frame in _frames(self._answering)]


def _frames(data: bytearray) -> list[bytes]:
    frames = []
    while len(data) >= 4 and len(data) >= (end := 4 + _number(data[:4])):
        frames.append(bytes(data[4:end]))
        del data[:end]
    return frames


def _number(data: bytes | bytearray) -> int:
    return int.from_bytes(data, "big")


class Proxies:
    """The event loop on which proxies run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = Thread(target=self.loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def call(self, does: Callable[[], T]) -> T:
        """Call it on the loop, and return its result."""

        async def done() -> T:
            return does()

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Proxy:
    """Forwards everything to `port` on this host, except for its faults. Safe from any thread."""

    def __init__(self, proxies: Proxies, port: int, wire: Callable[[], Wire]) -> None:
        self._proxies = proxies
        self.loop = proxies.loop
        self.to_port = port
        self.wire = wire
        self.is_refusing = False
        self.delay_s = 0.0
        self.hangs_at: str | int | None = None
        self.lost = Event()
        self.links: set[Link] = set()
        self._awaited: tuple[str | int, bool] | None = None
        self._left = 0
        self.port = free_port()
        listening = proxies.loop.create_server(lambda: _FromClient(self), HOST, self.port)
        self._server = asyncio.run_coroutine_threadsafe(listening, proxies.loop).result()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def cut(self) -> None:
        """End every connection."""
        self._proxies.call(self._abort_links)

    def refuse(self) -> None:
        """End every connection, and accept no new one until `mend`."""
        self.is_refusing = True
        self.cut()

    def delay(self, seconds: float) -> None:
        """Delay everything in both directions until `mend`."""
        self.delay_s = seconds

    def hang(self, at: str | int) -> None:
        """Hold every such request, and everything after it on its connection, until `mend`, which ends these connections."""
        self.hangs_at = at

    def mend(self) -> None:
        self.is_refusing, self.delay_s = False, 0.0
        if self.hangs_at is not None:
            self.hangs_at = None
            self.cut()

    def lose_reply(self, to: str | int, time: int) -> None:
        """The server executes the `time`-th such request. The connection ends instead of a reply."""
        self._lose(to, time, before=False)

    def lose_request(self, to: str | int, time: int) -> None:
        """The same, but the request does not arrive."""
        self._lose(to, time, before=True)

    def _lose(self, to: str | int, time: int, *, before: bool) -> None:
        def await_it() -> None:
            self.lost.clear()
            self._awaited, self._left = (to, before), time

        self._proxies.call(await_it)

    def sees(self, request: str | int) -> bool | None:
        """Whether to lose this request (True) or its reply (False); None: forward it."""
        if self._awaited is None or self._awaited[0] != request:
            return None
        self._left -= 1
        if self._left > 0:
            return None
        before = self._awaited[1]
        self._awaited = None
        return before

    def close(self) -> None:
        self._proxies.call(self._server.close)
        self.cut()

    def _abort_links(self) -> None:
        for link in list(self.links):
            link.abort()


class Link:
    """One connection of a client, and its connection to the server."""

    def __init__(self, proxy: Proxy, client: asyncio.Transport) -> None:
        self._proxy = proxy
        self._wire = proxy.wire()
        self._losing: int | None = None
        self._hangs = False
        self.up = _Lane(proxy)
        self.down = _Lane(proxy)
        self.down.connect(client)
        proxy.links.add(self)

    def asked(self, data: bytes) -> None:
        """Handle data from the client."""
        for request, number in self._wire.requests(data):
            self._hangs |= request == self._proxy.hangs_at
            before = self._proxy.sees(request)
            if before:
                self._proxy.lost.set()
                self.abort()
                return
            if before is not None:
                self._losing = number
        if not self._hangs:
            self.up.send(data)

    def answered(self, data: bytes) -> None:
        """Handle data from the server."""
        replies = self._wire.replies(data)
        if self._losing is None:
            self.down.send(data)
        elif self._losing in replies:
            self.abort()

    def abort(self) -> None:
        if self._losing is not None:  # its client may stop before the reply
            self._proxy.lost.set()
        self._proxy.links.discard(self)
        self.up.abort()
        self.down.abort()


class _Lane:
    """One direction of a link. Data arrives delayed and in order."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._held: deque[tuple[float, bytes]] = deque()
        self._to: asyncio.Transport | None = None
        self._is_ended = False

    def connect(self, to: asyncio.Transport) -> None:
        self._to = to
        if self._is_ended:
            to.abort()
        self._pass_on()

    def send(self, data: bytes) -> None:
        self._held.append((self._proxy.loop.time() + self._proxy.delay_s, data))
        self._pass_on()

    def _pass_on(self) -> None:
        if self._to is None or self._is_ended:
            return
        loop = self._proxy.loop
        while self._held:
            at, data = self._held[0]
            if at > loop.time():
                loop.call_at(at, self._pass_on)
                return
            self._held.popleft()
            self._to.write(data)

    def abort(self) -> None:
        self._is_ended = True
        if self._to is not None:
            self._to.abort()


class _FromClient(asyncio.Protocol):
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._link: Link | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        client = cast(asyncio.Transport, transport)
        if self._proxy.is_refusing:
            client.abort()
            return
        client.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = Link(self._proxy, client)
        self._connecting = self._proxy.loop.create_task(self._connect(self._link))

    async def _connect(self, link: Link) -> None:
        loop = self._proxy.loop
        try:
            await loop.create_connection(lambda: _FromServer(link), HOST, self._proxy.to_port)
        except OSError:
            link.abort()

    def data_received(self, data: bytes) -> None:
        if self._link is not None:
            self._link.asked(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._link is not None:
            self._link.abort()


class _FromServer(asyncio.Protocol):
    def __init__(self, link: Link) -> None:
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link.up.connect(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._link.answered(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._link.abort()
