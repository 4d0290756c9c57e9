"""The probes and metrics over real HTTP, of a fake and of a real service."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from blackbox.api.app import make_probes
from blackbox.api.metrics_text import MOST_SAVED_S, SHARE
from blackbox.api.serve import STOP_S, HttpServer
from blackbox.config.settings_error import SettingsError
from blackbox.embedded.tcp_ports import free_port
from blackbox.engine.metrics import Metrics
from blackbox.records.request import Shard
from tests.support.world import World, until

HOST = "127.0.0.1"


@dataclass
class Patient:
    """A service in the state that a test gives it."""

    in_the_way: list[Shard] = field(default_factory=list)
    closed: list[Shard] = field(default_factory=list)
    has_joined: bool = True
    why: dict[Shard, str] = field(default_factory=dict)

    def is_live(self) -> bool:
        return not self.in_the_way

    def is_ready(self) -> bool:
        return self.has_joined and not self.closed

    def stuck(self) -> list[Shard]:
        return self.in_the_way

    def not_open(self) -> list[Shard]:
        return self.closed

    def why_not_open(self) -> dict[Shard, str]:
        return self.why


@pytest.fixture
def patient() -> Patient:
    return Patient()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def server(patient: Patient, metrics: Metrics) -> Iterator[HttpServer]:
    server = HttpServer(make_probes(patient, metrics), HOST, 0)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{HOST}:{server.port}", trust_env=False) as client:
        yield client


def test_a_service_that_delivers_is_live(client: httpx.Client) -> None:
    answer = client.get("/livez")
    assert (answer.status_code, answer.json()) == (200, {"live": True, "stuck": []})


def test_a_stuck_service_is_not_live_and_names_its_shards(
    client: httpx.Client, patient: Patient
) -> None:
    patient.in_the_way = [Shard("TB", 0), Shard("TB", 2)]
    answer = client.get("/livez")
    assert (answer.status_code, answer.json()) == (503, {"live": False, "stuck": ["TB-0", "TB-2"]})


def test_a_service_whose_shards_are_open_is_ready(client: httpx.Client) -> None:
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "not_open": []})


def test_a_service_with_a_shard_to_open_is_not_ready_and_names_it(
    client: httpx.Client, patient: Patient
) -> None:
    patient.closed = [Shard("TB", 1)]
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "not_open": ["TB-1"]})


def test_readyz_says_why_a_shard_does_not_open(client: httpx.Client, patient: Patient) -> None:
    patient.closed, patient.why = [Shard("TB", 1)], {Shard("TB", 1): "TB was created again"}
    assert client.get("/readyz").json() == {
        "ready": False, "not_open": ["TB-1"], "why": {"TB-1": "TB was created again"},
    }  # fmt: skip


def test_a_service_that_waits_for_its_shards_is_live_and_not_ready(
    client: httpx.Client, patient: Patient
) -> None:
    patient.has_joined = False
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").status_code == 503


def test_a_probe_is_never_answered_from_a_cache(client: httpx.Client) -> None:
    found = [client.get(path).headers["cache-control"] for path in ("/livez", "/readyz")]
    assert found == ["no-store", "no-store"]


def test_a_probe_accepts_head_requests(client: httpx.Client) -> None:
    answer = client.head("/livez")
    assert (answer.status_code, answer.content) == (200, b"")


def test_metrics_are_prometheus_text(client: httpx.Client, metrics: Metrics) -> None:
    metrics.show(Shard("TB", 0), shard_open=True)
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'blackbox_shard_open{shard="TB-0"} 1.0' in answer.text


def test_metrics_are_openmetrics_on_request(client: httpx.Client) -> None:
    answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
def test_metrics_are_prometheus_text_for_an_unknown_version(
    client: httpx.Client, kind: str
) -> None:
    answer = client.get("/metrics", headers={"Accept": f"{kind};version=x"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")


class Slow:
    """A collector that takes its time, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def collect(self) -> Iterator[Metric]:
        self.asked += 1
        time.sleep(0.05)
        yield GaugeMetricFamily("asked", "how often", self.asked)


def test_metrics_take_a_tenth_of_the_thread_whatever_clients_accept(
    server: HttpServer, client: httpx.Client, metrics: Metrics
) -> None:
    slow = Slow()
    metrics.registry.register(slow)
    accepted = ["*/*", *(f"application/openmetrics-text;version=1.{n}" for n in range(30))]
    accepted += [f"text/plain;version=1.{n};escaping=values" for n in range(30)]
    began = time.monotonic()
    while time.monotonic() - began < 2.5:
        for accept in accepted:
            assert client.get("/metrics", headers={"Accept": accept}).status_code == 200
    most_s = MOST_SAVED_S + SHARE * (time.monotonic() - began)
    # both texts are rendered once in any case
    assert 2 < slow.asked <= most_s / 0.05 + 2


