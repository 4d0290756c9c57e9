"""Notes between processes, through a real Redis."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from blackbox.embedded import EmbeddedRedis
from blackbox.embedded.tcp_ports import free_port
from blackbox.engine.spark.dispatch_task import ABANDONED_S
from blackbox.index import bus as bus_module
from blackbox.index.bus import Bus, Listener
from blackbox.records.errors import IndexLost
from tests.support.world import until

WAIT_S = 0.1
REPEATED_S = 1.0  # of leases

OpenListener = Callable[..., Listener]
OpenBus = Callable[..., Bus]


@pytest.fixture
def open_listener(real_redis: EmbeddedRedis) -> Iterator[OpenListener]:
    """A listener that is already subscribed; all of them are closed at the end."""
    opened: list[Listener] = []

    def open_listener(name: str, *kinds: str, url: str = real_redis.url) -> Listener:
        opened.append(Listener(url, name, kinds))
        assert opened[-1].next(WAIT_S) is None
        return opened[-1]

    yield open_listener
    for listener in opened:
        listener.close()


@pytest.fixture
def open_bus(real_redis: EmbeddedRedis) -> Iterator[OpenBus]:
    opened: list[Bus] = []

    def open_bus(name: str, url: str = real_redis.url) -> Bus:
        opened.append(Bus(url, name))
        return opened[-1]

    yield open_bus
    for bus in opened:
        bus.close()


def received(listener: Listener) -> list[tuple[str, Any]]:
    """All notes that have arrived."""
    notes = []
    while (note := listener.next(WAIT_S)) is not None:
        notes.append(note)
    return notes


def wait_until_received(bus: Bus, listener: Listener, note: object) -> None:
    """Wait until a note arrives that is repeated, as senders do."""

    def arrives() -> bool:
        with suppress(IndexLost):
            bus.send("soon", note)
        return listener.next(WAIT_S) == ("soon", note)

    until("the listener receives notes again", arrives, timeout_s=10)


def test_a_note_reaches_only_the_listeners_of_its_name_and_kind(
    open_listener: OpenListener, open_bus: OpenBus
) -> None:
    one, two = open_listener("ours", "soon", "lease.a"), open_listener("ours", "soon")
    other_kind, other_name = (
        open_listener("ours", "lease.b"),
        open_listener("theirs", "soon", "lease.a"),
    )

    open_bus("ours").send("soon", ["TB", 3, 1])
    open_bus("ours").send("lease.a", {"0": [1, [["TB", 3]]]})

    assert received(one) == [("soon", ["TB", 3, 1]), ("lease.a", {"0": [1, [["TB", 3]]]})]
    assert received(two) == [("soon", ["TB", 3, 1])]
    assert received(other_kind) == received(other_name) == []


def test_a_name_with_the_same_prefix_is_a_different_name(
    open_listener: OpenListener, open_bus: OpenBus
) -> None:
    shorter = open_listener("ours", "soon")
    open_bus("ours.soon").send("soon", 1)
    open_bus("ours2").send("soon", 1)
    assert received(shorter) == []


def test_notes_of_one_sender_are_queued_and_arrive_in_order(
    open_listener: OpenListener, open_bus: OpenBus
) -> None:
    listener, bus = open_listener("ours", "soon"), open_bus("ours")
    for number in range(1000):
        bus.send("soon", number)
    assert received(listener) == [("soon", number) for number in range(1000)]


def test_a_large_note_arrives_whole(open_listener: OpenListener, open_bus: OpenBus) -> None:
    listener = open_listener("ours", "report.a")
    note = {"metrics": [["delivered", [f"topic-{n}"], n] for n in range(20_000)]}
    open_bus("ours").send("report.a", note)
    assert listener.next(5) == ("report.a", note)


def test_a_note_without_a_listener_is_no_error(open_bus: OpenBus) -> None:
    open_bus("nobody").send("soon", 1)


def test_notes_leave_no_keys_in_redis(
    open_listener: OpenListener, open_bus: OpenBus, real_redis: EmbeddedRedis
) -> None:
    with redis.Redis.from_url(real_redis.url) as client:
        client.flushall()
        open_listener("ours", "soon")
        open_bus("ours").send("soon", 1)
        assert client.dbsize() == 0


def test_a_listener_waits_no_longer_than_its_timeout(open_listener: OpenListener) -> None:
    listener = open_listener("ours", "soon")
    began = time.monotonic()
    assert listener.next(0.3) is None
    assert 0.3 <= time.monotonic() - began < 1.5


def test_a_listener_connects_again_after_redis_was_killed(
    own_redis: EmbeddedRedis, open_listener: OpenListener, open_bus: OpenBus
) -> None:
    listener, bus = (
        open_listener("ours", "soon", url=own_redis.url),
        open_bus("ours", own_redis.url),
    )
    bus.send("soon", "before")
    assert listener.next(5) == ("soon", "before")

    own_redis.kill()
    for _ in range(3):
        assert listener.next(WAIT_S) is None
        with pytest.raises(IndexLost, match="Redis does not answer PUBLISH"):
            bus.send("soon", "meanwhile")

    own_redis.start()
    wait_until_received(bus, listener, "after")


def test_a_listener_can_start_while_redis_is_down(
    own_redis: EmbeddedRedis, open_listener: OpenListener, open_bus: OpenBus
) -> None:
    url = own_redis.url
    own_redis.kill()
    listener, bus = open_listener("ours", "soon", url=url), open_bus("ours", url)
    own_redis.start()
    wait_until_received(bus, listener, "first")


def test_a_connection_that_redis_closed_is_opened_again(
    own_redis: EmbeddedRedis, open_listener: OpenListener, open_bus: OpenBus
) -> None:
    listener, bus = (
        open_listener("ours", "soon", url=own_redis.url),
        open_bus("ours", own_redis.url),
    )
    bus.send("soon", "before")
    assert listener.next(5) == ("soon", "before")
    with redis.Redis.from_url(own_redis.url) as client:
        for kind in ("pubsub", "normal"):
            client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    assert listener.next(WAIT_S) is None
    bus.send("soon", "at once")
    wait_until_received(bus, listener, "after")


class Relay:
    """A proxy to Redis that can fall silent without ending its connections, as a dead host does.

    New connections can lead to another server, as after a change in DNS, or be closed at once.
    """

    def __init__(self, url: str) -> None:
        self.lead_to(url)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._server]
        self._silent: set[socket.socket] = set()
        self._is_full = False
        self.refused = self.ended = 0
        self.url = f"redis://127.0.0.1:{self._server.getsockname()[1]}/0"
        Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self._sockets) // 2

    def fall_silent(self) -> None:
        """Forward nothing on existing connections; new ones work."""
        self._silent.update(self._sockets[1:])

    def refuse_more(self) -> None:
        """Close each new connection; existing ones work, as at `maxclients`."""
        self._is_full = True

    def lead_to(self, url: str) -> None:
        """Connect to this server from now on; existing connections stay with theirs."""
        address = urlsplit(url)
        assert address.hostname is not None
        self._there = address.hostname, address.port

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if self._is_full:
                    self.refused += 1
                    near.close()
                    continue
                far = socket.create_connection(self._there)
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if source not in self._silent:
                    target.sendall(data)
        if source in self._sockets[1::2]:
            self.ended += 1


@pytest.fixture
def relay(real_redis: EmbeddedRedis) -> Iterator[Relay]:
    relay = Relay(real_redis.url)
    yield relay
    relay.close()


def test_a_listener_reconnects_after_redis_falls_silent(
    relay: Relay,
    open_listener: OpenListener,
    open_bus: OpenBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_module, "SILENCE_S", 0.3)
    listener, bus = open_listener("ours", "soon", url=relay.url), open_bus("ours")
    relay.fall_silent()
    wait_until_received(bus, listener, "after")


def test_a_listener_that_receives_notes_keeps_its_connection(
    relay: Relay,
    open_listener: OpenListener,
    open_bus: OpenBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_module, "SILENCE_S", 1.0)
    listener, bus = open_listener("ours", "soon", url=relay.url), open_bus("ours")
    for number in range(20):
        bus.send("soon", number)
        assert listener.next(5) == ("soon", number)
        time.sleep(WAIT_S)
    assert relay.connections == 1


def test_a_bus_follows_its_name_to_another_server(
    relay: Relay,
    own_redis: EmbeddedRedis,
    open_listener: OpenListener,
    open_bus: OpenBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_module, "RECONNECT_S", 0.3)
    bus, listener = open_bus("ours", relay.url), open_listener("ours", "soon", url=own_redis.url)
    bus.send("soon", "before")
    relay.lead_to(own_redis.url)  # the server before still accepts notes, as a replica does
    wait_until_received(bus, listener, "after")


def test_a_listener_follows_its_name_to_another_server(
    relay: Relay,
    own_redis: EmbeddedRedis,
    open_listener: OpenListener,
    open_bus: OpenBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_module, "SILENCE_S", 0.3)
    listener, bus = open_listener("ours", "soon", url=relay.url), open_bus("ours", own_redis.url)
    relay.lead_to(own_redis.url)  # the server before still answers a ping
    wait_until_received(bus, listener, "after")


def test_a_bus_keeps_its_connection_while_no_other_can_be_made(
    relay: Relay,
    open_listener: OpenListener,
    open_bus: OpenBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_module, "RECONNECT_S", 0.3)
    listener, bus = open_listener("ours", "soon"), open_bus("ours", relay.url)
    bus.send("soon", "before")
    assert listener.next(5) == ("soon", "before")

    relay.refuse_more()
    began = time.monotonic()
    for number in range(20):
        bus.send("soon", number)
        assert listener.next(5) == ("soon", number)
        time.sleep(0.05)

    most = (time.monotonic() - began) / 0.3 + 1
    assert 1 <= relay.refused <= most, "it tries again, after a pause"


def test_a_listener_keeps_its_connection_while_no_other_can_be_made(
    relay: Relay,
    open_listener: OpenListener,
    open_bus: OpenBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_module, "SILENCE_S", 0.3)
    listener, bus = open_listener("ours", "soon", url=relay.url), open_bus("ours")
    relay.refuse_more()
    for number in range(3):
        tried = relay.refused
        until("it tries", lambda: listener.next(WAIT_S) or relay.refused > tried)  # noqa: B023
        bus.send("soon", number)
        assert listener.next(5) == ("soon", number)


class SilentDns:
    """A name server that does not answer; each question fails after `timeout_s`, or when it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
        self.asked = 0
        self._timeout_s = timeout_s
        self._closed = Event()
        monkeypatch.setattr(socket, "getaddrinfo", self._ask)

    def _ask(self, *_: object, **__: object) -> Any:
        self.asked += 1
        self._closed.wait(self._timeout_s)
        raise socket.gaierror("no answer in time")

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def silent_dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], SilentDns]]:
    opened: list[SilentDns] = []

    def silence(timeout_s: float) -> SilentDns:
        opened.append(SilentDns(monkeypatch, timeout_s))
        return opened[-1]

    yield silence
    for dns in opened:
        dns.close()


