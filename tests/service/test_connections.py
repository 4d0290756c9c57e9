"""Clients that connect to a real HTTP server and then do nothing: too many, too slow, or silent."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from blackbox.api import connections
from blackbox.api.serve import HttpServer
from tests.support.world import until

HOST = "127.0.0.1"
LARGE = 20_000_000
HEAD = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"


def app() -> FastAPI:
    app = FastAPI()

    @app.get("/livez")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/large")
    async def large() -> Response:
        return Response(b"x" * LARGE)

    @app.get("/slow")
    async def slow() -> None:
        await asyncio.sleep(1)

    @app.get("/parts")
    async def parts() -> Response:
        async def two() -> AsyncIterator[bytes]:
            yield b"["
            await asyncio.sleep(1)
            yield b"]"

        return StreamingResponse(two())

    @app.get("/faulty")
    async def faulty() -> None:
        raise RuntimeError("a fault")

    @app.post("/length")
    async def length(request: Request) -> int:
        return len(await request.body())

    @app.exception_handler(ClientDisconnect)
    def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=400)

    return app


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = HttpServer(app(), HOST, 0)
    server.start()
    yield server
    server.stop()


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=10)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; data that it sent before is skipped."""
    while select.select([connection], [], [], 0)[0]:
        try:
            if not connection.recv(65536):
                return True
        except OSError:
            return True
    return False


def bytes_received(connection: socket.socket, wanted: float = math.inf) -> int:
    """The number of bytes received, up to `wanted` or until the server closes the connection."""
    connection.settimeout(10)
    count = 0
    with suppress(ConnectionError):
        while count < wanted and (part := connection.recv(1 << 20)):
            count += len(part)
    return count


def answered(connection: socket.socket, asked: bytes = HEAD) -> bool:
    """Whether a request is answered; the whole answer is read."""
    connection.sendall(asked)
    answer = connection.recv(4096)
    while answer and not answer.endswith(b"}"):
        answer += connection.recv(4096)
    return answer.startswith(b"HTTP/1.1 200 ")


def is_live(port: int) -> bool:
    with connect(port) as connection:
        return answered(connection)


def test_an_answer_on_a_reused_connection_does_not_wait_for_an_acknowledgement(
    server: HttpServer,
) -> None:
    took_s = []
    with httpx.Client(base_url=f"http://{HOST}:{server.port}", trust_env=False) as client:
        for _ in range(30):
            began = time.perf_counter()
            assert client.get("/livez").status_code == 200
            took_s.append(time.perf_counter() - began)
    assert statistics.median(took_s[1:]) < 0.02


