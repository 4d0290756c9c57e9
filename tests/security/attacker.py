"""An attacker at the HTTP port of a service: `python -m tests.security.attacker PORT SECONDS [TOKEN]`.

Prints at its end what it did, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

HOST = "127.0.0.1"
IDLE = 1000
BODIES, BODY_BYTES = 100, 60_000_000
PIECE = b"x" * 65536

EVERY_MONTH = {"topic": "nowhere", "message": "x" * 1000, "cron": "0 0 29 2 *"}


class Attacker:
    """All attacks at once, each in its own loop until the time is over."""

    def __init__(self, port: int, seconds: float, token: str | None) -> None:
        self.port = port
        self.until_s = time.monotonic() + seconds
        self.seconds = seconds
        self.bearer = f"Authorization: Bearer {token}\r\n" if token else ""
        self.did: Counter[str] = Counter()
        self.dice = random.Random(7)

    async def run(self) -> None:
        ways: list[tuple[Callable[[], Awaitable[None]], float]] = [
            *((self.large_body, self.seconds / BODIES * 4) for _ in range(4)),
            (self.garbage, 0.1),
            (self.slow_body, 0.5),
            (self.look, 0.1),
            (self.unread, 1.0),
            (self.change, 0.2),
        ]
        await asyncio.gather(self.idle(), *(self.again(*way) for way in ways))

    async def again(self, way: Callable[[], Awaitable[None]], every_s: float) -> None:
        while time.monotonic() < self.until_s:
            began_s = time.monotonic()
            with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                await asyncio.wait_for(way(), 30)
                self.did[way.__name__] += 1
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began_s)))

    async def idle(self) -> None:
        """A thousand silent sockets; each is opened again when it is closed."""
        held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        while time.monotonic() < self.until_s:
            held = [one for one in held if not (one[0].at_eof() or one[1].transport.is_closing())]
            with suppress(OSError):
                for _ in range(min(100, IDLE - len(held))):
                    held.append(await asyncio.open_connection(HOST, self.port))
                    self.did["idle"] += 1
            await asyncio.sleep(0.2)
        for _, writer in held:
            writer.close()

    async def large_body(self) -> None:
        is_chunked = self.dice.random() < 0.5
        how = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {BODY_BYTES}"
        _, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(self.head("POST", "/requests/bulk", how))
            for _ in range(BODY_BYTES // len(PIECE)):
                piece = b"10000\r\n" + PIECE + b"\r\n" if is_chunked else PIECE
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()

    async def slow_body(self) -> None:
        _, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(self.head("POST", "/requests", "Content-Length: 60000"))
        for _ in range(20):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(1)
        writer.close()

    async def garbage(self) -> None:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        what = self.dice.choice(
            [
                self.dice.randbytes(5000),
                b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
                b"GET /" + b"%00../" * 5000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
                self.head("GET", "/livez", "Host: evil.example"),
                self.head("POST", "/requests", "Transfer-Encoding: chunked") + b"zz\r\n",
                self.head("GET", "/livez", "X: y") * 500,
            ]
        )
        writer.write(what)
        await self.answer(reader, writer)

    async def look(self) -> None:
        path = self.dice.choice(
            [
                f"/requests/{self.dice.getrandbits(128):032x}",
                "/requests?limit=1000&caller=nobody",
                "/dead-letters?limit=1000",
                "/stats",
                "/schedules",
                "/metrics",
            ]
        )
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(self.head("GET", path, "Connection: close"))
        await self.answer(reader, writer)

    async def unread(self) -> None:
        """Sends requests continuously, and reads no answer."""
        _, writer = await asyncio.open_connection(HOST, self.port, limit=1024)
        writer.write(self.head("GET", "/schedules", "X: y") * 50)
        await asyncio.sleep(20)
        writer.close()

    async def change(self) -> None:
        request = json.dumps(self.dice.choice([EVERY_MONTH, {"topic": "nowhere", "countdown": 1}]))
        method, path = self.dice.choice(
            [("POST", "/requests"), ("PATCH", "/requests/any"), ("POST", "/dead-letters/replay")]
        )
        reader, writer = await asyncio.open_connection(HOST, self.port)
        more = f"CALLER_SERVICE: hostile\r\nContent-Type: application/json\r\nContent-Length: {len(request)}"
        writer.write(self.head(method, path, more) + request.encode())
        await self.answer(reader, writer)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(reader.read(100_000), 5)
        finally:
            writer.close()

    def head(self, method: str, path: str, more: str) -> bytes:
        host = "" if "Host:" in more else f"Host: 127.0.0.1:{self.port}\r\n"
        return f"{method} {path} HTTP/1.1\r\n{host}{self.bearer}{more}\r\n\r\n".encode()


if __name__ == "__main__":
    port, seconds, *token = sys.argv[1:]
    attacker = Attacker(int(port), float(seconds), token[0] if token else None)
    asyncio.run(attacker.run())
    print(json.dumps(attacker.did))