def test_a_bus_sends_at_once_while_the_name_server_does_not_answer(
    open_listener: OpenListener,
    open_bus: OpenBus,
    silent_dns: Callable[[float], SilentDns],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_module, "RECONNECT_S", 0.2)
    listener, bus = open_listener("ours", "soon"), open_bus("ours")
    bus.send("soon", "before")
    assert listener.next(5) == ("soon", "before")

    dns = silent_dns(10.0)
    for number in range(10):
        began = time.monotonic()
        bus.send("soon", number)
        assert time.monotonic() - began < 1.0
        assert listener.next(5) == ("soon", number)
        time.sleep(0.1)
    assert dns.asked == 1, "one attempt at a time"


def test_a_listener_receives_at_once_while_the_name_server_does_not_answer(
    open_listener: OpenListener,
    open_bus: OpenBus,
    silent_dns: Callable[[float], SilentDns],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_module, "SILENCE_S", 0.2)
    listener, bus = open_listener("ours", "soon"), open_bus("ours")
    bus.send("soon", "before")
    assert listener.next(5) == ("soon", "before")

    dns = silent_dns(10.0)
    for number in range(10):
        time.sleep(0.1)
        began = time.monotonic()
        assert listener.next(WAIT_S) is None
        bus.send("soon", number)
        assert listener.next(5) == ("soon", number)
        assert time.monotonic() - began < 1.0
    assert dns.asked == 1, "one attempt at a time"


