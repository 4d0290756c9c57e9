"""Checks before a request reaches its route, on a real HTTP server; no Kafka, no Redis."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Event
from typing import Any, cast

import httpx
import pytest

from blackbox.admin.admin import Admin, Stats
from blackbox.admin.changes import Rescheduled
from blackbox.admin.pending import Cursor, FoundPending, PendingFilter
from blackbox.api import access_middleware, connections, turns
from blackbox.api.access import OPEN_FOLDER, OPEN_PATHS
from blackbox.api.app import make_app
from blackbox.api.dead_letters import MOST_ANSWER_BYTES
from blackbox.api.requests import MOST_AT_ONCE
from blackbox.api.serve import HttpServer
from blackbox.api.turns import READS_AT_ONCE
from blackbox.config.settings import load
from blackbox.config.settings_error import SettingsError
from blackbox.core.request_status import RequestStatus
from blackbox.engine.metrics import Metrics
from blackbox.index.inspector import Pending
from blackbox.journal.dead_letter_topic import MOST_SHOWN_BYTES, DeadLetter
from blackbox.records.entry import Entry
from blackbox.records.request import Shard
from tests.service.test_http import HOST, Patient
from tests.support.world import until

LOOK, CHANGE = "l" * 16, "c" * 16
BODIES = [
    ("POST", "/requests"),
    ("POST", "/requests/bulk"),
    ("PATCH", "/requests/x"),
    ("POST", "/dead-letters/replay"),
    ("POST", "/dead-letters/discard"),
]
"""All operations with a body."""

SMALL = {"/requests/x": 64 << 10, "/dead-letters/replay": 1 << 20, "/dead-letters/discard": 1 << 20}
"""Operations with a smaller limit."""


class Nobody:
    """An admin that must not be called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