def test_a_client_that_asks_now_and_then_gets_what_holds_now(
    client: httpx.Client, metrics: Metrics
) -> None:
    for pending in range(10):
        metrics.show(Shard("TB", 0), pending=pending)
        assert f'blackbox_pending{{shard="TB-0"}} {pending}.0' in client.get("/metrics").text


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc", "/openapi.json", "/livez/"])
def test_other_paths_are_not_found(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_probes_accept_only_reads(client: httpx.Client, method: str) -> None:
    assert client.request(method, "/livez").status_code == 405


def test_the_server_header_is_not_sent(client: httpx.Client) -> None:
    assert "server" not in client.get("/livez").headers


def test_the_http_server_does_not_change_signal_handlers(
    patient: Patient, metrics: Metrics
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server = HttpServer(make_probes(patient, metrics), HOST, 0)
    server.start()
    during = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server.stop()
    assert before == during


def test_the_server_uses_the_configured_port(patient: Patient, metrics: Metrics) -> None:
    port = free_port()
    server = HttpServer(make_probes(patient, metrics), HOST, port)
    server.start()
    try:
        assert server.port == port
        assert httpx.get(f"http://{HOST}:{port}/livez", trust_env=False).status_code == 200
    finally:
        server.stop()


def test_an_occupied_port_is_named(server: HttpServer, patient: Patient, metrics: Metrics) -> None:
    second = HttpServer(make_probes(patient, metrics), HOST, server.port)
    wanted = f"BLACKBOX_HTTP_HOST='{HOST}', BLACKBOX_HTTP_PORT={server.port}: .*in use.*free port"
    with pytest.raises(SettingsError, match=wanted):
        second.start()
    second.stop()


def test_an_address_of_another_host_is_named(patient: Patient, metrics: Metrics) -> None:
    server = HttpServer(make_probes(patient, metrics), "203.0.113.7", 0)
    with pytest.raises(SettingsError, match=r"BLACKBOX_HTTP_HOST='203\.0\.113\.7'.* this host"):
        server.start()


def test_the_port_before_the_start_is_an_error(patient: Patient, metrics: Metrics) -> None:
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        _ = HttpServer(make_probes(patient, metrics), HOST, 0).port


def test_a_stopped_server_frees_its_port(server: HttpServer) -> None:
    port = server.port
    server.stop()
    server.stop()
    assert "http" not in {thread.name for thread in threading.enumerate()}
    socket.create_server((HOST, port)).close()


def test_an_unstarted_server_can_be_stopped(patient: Patient, metrics: Metrics) -> None:
    HttpServer(make_probes(patient, metrics), HOST, 0).stop()


def test_a_silent_client_does_not_hold_up_the_stop(server: HttpServer) -> None:
    request = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    with socket.create_connection((HOST, server.port)) as silent:
        silent.sendall(request)
        assert silent.recv(4096).startswith(b"HTTP/1.1 200 ")
        silent.sendall(request[:10])
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < STOP_S


@pytest.mark.service
def test_a_real_service_becomes_live_and_ready_and_counts(world: World) -> None:
    service = world.start_service()
    until("the probe answers", lambda: service.get("/livez")[0] == 200)
    service.wait_ready()
    assert service.get("/readyz") == (200, '{"ready":true,"not_open":[]}')
    assert service.get("/livez") == (200, '{"live":true,"stuck":[]}')
    assert service.metric("blackbox_shard_open") == 4
    assert service.metric("blackbox_recoveries_total") == 4


@pytest.mark.service
def test_a_service_that_lost_its_redis_names_the_shards_that_are_not_open(
    fragile_world: World,
) -> None:
    world = fragile_world
    service = world.start_service(poll_interval_ms=100)
    service.wait_ready()
    world.redis.kill()
    shards = [f"{world.requests}-{partition}" for partition in range(4)]

    def are_closed() -> bool:
        status, body = service.get("/readyz")
        return status == 503 and json.loads(body)["not_open"] == shards

    until("all shards are closed", are_closed)
    assert service.metric("blackbox_shard_open") == 0
    world.redis.start()
    service.wait_ready()
    assert service.metric("blackbox_shard_open") == 4