def test_a_listener_does_not_receive_a_note_again_from_its_new_connection(
    open_listener: OpenListener, open_bus: OpenBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "SILENCE_S", 0.2)
    listener, bus = open_listener("ours", "soon"), open_bus("ours")
    until("it subscribes again", lambda: listener.next(WAIT_S) or listener._attempt)
    attempt = listener._attempt
    assert attempt is not None
    until("the new connection works", lambda: attempt.made)

    bus.send("soon", 1)

    # beyond the moment without a note in which the listener turns to another connection
    notes = [listener.next(WAIT_S) for _ in range(5)]
    assert [note for note in notes if note is not None] == [("soon", 1)]


def test_a_bus_that_is_closed_while_it_connects_leaves_no_connection(
    relay: Relay, open_bus: OpenBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "RECONNECT_S", 0.0)
    bus = open_bus("ours", relay.url)
    may_connect, connect = Event(), Bus._connect
    monkeypatch.setattr(
        Bus, "_connect", lambda self, clients: may_connect.wait(5) and connect(self, clients)
    )
    bus.send("soon", 1)
    attempt = bus._attempt
    assert attempt is not None
    bus.close()
    may_connect.set()
    until("it has ended", lambda: attempt.has_ended)
    until("its connection is closed", lambda: relay.ended == relay.connections == 2)