Open = Callable[..., HttpServer]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Starts a server with more settings; it calls `control`, by default one that must not be called."""
    with ExitStack() as ending:

        def start(admin: object | None = None, **more: object) -> HttpServer:
            settings = load(kafka_bootstrap_servers="127.0.0.1:1", **more)
            asked = cast(Admin, admin or Nobody())
            server = HttpServer(make_app(Patient(), Metrics(), asked, settings), HOST, 0)
            server.start()
            ending.callback(server.stop)
            return server

        yield start


@pytest.fixture
def guarded(opened: Open) -> HttpServer:
    return opened(api_token=CHANGE, api_read_token=LOOK)


def client(server: HttpServer, token: str | None = None) -> httpx.Client:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=f"http://{HOST}:{server.port}", headers=headers, trust_env=False)


def answer(server: HttpServer, method: str, path: str, *lines: str, body: bytes = b"") -> int:
    """The status of the answer to this head and part of a body, while the client waits."""
    head = [f"{method} {path} HTTP/1.1", f"Host: {HOST}:{server.port}", *lines, "", ""]
    with socket.create_connection((HOST, server.port), timeout=10) as connection:
        connection.sendall("\r\n".join(head).encode() + body)
        return int(connection.recv(4096).split()[1])


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_a_request_without_a_valid_token_is_refused_before_its_body(
    guarded: HttpServer, method: str, path: str
) -> None:
    length = f"Content-Length: {access_middleware.MOST_BYTES}"
    assert answer(guarded, method, path, length) == 401
    assert answer(guarded, method, path, length, "Authorization: Bearer wrong") == 401
    assert answer(guarded, method, path, "Transfer-Encoding: chunked") == 401


@pytest.mark.parametrize(("method", "path"), BODIES)
@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_a_request_from_another_site_is_refused_before_its_body(
    opened: Open, method: str, path: str, kind: str
) -> None:
    length, kind = f"Content-Length: {access_middleware.MOST_BYTES}", f"Content-Type: {kind}"
    server = opened()
    assert answer(server, method, path, length, kind, "Origin: https://evil.example") == 403
    assert answer(server, method, path, length, kind, "Origin: null") == 403
    assert answer(server, method, path, length, kind, "Sec-Fetch-Site: cross-site") == 403


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_a_body_announced_as_too_large_is_not_read(
    guarded: HttpServer, method: str, path: str
) -> None:
    length, token = (
        f"Content-Length: {access_middleware.MOST_BYTES + 1}",
        f"Authorization: Bearer {CHANGE}",
    )
    assert answer(guarded, method, path, length, token) == 413


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/openapi.json", "/", "/requests"])
def test_a_query_with_thousands_of_parameters_is_refused(guarded: HttpServer, path: str) -> None:
    token, most = f"Authorization: Bearer {CHANGE}", access_middleware.MOST_PARAMETERS
    assert answer(guarded, "GET", f"{path}?" + "&".join(most * ["a"]), token) != 400
    assert answer(guarded, "GET", f"{path}?" + "&".join(5000 * ["a"]), token) == 400


@pytest.mark.parametrize(("path", "most"), SMALL.items())
def test_the_body_of_a_small_request_has_a_small_limit(
    guarded: HttpServer, path: str, most: int
) -> None:
    method = "PATCH" if path == "/requests/x" else "POST"
    length, token = f"Content-Length: {most + 1}", f"Authorization: Bearer {CHANGE}"
    assert answer(guarded, method, path, length, token) == 413
    with client(guarded, CHANGE) as allowed:
        refused = allowed.request(method, path, content=(b" " * 1024 for _ in range(most // 1024)))
        assert refused.status_code == 422
        refused = allowed.request(
            method, path, content=(b" " * 1025 for _ in range(most // 1024 + 1))
        )
    assert (refused.status_code, str(most) in refused.json()["error"]) == (413, True)


def test_an_error_lists_only_the_first_of_many_faults(guarded: HttpServer) -> None:
    body = json.dumps({f"name-{number}": 0 for number in range(1000)})
    with client(guarded, CHANGE) as allowed:
        refused = allowed.patch("/requests/x", content=body)
    told = refused.json()["error"].split("; ")
    assert (refused.status_code, len(told), told[-1]) == (422, 11, "and 990 more")


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_a_body_is_read_only_up_to_its_limit(guarded: HttpServer, method: str, path: str) -> None:
    parts = (b"x" * 65536 for _ in range(2 * access_middleware.MOST_BYTES // 65536))
    with client(guarded, CHANGE) as allowed:
        refused = allowed.request(
            method, path, content=parts, headers={"Content-Type": "application/json"}
        )
    assert refused.status_code == 413
    assert str(SMALL.get(path, access_middleware.MOST_BYTES)) in refused.json()["error"]


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_a_body_that_does_not_arrive_times_out(
    guarded: HttpServer, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    monkeypatch.setattr(access_middleware, "BODY_WITHIN_S", 0.2)
    token = f"Authorization: Bearer {CHANGE}"
    assert answer(guarded, method, path, "Content-Length: 100", token, body=b"{") == 408


def test_every_route_except_the_open_ones_requires_a_token(guarded: HttpServer) -> None:
    with client(guarded) as stranger, client(guarded, LOOK) as reader:
        described = stranger.get("/openapi.json").json()["paths"]
        assert len(described) > 10
        for path, operations in described.items():
            for method in operations:
                status = stranger.request(method, path).status_code
                assert status == (200 if path in OPEN_PATHS else 401), (method, path)
                if method != "get":
                    assert reader.request(method, path).status_code in (401, 403)
        assert stranger.get("/nothing-of-the-kind").status_code == 401
        assert stranger.get(f"{OPEN_FOLDER}../stats").status_code in (401, 404)


def test_the_openapi_description_includes_the_limit_of_bodies(guarded: HttpServer) -> None:
    with client(guarded) as stranger:
        described = stranger.get("/openapi.json").json()["paths"]
    taking = [
        (path, operation)
        for path, operations in described.items()
        for operation in operations.values()
        if "requestBody" in operation
    ]
    assert len(taking) == len(BODIES)
    assert [path for path, operation in taking if "413" not in operation["responses"]] == []


def test_a_client_that_disconnects_during_a_body_causes_no_error(
    guarded: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    head = [
        "POST /requests HTTP/1.1", f"Host: {HOST}", "Content-Length: 9",
        f"Authorization: Bearer {CHANGE}", "", "",
    ]  # fmt: skip
    with socket.create_connection((HOST, guarded.port)) as connection:
        connection.sendall("\r\n".join(head).encode() + b"{")
    with client(guarded) as stranger:
        for _ in range(20):
            assert stranger.get("/livez").status_code == 200
    assert caplog.records == []


def test_an_admitted_request_reaches_its_route_with_its_body(opened: Open) -> None:
    class Asked(Nobody):
        def send(self, values: list[bytes], caller: str | None) -> list[str]:
            return [f"{caller} asked for {json.loads(value)}" for value in values]

    with client(opened(Asked())) as allowed:
        taken = allowed.post("/requests/bulk", content=b"1\n\n2\n", headers={"CALLER_SERVICE": "x"})
    assert (taken.status_code, taken.json()) == (
        201, {"ids": ["x asked for 1", "x asked for 2"]},
    )  # fmt: skip


class Naming(Nobody):
    """Returns the name of the caller."""

    def send(self, values: list[bytes], caller: str | None) -> list[str]:
        return [str(caller)]


@pytest.mark.parametrize(
    ("headers", "caller"),
    [
        ([], "None"),
        ([(b"CALLER_SERVICE", b"shop")], "shop"),
        ([(b"Caller-Service", b"shop")], "shop"),
        ([(b"caller-service", b"shop"), (b"CALLER_SERVICE", b"shop")], "shop"),
        ([(b"CALLER_SERVICE", "käse".encode())], "käse"),
        ([(b"CALLER_SERVICE", b"")], "None"),
        ([(b"CALLER_SERVICE", b"x" * 255)], "x" * 255),
    ],
)
def test_a_caller_can_be_named_in_a_header_that_proxies_forward(
    opened: Open, headers: list[tuple[bytes, bytes]], caller: str
) -> None:
    with client(opened(Naming())) as allowed:
        taken = allowed.post("/requests", content=b"{}", headers=headers)
    assert (taken.status_code, taken.json()) == (201, {"ids": [caller]})


@pytest.mark.parametrize(
    "headers",
    [
        [(b"CALLER_SERVICE", b"x" * 256)],
        [(b"CALLER_SERVICE", b"\xff")],
        [(b"CALLER_SERVICE", "a\u202egnillib".encode())],
        [(b"Caller-Service", "a\u202egnillib".encode())],
        [(b"CALLER_SERVICE", b"shop"), (b"Caller-Service", b"billing")],
    ],
)
def test_an_invalid_caller_name_is_refused(
    opened: Open, headers: list[tuple[bytes, bytes]]
) -> None:
    with client(opened()) as allowed:
        refused = allowed.post("/requests", content=b"{}", headers=headers)
    assert refused.status_code == 422
    assert "255 printable characters" in refused.json()["error"]


class Crowded(Nobody):
    """A thousand callers, each with one request more than the previous one."""

    def stats(self, now_ms: int, edges_ms: Sequence[int]) -> Stats:
        many = Counter({f"caller-{number}": number + 1 for number in range(1000)})
        return Stats({}, many, Counter(shop=1), 500_500, [0] * (len(edges_ms) - 1))


def test_stats_list_only_the_callers_with_most_requests(opened: Open) -> None:
    with client(opened(Crowded())) as reader:
        told = reader.get("/stats").json()
    assert list(told["callers"]) == [f"caller-{number}" for number in range(999, 899, -1)]
    assert (told["callers_left_out"], told["targets_left_out"]) == (900, 0)


class Dead(Nobody):
    """A dead letter with secret content."""

    def letters(self, *_: object, **__: object) -> list[DeadLetter]:
        value = b'{"message": "secret"}'
        return [
            DeadLetter(
                place="letters/0@1", at_ms=0, reason="x", detail="x", source="x", caller="shop",
                key=b"secret", value=value, headers=[], value_bytes=21, target="orders",
            )
        ]  # fmt: skip


def test_the_content_of_dead_letters_requires_the_token_for_changes(opened: Open) -> None:
    server = opened(Dead(), api_token=CHANGE, api_read_token=LOOK)
    with client(server, LOOK) as reader, client(server, CHANGE) as operator:
        [seen] = reader.get("/dead-letters").json()["letters"]
        [whole] = operator.get("/dead-letters").json()["letters"]
    assert (seen["caller"], seen["target"], seen["value_bytes"]) == ("shop", "orders", 21)
    assert "secret" not in json.dumps(seen)
    assert (whole["key"], whole["value"]) == ("secret", '{"message": "secret"}')


class Binary(Nobody):
    """Any number of dead letters whose keys and values need several times as many bytes in an answer."""

    def letters(self, *_: object, limit: int, most_bytes: int, **__: object) -> list[DeadLetter]:
        text = b"\x01" * most_bytes
        return [
            DeadLetter(
                place="letters/0@1", at_ms=0, reason="x", detail="x", source="x", caller="shop",
                key=key, value=text, headers=[], value_bytes=len(text), target="orders",
            )
            for key in (text, b"\xff" * most_bytes) * (limit // 2)
        ]  # fmt: skip


@pytest.mark.parametrize("limit", [400, 1000])
def test_an_answer_with_dead_letters_is_limited_in_bytes(opened: Open, limit: int) -> None:
    with client(opened(Binary())) as reader:
        answer = reader.get("/dead-letters", params={"limit": limit})
    assert len(answer.json()["letters"]) == limit
    assert 0.9 * MOST_ANSWER_BYTES < len(answer.content) < MOST_ANSWER_BYTES + limit * 300


class Watched(Nobody):
    """Dead letters that are read slowly; records how many readers there are, and how much of each they request."""

    def __init__(self) -> None:
        self.looking = self.most_looking = 0
        self.wanted: list[int] = []

    def letters(self, *_: object, most_bytes: int, **__: object) -> list[DeadLetter]:
        self.looking += 1
        self.most_looking = max(self.most_looking, self.looking)
        self.wanted.append(most_bytes)
        time.sleep(0.2)
        self.looking -= 1
        return []


def test_dead_letters_are_read_by_one_client_at_a_time(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "LETTERS_WITHIN_S", 0.5)
    watched = Watched()
    with client(opened(watched)) as reader, ThreadPoolExecutor(8) as threads:
        look = partial(reader.get, "/dead-letters", params={"limit": 1000})
        answers = [threads.submit(look) for _ in range(8)]
        statuses = Counter(one.result().status_code for one in answers)
        assert reader.get("/dead-letters").status_code == 200
    assert watched.most_looking == 1
    assert statuses[200] >= 2
    assert statuses[200] + statuses[503] == 8
    assert 2 * 1000 * watched.wanted[0] <= MOST_ANSWER_BYTES
    assert watched.wanted[-1] == MOST_SHOWN_BYTES


class Blocked(Nobody):
    """Dead letters that are read when this is permitted."""

    def __init__(self) -> None:
        self.may_read = Event()

    def letters(self, *_: object, **__: object) -> list[DeadLetter]:
        self.may_read.wait(30)
        return []


def test_probes_are_answered_while_every_other_connection_has_a_request(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST", 64)
    blocked = Blocked()
    server = opened(blocked)
    head = f"GET /dead-letters HTTP/1.1\r\nHost: {HOST}:{server.port}\r\n\r\n"
    with ExitStack() as ending:
        ending.callback(blocked.may_read.set)
        for _ in range(connections.MOST):
            one = ending.enter_context(socket.create_connection((HOST, server.port), timeout=10))
            one.sendall(head.encode())
        for _ in range(10):
            with client(server) as probe:
                assert probe.get("/livez").status_code == 200


class Scheduled(Nobody):
    """Pages of schedules, each with a number of messages of a given size."""

    def __init__(self, *counts: int, size: int = 10) -> None:
        self._counts = counts
        self._size = size
        self.read = 0

    def page(
        self, _: PendingFilter, after: Cursor | None, *__: object, whole: bool
    ) -> tuple[list[FoundPending], Cursor | None]:
        assert whole
        self.read += 1
        number = 0 if after is None else after.offset
        place = Cursor(0, Shard("TB", 0), number + 1)
        entry = Entry("orders", b"x" * self._size, 0, caller_id=f"page {number}")
        found = [FoundPending(place, Pending(0, entry))] * self._counts[number]
        return found, place if number + 1 < len(self._counts) else None

    def paused(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("counts", [(0,), (1,), (2, 0, 1), (0, 3), (2, 0)])
def test_schedules_have_all_pages(opened: Open, counts: tuple[int, ...]) -> None:
    with client(opened(Scheduled(*counts))) as reader:
        found = reader.get("/schedules").json()
    assert [one["id"] for one in found] == [
        f"page {number}" for number, count in enumerate(counts) for _ in range(count)
    ]


def test_slow_readers_of_schedules_do_not_block_other_reads(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "READ_WITHIN_S", 0.2)
    scheduled, slow = Scheduled(1, 1, size=6 << 20), READS_AT_ONCE + 1
    server = opened(scheduled)
    with ExitStack() as ending:
        for _ in range(slow):
            one = ending.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(10)
            one.connect((HOST, server.port))
            head = f"GET /schedules HTTP/1.1\r\nHost: {HOST}:{server.port}\r\n\r\n"
            one.sendall(head.encode())
            assert one.recv(1) == b"H"
        with client(server) as other:
            assert other.get("/targets/paused").status_code == 200
            assert scheduled.read == slow
            assert len(other.get("/schedules").content) > 16_000_000


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://["},
        {"Origin": "http://localhost:1"},
        {"Origin": "http://localhost"},
        {"Origin": "http://localhost:99999"},
        {"Host": "localhost:x"},
        {"Host": "["},
        {"Host": "evil.example"},
    ],
)
def test_a_request_for_another_host_is_refused(opened: Open, headers: dict[str, str]) -> None:
    with client(opened()) as website:
        for method, path in (("POST", "/requests"), ("GET", "/stats"), ("GET", "/metrics")):
            assert website.request(method, path, headers=headers).status_code == 403


def test_a_request_of_the_services_own_page_is_accepted(opened: Open) -> None:
    server = opened(Naming())
    with client(server) as page:
        for name in ("127.0.0.1", "localhost", "[::1]"):
            origin = {"Origin": f"http://{name}:{server.port}", "Sec-Fetch-Site": "same-origin"}
            assert page.post("/requests", content=b"{}", headers=origin).status_code == 201


def test_a_change_with_a_read_token_is_refused_with_the_remedy(guarded: HttpServer) -> None:
    with client(guarded, LOOK) as reader, client(guarded, "w" * 16) as stranger:
        refused = reader.delete("/requests/x")
        assert (refused.status_code, "BLACKBOX_API_TOKEN" in refused.text) == (403, True)
        assert "insufficient_scope" in refused.headers["WWW-Authenticate"]
        assert stranger.delete("/requests/x").status_code == 401


def test_a_token_with_a_trailing_newline_is_accepted(opened: Open) -> None:
    with client(opened(Crowded(), api_token=f"{CHANGE}\n"), CHANGE) as operator:
        assert operator.get("/stats").status_code == 200


@pytest.mark.parametrize("token", ["ä" * 16, "a\x00" * 8, "short", " " * 20])
def test_a_token_that_is_invalid_in_a_header_is_refused(token: str) -> None:
    with pytest.raises(SettingsError, match=r"BLACKBOX_API_TOKEN=\(hidden\)"):
        load(kafka_bootstrap_servers="127.0.0.1:1", api_token=token)


@pytest.mark.parametrize("topic", ["%2e", "%2e%2e", "a%20b"])
@pytest.mark.parametrize("how", ["pause", "resume"])
def test_pausing_an_invalid_topic_name_is_refused(opened: Open, topic: str, how: str) -> None:
    port = opened().port
    with socket.create_connection((HOST, port), timeout=10) as connection:
        head = f"POST /targets/{topic}/{how} HTTP/1.1\r\nHost: {HOST}:{port}\r\n"
        connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 422 ")


class Moving(Nobody):
    """Reschedules any request."""

    def reschedule(
        self, id: str, *, countdown_s: float | None, at: str | int | None
    ) -> Rescheduled:
        return Rescheduled("too-late", RequestStatus(id, f"{countdown_s} {at}", "ended"))


@pytest.mark.parametrize("kind", [{}, {"Content-Type": "application/x-www-form-urlencoded"}])
def test_a_body_is_parsed_as_json_whatever_its_content_type(
    opened: Open, kind: dict[str, str]
) -> None:
    with client(opened(Moving())) as allowed:
        moved = allowed.patch("/requests/x", content=b'{"countdown": 60}', headers=kind)
        assert (moved.status_code, moved.json()["request"]["source"]) == (200, "60.0 None")


@pytest.mark.parametrize(
    "body",
    [
        "{}", '{"countdown": NaN}', '{"countdown": Infinity}', '{"countdown": 1e999}', "", "[]",
        '{"countdown": 1, "at": 2}', '{"countdown": null}', '{"countdown": "9"}', '{"at": true}',
        '{"at": 1e30}', '{"at": 1000000000000000000000}', '{"in": 9}', "{",
    ],
)  # fmt: skip
def test_a_reschedule_without_a_valid_time_is_refused(opened: Open, body: str) -> None:
    with client(opened()) as allowed:
        refused = allowed.patch("/requests/x", content=body)
    assert (refused.status_code, bool(refused.json()["error"])) == (422, True)


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_slow_senders_do_not_block_others(
    opened: Open, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    monkeypatch.setattr(turns, "CHANGES_AT_ONCE", 2)
    monkeypatch.setattr(turns, "CHANGE_WITHIN_S", 0.5)
    server = opened(Naming())
    head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}:{server.port}\r\nContent-Length: 9\r\n\r\n"
    with ExitStack() as ending, client(server) as prompt:
        for _ in range(2):
            slow = ending.enter_context(socket.create_connection((HOST, server.port)))
            slow.sendall(head.encode() + b"{")
        time.sleep(0.2)
        assert prompt.post("/requests", content=b"{}").status_code == 201


def test_bodies_are_limited_in_total_bytes(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_middleware, "MOST_HELD_BYTES", 1 << 20)
    server = opened(Naming())
    head = (
        f"POST /requests HTTP/1.1\r\nHost: {HOST}:{server.port}\r\nContent-Length: 1000000\r\n\r\n"
    )
    large, small = b"x" * 500_000, b"x" * access_middleware.FREE_BYTES
    with client(server) as other:
        with socket.create_connection((HOST, server.port)) as slow:
            slow.sendall(head.encode() + 900_000 * b"x")
            time.sleep(0.5)
            refused = other.post("/requests", content=large)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert other.post("/requests", content=small).status_code == 201
        for _ in range(10):  # bodies of answered requests are freed
            until("it fits", lambda: other.post("/requests", content=large).status_code == 201, 5)
            assert other.post("/requests", content=large).status_code == 201


def test_some_of_too_many_large_bodies_are_accepted(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_middleware, "MOST_HELD_BYTES", 16 << 20)
    with client(opened(Naming())) as allowed, ThreadPoolExecutor(8) as threads:
        body = (6 << 20) * b"x"
        answers = [threads.submit(allowed.post, "/requests", content=body) for _ in range(8)]
        statuses = Counter(one.result().status_code for one in answers)
    assert set(statuses) <= {201, 503}
    assert statuses[201] >= 2


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_bulk_with_too_many_lines_is_refused(opened: Open, end: bytes) -> None:
    with client(opened(Naming())) as allowed:
        assert allowed.post("/requests/bulk", content=MOST_AT_ONCE * (b"{}" + end)).is_success
        for line in (b"{}", b""):
            body = MOST_AT_ONCE * (line + end) + b"{}"
            refused = allowed.post("/requests/bulk", content=body)
            assert (refused.status_code, str(MOST_AT_ONCE) in refused.json()["error"]) == (
                413,
                True,
            )


@pytest.mark.parametrize("body", [b"", b"\n", b" \n\n "])
def test_an_empty_bulk_is_refused(opened: Open, body: bytes) -> None:
    with client(opened()) as allowed:
        refused = allowed.post("/requests/bulk", content=body)
    assert (refused.status_code, "no request" in refused.json()["error"]) == (422, True)
