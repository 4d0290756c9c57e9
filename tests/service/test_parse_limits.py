"""Input that is short to send and long to parse, over real connections: all clients share one thread."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Request

from blackbox.api import connections
from blackbox.api.connections import READ_BYTES
from blackbox.api.http_parser import (
    FREE_CHUNKS,
    LEAST_CHUNK_BYTES,
    MOST_HEAD_BYTES,
    MOST_HEADER_LINES,
)
from blackbox.api.serve import HttpServer
from tests.support.world import until

HOST = "127.0.0.1"


def app() -> FastAPI:
    app = FastAPI()

    @app.api_route("/livez", methods=["GET", "HEAD"])
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.post("/length")
    async def length(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    return app


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = HttpServer(app(), HOST, 0)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: HttpServer) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, server.port), timeout=10) as client:
        yield client


def head(more: bytes = b"", first: bytes = b"GET /livez") -> bytes:
    return first + b" HTTP/1.1\r\nHost: a\r\n" + more + b"\r\n"


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return (
        head(b"Transfer-Encoding: chunked\r\n", b"POST /length")
        + body
        + b"0\r\n"
        + trailers
        + b"\r\n"
    )


def until_closed(client: socket.socket) -> bytes:
    """All that the server sends until it closes its side."""
    answer = b""
    while part := client.recv(65536):
        answer += part
    return answer


def next_answer(client: socket.socket) -> bytes:
    """An answer with a JSON object."""
    answer = b""
    while not answer.endswith(b"}"):
        part = client.recv(65536)
        assert part, answer
        answer += part
    return answer


def can_send(client: socket.socket) -> bool:
    try:
        client.sendall(b"x")
    except ConnectionError:
        return False
    return True


LINES = b"a:b\r\n" * (MOST_HEADER_LINES - 1)  # beside that with the host
LONG = b"a:" + b"b" * (MOST_HEAD_BYTES - len(head()) - 4) + b"\r\n"


@pytest.mark.parametrize("more", [LINES, LONG])
def test_a_head_within_the_limits_is_answered(client: socket.socket, more: bytes) -> None:
    for _ in range(2):
        client.sendall(head(more))
        assert next_answer(client).startswith(b"HTTP/1.1 200 ")


REFUSED = {
    "lines": (LINES + b"a:b\r\n", b"more than 100 header lines"),
    "continued lines": (b"a:b\r\n" + b" c\r\n" * MOST_HEADER_LINES, b"more than 100 header lines"),
    "bytes": (b"a" + LONG, b"more than 16384 bytes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_larger_head_is_refused_also_if_it_arrives_as_a_whole(
    client: socket.socket, kind: str
) -> None:
    more, why = REFUSED[kind]
    client.sendall(head(more))
    answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert why in answer


@pytest.mark.parametrize("kind", REFUSED)
def test_a_larger_head_is_refused_before_its_end(client: socket.socket, kind: str) -> None:
    client.sendall(head(REFUSED[kind][0] + b"a:b\r\n")[:-2])
    assert until_closed(client).startswith(b"HTTP/1.1 431 ")


def test_a_client_that_sends_on_gets_the_answer_to_a_head_that_is_too_large(
    client: socket.socket,
) -> None:
    for _ in range(50):
        client.sendall(b"GET /livez HTTP/1.1\r\n" + b"a:b\r\n" * 10_000)
    assert until_closed(client).startswith(b"HTTP/1.1 431 ")


def test_a_larger_head_is_refused_behind_another_request(client: socket.socket) -> None:
    client.sendall(head() + head(LINES + b"a:b\r\n"))
    first, _, second = until_closed(client).partition(b"}")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 431 ")


def test_a_larger_head_is_refused_behind_a_body_that_is_not_read(client: socket.socket) -> None:
    client.sendall(head(b"Content-Length: 4\r\n"))
    assert next_answer(client).startswith(b"HTTP/1.1 200 ")
    client.sendall(b"abcd" + head(LINES + b"a:b\r\n"))
    assert until_closed(client).startswith(b"HTTP/1.1 431 ")


def test_bodies_and_pipelined_requests_do_not_count_as_heads(client: socket.socket) -> None:
    body = b"\n" * 3 * READ_BYTES
    post = head(b"Content-Length: %d\r\n" % len(body), b"POST /length") + body
    client.sendall(3 * post + 100 * head())
    answers = b""
    while answers.count(b"}") < 103:
        answers += client.recv(65536)
    assert answers.count(b'{"length":%d}' % len(body)) == 3
    assert answers.count(b"HTTP/1.1 200 ") == 103


def test_a_head_sent_byte_by_byte_is_answered_quickly(client: socket.socket) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began = time.monotonic()
    for byte in head(LONG):
        client.send(bytes([byte]))
    assert next_answer(client).startswith(b"HTTP/1.1 200 ")
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("trailers", [LINES + 2 * b"a:b\r\n", b"a" + LONG + b"b" * 100])
def test_trailers_have_the_limits_of_a_head(client: socket.socket, trailers: bytes) -> None:
    client.sendall(chunked(b"x", trailers=b"a:b\r\n"))
    assert b'{"length":1}' in next_answer(client)
    client.sendall(chunked(b"x", trailers=LINES + b"a:b\r\n" + trailers))
    assert until_closed(client).startswith(b"HTTP/1.1 431 ")


def test_a_body_in_many_tiny_chunks_is_refused(client: socket.socket) -> None:
    client.sendall(chunked(*[b"x"] * FREE_CHUNKS))
    assert b'{"length":%d}' % FREE_CHUNKS in next_answer(client)
    client.sendall(chunked(*[b"x"] * 2 * FREE_CHUNKS))
    answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"chunks of less than 32 bytes on average" in answer


def test_a_body_with_a_request_in_each_chunk_is_read(client: socket.socket) -> None:
    client.sendall(chunked(*[b"x" * LEAST_CHUNK_BYTES] * 5000))
    assert b'{"length":%d}' % (5000 * LEAST_CHUNK_BYTES) in next_answer(client)


def test_the_answer_to_an_invalid_head_request_has_no_body(
    client: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    client.sendall(head(b"Transfer-Encoding: chunked\r\n", b"HEAD /livez") + b"zz\r\n")
    answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\n")
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


def test_a_refused_client_that_does_not_leave_is_disconnected(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections._LIMITS, "leftover", 0.3)
    client.sendall(head(LINES + b"a:b\r\n"))
    assert until_closed(client).startswith(b"HTTP/1.1 431 ")
    until("it is disconnected", lambda: not can_send(client), 5)