def test_new_connections_replace_those_before(
    own_redis: EmbeddedRedis,
    open_listener: OpenListener,
    open_bus: OpenBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with redis.Redis.from_url(own_redis.url) as client:

        def connected() -> set[str]:
            return {one["id"] for one in client.client_list()}

        listener, bus = (
            open_listener("ours", "soon", url=own_redis.url),
            open_bus("ours", own_redis.url),
        )
        bus.send("soon", 0)
        assert listener.next(5) == ("soon", 0)
        before = connected()

        monkeypatch.setattr(bus_module, "SILENCE_S", 0.2)
        until(
            "the listener has another",
            lambda: listener.next(WAIT_S) or len(connected() & before) == 2,
        )
        monkeypatch.setattr(bus_module, "SILENCE_S", 60.0)
        monkeypatch.setattr(bus_module, "RECONNECT_S", 0.2)

        def bus_has_another() -> bool:
            bus.send("soon", 1)
            return len(connected() & before) == 1

        until("the bus has another", bus_has_another)
        monkeypatch.setattr(bus_module, "RECONNECT_S", 60.0)
        bus.send("soon", 2)
        until("the last note", lambda: listener.next(WAIT_S) == ("soon", 2))
        until("no other is left", lambda: listener.next(WAIT_S) or len(connected()) == 3)


def test_both_ends_together_find_another_server_before_a_task_ends() -> None:
    # A note begins a new connection, and the next one is sent on it.
    assert bus_module.RECONNECT_S + bus_module.SILENCE_S + 2 * REPEATED_S < ABANDONED_S


def test_a_full_redis_still_forwards_notes(
    own_redis: EmbeddedRedis, open_listener: OpenListener, open_bus: OpenBus
) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.set("other", "x" * 1_000_000)
        client.config_set("maxmemory", "1mb")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("more", "x")

        listener = open_listener("ours", "soon", url=own_redis.url)
        open_bus("ours", own_redis.url).send("soon", {"due": 1})

        assert listener.next(5) == ("soon", {"due": 1})


def test_notes_work_over_a_unix_socket(tmp_path: Any) -> None:
    url = f"unix://{tmp_path}/redis.sock"
    server = EmbeddedRedis(tmp_path / "redis", settings={"unixsocket": f"{tmp_path}/redis.sock"})
    server.start()
    listener, bus = Listener(url, "ours", ("soon",)), Bus(url, "ours")
    try:
        wait_until_received(bus, listener, 1)
    finally:
        listener.close()
        bus.close()
        server.stop()


def test_without_redis_senders_fail_and_listeners_receive_nothing() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    listener, bus = Listener(url, "ours", ("soon",)), Bus(url, "ours")
    assert listener.next(WAIT_S) is None
    with pytest.raises(IndexLost):
        bus.send("soon", 1)
    listener.close()
    bus.close()