@pytest.mark.parametrize("begun", [b"", b"G", HEAD[:-1]])
def test_an_incomplete_head_times_out(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setitem(connections._LIMITS, "head", 0.3)
    with connect(server.port) as slow:
        slow.sendall(begun)
        until("it is closed", lambda: is_closed(slow), 5)


def test_a_head_sent_byte_by_byte_times_out(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections._LIMITS, "head", 0.5)
    began = time.monotonic()
    with connect(server.port) as slow:
        for byte in HEAD[:-1] * 100:
            try:
                slow.sendall(bytes([byte]))
            except OSError:
                break
            if is_closed(slow):
                break
            time.sleep(0.05)
        assert time.monotonic() - began < 3


def test_the_second_head_of_a_connection_also_times_out(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections._LIMITS, "head", 0.3)
    with connect(server.port) as slow:
        assert answered(slow)
        time.sleep(0.6)
        assert answered(slow)
        slow.sendall(b"GET")
        until("it is closed", lambda: is_closed(slow), 5)


def test_an_idle_connection_is_closed(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections._LIMITS, "idle", 0.5)
    with connect(server.port) as idle:
        assert answered(idle)
        assert not is_closed(idle)
        until("it is closed", lambda: is_closed(idle), 5)


def test_an_answer_that_is_read_slowly_is_sent_completely(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    monkeypatch.setitem(connections._LIMITS, "idle", 0.5)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((HOST, server.port))
        slow.sendall(HEAD.replace(b"livez", b"large"))
        count = 0
        for _ in range(15):
            time.sleep(0.1)
            count += bytes_received(slow, 1 << 20)
        assert count + bytes_received(slow, LARGE - count) >= LARGE


def test_the_rest_of_an_ignored_body_is_awaited_briefly(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections._LIMITS, "leftover", 0.3)
    head = b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
    with connect(server.port) as prompt:
        assert answered(prompt, head % 4)
        prompt.sendall(b"abcd")
        time.sleep(0.6)
        assert answered(prompt)
    with connect(server.port) as slow:
        assert answered(slow, head % 1_000_000)
        until("it is closed", lambda: is_closed(slow), 5)


def test_an_answer_that_is_not_read_is_abandoned(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.3)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((HOST, server.port))
        deaf.sendall(HEAD.replace(b"livez", b"large"))
        time.sleep(1)
        assert bytes_received(deaf) < LARGE


def test_the_longest_waiting_connection_is_closed_for_a_new_one(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "MOST", 8)
    monkeypatch.setattr(connections.Connection, "_full_log", connections.LogLimit())
    with ExitStack() as ending, caplog.at_level(logging.WARNING):
        open_ = []
        for _ in range(40):
            open_.append(ending.enter_context(connect(server.port)))
            time.sleep(0.005)
        assert is_live(server.port)
        closed = [is_closed(one) for one in open_]
        assert closed == [True] * 33 + [False] * 7
    assert [record.message for record in caplog.records] == [
        "8 HTTP connections are open, the maximum; each new one closes the one that has "
        "waited longest for its client"
    ]


def test_a_connection_that_is_being_answered_is_not_closed_for_a_new_one(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST", 4)
    with connect(server.port) as busy, ExitStack() as ending:
        busy.sendall(HEAD.replace(b"livez", b"slow"))
        time.sleep(0.2)
        for _ in range(20):
            ending.enter_context(connect(server.port))
        assert is_live(server.port)
        assert busy.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_answers_that_wait_for_their_next_part_are_closed_for_new_connections(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST", 4)
    with ExitStack() as ending:
        for _ in range(4):
            one = ending.enter_context(connect(server.port))
            one.sendall(HEAD.replace(b"livez", b"parts"))
            assert one.recv(1) == b"H"
        for _ in range(10):
            assert is_live(server.port)


def deaf(port: int, asked: bytes) -> socket.socket:
    """A connection that sends a request, and reads nothing."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect((HOST, port))
    one.sendall(asked)
    return one


def test_connections_with_unread_answers_are_closed_for_new_ones(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST", 4)
    with ExitStack() as ending:
        for _ in range(4):
            ending.enter_context(deaf(server.port, 2 * HEAD.replace(b"livez", b"large")))
        time.sleep(0.3)
        for _ in range(10):
            assert is_live(server.port)


def test_unread_answers_are_limited_in_bytes(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "MOST_UNREAD_BYTES", 2 * LARGE)
    monkeypatch.setattr(connections.Connection, "_unread_log", connections.LogLimit())
    with ExitStack() as ending:
        open_ = []
        for _ in range(5):
            one = ending.enter_context(deaf(server.port, HEAD.replace(b"livez", b"large")))
            assert one.recv(1) == b"H"  # its answer has started, and the server keeps the rest
            open_.append(one)
        assert is_live(server.port)
        assert [bytes_received(one, LARGE) >= LARGE for one in open_] == [False] * 3 + [True] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_pipelined_requests_are_answered_one_at_a_time() -> None:
    counting, made = app(), []

    @counting.get("/counted")
    async def counted() -> Response:
        made.append("an answer")
        return Response(b"x" * LARGE)

    server = HttpServer(counting, HOST, 0)
    server.start()
    try:
        with deaf(server.port, 3 * HEAD.replace(b"livez", b"counted")) as one:
            assert (
                one.recv(1) == b"H"
            )  # the first answer has started, and the server keeps the rest
            assert is_live(server.port)
            assert len(made) == 1
            assert bytes_received(one, 3 * LARGE) >= 3 * LARGE
    finally:
        server.stop()


def test_connections_with_pipelined_requests_are_closed_for_new_ones(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST", 4)
    with ExitStack() as ending:
        for _ in range(4):
            one = ending.enter_context(connect(server.port))
            one.sendall(5 * HEAD.replace(b"livez", b"slow"))
        time.sleep(0.3)
        for _ in range(10):
            assert is_live(server.port)


def test_an_answer_that_is_read_too_slowly_is_abandoned(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections._LIMITS, "taking", 1)
    with deaf(server.port, HEAD.replace(b"livez", b"large")) as slow:
        count = 0
        for _ in range(20):
            time.sleep(0.1)
            with suppress(ConnectionError):
                count += len(slow.recv(4096))
        assert count + bytes_received(slow) < LARGE


def reset_log_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been logged in the last minute."""
    for limit in log_limits():
        monkeypatch.setattr(limit, "_next_s", -math.inf)


def log_limits() -> list[connections.LogLimit]:
    limits = logging.getLogger("uvicorn.error").filters
    return [limit for limit in limits if isinstance(limit, connections.LogLimit)]


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "uvicorn.error"]


def test_no_client_can_fill_the_log_with_tracebacks(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        for _ in range(5):
            with connect(server.port) as stranger:
                stranger.sendall(HEAD.replace(b"livez", b"faulty"))
                assert stranger.recv(4096).startswith(b"HTTP/1.1 500 ")
                until("it is closed", partial(is_closed, stranger), 5)

    reset_log_limits(monkeypatch)
    fail()
    [first] = logged(caplog)
    assert first.exc_info is not None
    reset_log_limits(monkeypatch)
    fail()
    _, second = logged(caplog)
    assert second.message == "Exception in ASGI application (4 more were not logged)"


def test_invalid_http_is_logged_once(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reset_log_limits(monkeypatch)
    for limit in log_limits():  # other tests send invalid HTTP as well
        monkeypatch.setattr(limit, "_left_out", 0)
    for _ in range(20):
        with connect(server.port) as stranger:
            stranger.sendall(b"\x16\x03\x01\r\n\r\n")
            assert stranger.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert [record.message for record in logged(caplog)] == ["Invalid HTTP request received."]


CHUNKED = b"%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("path", [b"GET /livez", b"POST /length", b"GET /large"])
@pytest.mark.parametrize("is_answered_before", [True, False])
def test_invalid_http_in_bodies_does_not_fill_the_log(
    server: HttpServer, caplog: pytest.LogCaptureFixture, path: bytes, is_answered_before: bool
) -> None:
    for _ in range(5):
        with connect(server.port) as stranger:
            stranger.sendall(CHUNKED % path)
            if is_answered_before and b"length" not in path:
                assert stranger.recv(4096).startswith(b"HTTP/1.1 200 ")
            stranger.sendall(b"zz\r\n")
            until("it is closed", partial(is_closed, stranger), 5)
        assert is_live(server.port)
    assert [record.message for record in caplog.records if record.levelno > logging.WARNING] == []


def test_an_invalid_body_is_answered_with_400(server: HttpServer) -> None:
    for path in (b"GET /livez", b"POST /length"):
        with connect(server.port) as stranger:
            stranger.sendall(CHUNKED % path + b"zz\r\n")
            assert stranger.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_a_failing_connection_is_logged_rarely(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(connections.Connection, "handle_events", fail)
    for _ in range(5):
        with connect(server.port) as stranger:
            stranger.sendall(HEAD)
            until("it is closed", partial(is_closed, stranger), 5)
    assert len(caplog.records) == 1


FEW_FILES = """
import logging, os, resource, sys
logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from blackbox.api.serve import HttpServer
from tests.service.test_connections import app
server = HttpServer(app(), "127.0.0.1", 0)
server.start()
print(server.port, flush=True)
for line in sys.stdin:
    kept = []
    try:
        while True:
            kept.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        os.close(kept.pop())
    print("none is left", flush=True)
    sys.stdin.readline()
    for one in kept:
        os.close(one)
    print("some are left", flush=True)
"""


@pytest.fixture
def modest(tmp_path: Path) -> Iterator[tuple[int, subprocess.Popen[str], Path]]:
    """The port of a server whose process may have 256 files, its process, and its log."""
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-c", FEW_FILES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        yield int(process.stdout.readline()), process, log
        process.kill()


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_probe_is_answered_while_a_thousand_connections_idle(
    modest: tuple[int, subprocess.Popen[str], Path],
) -> None:
    port, _, log = modest
    with ExitStack() as ending:
        for _ in range(1000):
            ending.enter_context(connect(port))
        for _ in range(20):
            assert is_live(port)
    assert len(log.read_text().splitlines()) == 1


def test_a_process_without_file_descriptors_logs_it_once_and_recovers(
    modest: tuple[int, subprocess.Popen[str], Path],
) -> None:
    port, process, log = modest
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("take all\n")
    process.stdin.flush()
    assert process.stdout.readline() == "none is left\n"
    with ExitStack() as ending:
        for _ in range(60):
            ending.enter_context(connect(port))
        time.sleep(1.5)  # asyncio tries again after 1 s
        process.stdin.write("give them back\n")
        process.stdin.flush()
        assert process.stdout.readline() == "some are left\n"
        assert is_live(port)
    told = log.read_text().splitlines()
    assert len(told) == 1
    assert "cannot accept HTTP connections" in told[0]
