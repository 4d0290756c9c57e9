"""The commands, on real servers and beside a real service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from typer.testing import CliRunner

from blackbox.cli import app
from blackbox.embedded import EmbeddedRedis, EmbeddedStack
from blackbox.embedded.tcp_ports import free_port
from tests.support.world import ServiceProcess, World, read_all, until

GRACEFUL_S = 5.0
NOWHERE = {
    "BLACKBOX_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
    "BLACKBOX_REDIS_URL": "redis://:secret@127.0.0.1:1/0",
}


class Answer(NamedTuple):
    code: int
    out: str
    errors: list[str]

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> dict[str, object]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def blackbox(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"") -> Answer:
    """Run a command in this process."""
    clean = dict.fromkeys(name for name in os.environ if name.startswith("BLACKBOX_"))
    result = CliRunner().invoke(app, arguments, env={**clean, **environment}, input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    release_frames(result.exception)
    return Answer(result.exit_code, result.stdout, result.stderr.splitlines())


def release_frames(error: BaseException | None) -> None:
    """Release what the frames of a failed command hold.

    They are in cycles (of `contextlib`), and hold Kafka clients. Dozens of these would try to connect
    until the next garbage collection, with two processors.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Deployment(NamedTuple):
    """A world with a running service, shared by the tests of this file."""

    world: World
    environment: dict[str, str]

    def run(self, *arguments: str, stdin: bytes = b"") -> Answer:
        return blackbox(self.environment, *arguments, stdin=stdin)

    def send(self, *arguments: str) -> str:
        answer = self.run("send", "--topic", self.world.targets[0], *arguments)
        assert answer.code == 0, answer
        return answer.out.strip()

    def show(self, name: str) -> dict[str, object]:
        return self.run("show", "--json", name).json

    def becomes(self, name: str, state: str) -> dict[str, object]:
        def reached() -> dict[str, object] | None:
            fate = self.show(name)
            return fate if fate["state"] == state else None

        return until(f"{name} is {state}", reached)


@pytest.fixture(scope="module")
def deployment(
    stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with World(stack.kafka, stack.redis, tmp_path_factory.mktemp("deployment")) as world:
        world.start_service(retries=0).wait_ready()
        yield Deployment(world, world.environment(retries=0))


def test_the_version_is_the_installed_one() -> None:
    assert blackbox({}, "--version").out.startswith("blackbox 0.")


def test_a_sent_request_is_delivered_and_show_names_its_place(deployment: Deployment) -> None:
    asked = deployment.send(
        *("--message", "hello", "--countdown", "0", "--key", "k"),
        *("--header", "trace=1=2", "--caller", "tests"),
    )
    fate = deployment.becomes(asked, "delivered")
    place = fate["place"]
    assert isinstance(place, dict)
    target = deployment.world.targets[0]
    [found] = until(
        "it can be read there",
        lambda: [m for m in deployment.world.received(target) if m.value() == b"hello"],
    )
    there = {"topic": found.topic(), "partition": found.partition(), "offset": found.offset()}
    assert place == there
    assert found.key() == b"k"
    assert list(found.headers() or [])[:2] == [("CALLER_SERVICE", b"tests"), ("trace", b"1=2")]
    assert (
        deployment.run("show", asked)
        .lines[1]
        .startswith(f"  delivered to {place['topic']}/{place['partition']}@{place['offset']} at 20")
    )


def test_show_finds_a_pending_request_by_each_of_its_names(deployment: Deployment) -> None:
    asked = deployment.send(
        "--message", "later", "--countdown", "3600", "--id", "a", "--caller", "me"
    )
    fate = deployment.becomes(asked, "pending")
    assert (fate["caller"], fate["caller_id"], fate["attempts"]) == ("me", "a", 0)
    assert fate["target"] == deployment.world.targets[0]
    source = str(fate["source"])
    member = f"{int(source.rpartition('@')[2]):016x}"
    assert deployment.show(source) == fate
    named = [json.loads(line) for line in deployment.run("show", "--json", member).lines]
    assert fate in named


def test_show_says_why_a_due_request_waits(deployment: Deployment) -> None:
    paused = deployment.world.targets[1]
    assert deployment.run("pause", paused).code == 0
    asked = deployment.run(
        "send", "--topic", paused, "--message", "x", "--countdown", "0"
    ).out.strip()
    until("it was tried", lambda: deployment.show(asked).get("attempts"))
    lines = deployment.run("show", asked).lines
    assert "  waits     the target is paused; resume it with blackbox resume TOPIC" in lines
    assert "  next try  once its target accepts messages" in lines
    assert deployment.run("resume", paused).code == 0
    assert "detail" not in deployment.becomes(asked, "delivered")


def test_send_accepts_instants(deployment: Deployment) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    asked = deployment.send("--message", "x", "--at", due.isoformat())
    assert deployment.becomes(asked, "pending")["due_ms"] == due.timestamp() * 1000
    asked = deployment.send("--message", "x", "--at", str(int(due.timestamp() * 1000) + 5))
    assert deployment.becomes(asked, "pending")["due_ms"] == due.timestamp() * 1000 + 5


def test_a_cancelled_request_is_reported_as_ended(deployment: Deployment) -> None:
    asked = deployment.send("--message", "never", "--countdown", "3600", "--id", "c")
    deployment.becomes(asked, "pending")
    answer = deployment.run("cancel", "c")
    assert (answer.code, answer.out.split()[0]) == (0, "cancelled")
    assert deployment.becomes(asked, "ended")["caller_id"] == "c"
    again = deployment.run("cancel", "--json", "c")
    assert (again.code, again.json["outcome"]) == (1, "unknown")


def test_a_dead_letter_is_shown_with_its_reason_and_its_place(deployment: Deployment) -> None:
    nowhere = f"{deployment.world.name}.nowhere"
    asked = deployment.run(
        "send", "--topic", nowhere, "--message", "x", "--countdown", "0"
    ).out.strip()
    fate = deployment.becomes(asked, "dead")
    assert fate["reason"] == "unknown-topic"
    assert nowhere in str(fate["detail"])
    place = fate["place"]
    assert isinstance(place, dict)
    assert place["topic"] == deployment.world.dead_letters


def test_a_request_that_was_never_written_is_unknown(deployment: Deployment) -> None:
    for name in (f"{deployment.world.requests}/0@123456", f"{deployment.world.requests}/99@0"):
        answer = deployment.run("show", "--json", name)
        assert (answer.code, answer.json["state"]) == (1, "unknown")
    answer = deployment.run("show", f"{2**40:016x}")
    assert (answer.code, answer.out) == (1, "")


@pytest.mark.parametrize(
    "name", ["x", "TB/3", "nobody/0@1", "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "f" * 16]
)
def test_show_refuses_an_invalid_name_of_a_request(deployment: Deployment, name: str) -> None:
    answer = deployment.run("show", name)
    assert answer.code == 1
    assert len(answer.errors) == 1
    assert name in answer.errors[0]


def test_send_reads_a_message_from_stdin_unchanged(deployment: Deployment) -> None:
    typed = ("send", "--topic", deployment.world.targets[0], "--message", "-", "--countdown", "0")

    asked = deployment.run(*typed, stdin="grüß\ngott\n".encode()).out.strip()

    deployment.becomes(asked, "delivered")
    delivered = {m.value() for m in read_all(deployment.world.kafka.bootstrap_servers, typed[2])}
    assert "grüß\ngott\n".encode() in delivered
    refused = deployment.run(*typed, stdin=b"\xff")
    assert refused.code == 2
    assert "stdin is not valid UTF-8" in refused.errors[0]


def test_status_counts_pending_requests_of_every_shard(deployment: Deployment) -> None:
    before = deployment.run("status", "--json").json["totals"]
    asked = deployment.send("--message", "later", "--countdown", "3600", "--id", "d")
    deployment.becomes(asked, "pending")
    status = deployment.run("status", "--json").json
    totals, shards = status["totals"], status["shards"]
    assert isinstance(before, dict)
    assert isinstance(totals, dict)
    assert isinstance(shards, list)
    assert totals["pending"] == before["pending"] + 1
    assert (totals["due_now"], totals["lag"], totals["oldest_overdue_ms"]) == (0, 0, 0)
    assert 0 < totals["next_due_in_ms"] <= 3_600_000
    assert [shard["shard"] for shard in shards] == [
        f"{deployment.world.requests}-{n}" for n in range(4)
    ]
    table = deployment.run("status").lines
    assert any(line.split()[:2] == ["total", str(totals["pending"])] for line in table)


def test_a_pause_before_the_first_start_says_that_nothing_is_paused(deployment: Deployment) -> None:
    environment = deployment.environment | {"BLACKBOX_REQUEST_TOPICS": "none:countdown"}
    answer = blackbox(environment, "pause", "orders")
    assert (answer.code, answer.out) == (1, "")
    assert "orders is not paused: no request topic exists yet" in answer.errors[0]


def test_status_before_the_first_start_says_what_to_do(deployment: Deployment) -> None:
    answer = blackbox(
        deployment.environment | {"BLACKBOX_REQUEST_TOPICS": "none:countdown"}, "status"
    )
    assert answer.code == 1
    assert "`blackbox run` creates them" in answer.errors[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--message", "x"), "once: --countdown SECONDS or --at INSTANT"),
        (("--message", "x", "--countdown", "1", "--at", "1"), "once: --countdown SECONDS or"),
        (("--message", "x", "--countdown", "nan"), "countdown is nan"),
        (("--message", "x", "--at", "tomorrow"), "'tomorrow'"),
        (("--message", "x", "--countdown", "1", "--header", "trace"), "give name=value"),
        (("--message", "x", "--countdown", "1", "--id", ""), "bad-id"),
        (("--message", "\udcff", "--countdown", "1"), "use UTF-8"),
    ],
)
def test_send_refuses_a_request_that_would_become_a_dead_letter(
    arguments: tuple[str, ...], complaint: str
) -> None:
    answer = blackbox(NOWHERE, "send", "--topic", "orders", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert complaint in answer.errors[0]


def test_a_request_topic_that_does_not_exist_is_named(deployment: Deployment) -> None:
    answer = deployment.run(
        "send", "--topic", "x", "--message", "x", "--countdown", "1", "--request-topic", "none"
    )
    assert answer.code == 1
    assert "'none' does not exist on" in answer.errors[0]


def test_a_request_is_cancelled_by_the_id_that_was_printed(deployment: Deployment) -> None:
    asked = deployment.send("--message", "x", "--countdown", "3600")
    answer = deployment.run("cancel", "--json", asked)
    assert (answer.code, answer.json["outcome"]) == (0, "cancelled"), answer
    assert deployment.show(asked)["state"] == "ended"
    again = deployment.run("cancel", asked)
    assert (again.code, again.out.split(":")[0]) == (1, "too late")


@pytest.mark.parametrize(
    "arguments",
    [
        ("send", "--topic", "orders", "--message", "x", "--countdown", "1"),
        ("cancel", "r-17"),
        ("show", "TB/0@1"),
        ("status",),
        ("check",),
    ],
)
def test_unreachable_servers_are_reported_in_one_line(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blackbox.journal.topics.REQUEST_TIMEOUT_S", 0.5)
    answer = blackbox(NOWHERE, *arguments)
    assert answer.code == 1
    [line] = answer.errors
    assert "127.0.0.1:1" in line
    assert "check" in line
    assert "secret" not in line


@pytest.mark.parametrize(
    "command", [("run",), ("show", "TB/0@1"), ("status",), ("check",), ("cancel", "x")]
)
def test_an_invalid_setting_is_named_before_anything_starts(command: tuple[str, ...]) -> None:
    answer = blackbox({"BLACKBOX_POLL_INTERVAL_MS": "soon"}, *command)
    assert answer.code == 2
    assert any("BLACKBOX_KAFKA_BOOTSTRAP_SERVERS is not set" in line for line in answer.errors)
    assert any("BLACKBOX_POLL_INTERVAL_MS='soon'" in line for line in answer.errors)


@pytest.mark.parametrize(
    "command",
    [
        ("run",),
        ("show", "TB/0@1"),
        ("check",),
        ("send", "--topic", "t", "--message", "x", "--countdown", "1"),
    ],
)
def test_a_property_that_the_kafka_client_does_not_know_is_named(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    config = tmp_path / "kafka.properties"
    config.write_text("foo.bar=1\n")
    answer = blackbox(NOWHERE | {"BLACKBOX_KAFKA_CONFIG": str(config)}, *command)
    assert answer.code == 2
    assert str(config) in answer.errors[0]
    assert "foo.bar" in answer.errors[0]


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("setting", ["CALLERS_FILE", "SPARK_CONFIG"])
def test_an_unusable_file_of_a_setting_is_named(command: str, setting: str, tmp_path: Path) -> None:
    path = tmp_path / "missing"
    answer = blackbox(NOWHERE | {f"BLACKBOX_{setting}": str(path)}, command)
    assert answer.code == 2
    assert answer.errors[0].startswith(f"error: BLACKBOX_{setting}={path}: ")


def test_data_without_embedded_servers_is_refused() -> None:
    answer = blackbox(NOWHERE, "run", "--data", "somewhere")
    assert answer.code == 2
    assert "add --embedded" in answer.errors[0]


def evicting(folder: Path) -> EmbeddedRedis:
    redis = EmbeddedRedis(folder / "evicting", settings={"maxmemory-policy": "allkeys-lru"})
    redis.start()
    return redis


def test_a_redis_that_evicts_is_refused(world: World, tmp_path: Path) -> None:
    redis = evicting(tmp_path)
    try:
        service = world.start_service(redis_url=redis.url)
        assert service.process.wait(30) == 3
        assert "allkeys-lru" in service.log.read_text()
        environment = world.environment(redis_url=redis.url)
        answer = blackbox(environment, "check")
        assert answer.code == 1
        assert "refuse" in answer.out
        found = json.loads(blackbox(environment, "check", "--json").out)
        assert "noeviction" in found[0]["remedy"]
    finally:
        redis.stop()


def seconds_to_stop(service: ServiceProcess) -> float:
    began = time.monotonic()
    assert service.stop() == 0
    return time.monotonic() - began


def test_a_running_service_stops_gracefully_on_sigterm(world: World) -> None:
    service = world.start_service().wait_ready()
    assert seconds_to_stop(service) < GRACEFUL_S
    assert " INFO blackbox.run: stopped" in service.log.read_text().splitlines()[-1]


def test_a_service_that_starts_before_redis_waits_for_it(world: World, tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path / "later", port=free_port())
    service = world.start_service(redis_url=f"redis://127.0.0.1:{redis.port}/0")
    until("it reports that it waits", lambda: "not started yet" in service.log.read_text())
    assert service.get("/livez")[0] == 200
    assert service.get("/readyz")[0] == 503
    redis.start()
    try:
        service.wait_ready()
        assert seconds_to_stop(service) < GRACEFUL_S
    finally:
        redis.stop()


def test_a_service_that_waits_for_kafka_stops_on_sigterm(world: World) -> None:
    service = world.start_service(kafka_bootstrap_servers="127.0.0.1:1")
    until("it is live", lambda: service.get("/livez")[0] == 200)
    assert seconds_to_stop(service) < GRACEFUL_S


WAITING = (
    "import os, signal, threading; from blackbox.cli import signals; stop = threading.Event(); "
    "signals.announce(stop)\n"
    "{}\n"
    "raise SystemExit(0 if stop.wait(20) else 'not noticed')"
)


@pytest.mark.parametrize(
    "sent",
    [
        "with stop._cond: os.kill(os.getpid(), signal.SIGTERM)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "os.kill(os.getpid(), signal.SIGTERM)",
    ],
    ids=["as the wait for it begins", "by a thread that it does not interrupt"],
)
def test_a_signal_is_noticed_at_any_time_in_any_thread(sent: str) -> None:
    subprocess.run([sys.executable, "-c", WAITING.format(sent)], check=True, timeout=30)


def test_a_second_signal_ends_at_once() -> None:
    stuck = (
        "import signal, threading; from blackbox.cli import signals; stop = threading.Event(); "
        "signals.announce(stop); print('here', flush=True); "
        "stop.wait(); print('told', flush=True); threading.Event().wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", stuck], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"told\n"

        def ended() -> bool:
            process.send_signal(signal.SIGTERM)
            return process.poll() is not None

        assert not ended(), "a wrapper forwarded the signal; there was no second one"
        until("the second signal ends it", ended)
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


@pytest.mark.proof
def test_run_embedded_starts_and_stops_its_servers(stack: EmbeddedStack, tmp_path: Path) -> None:
    data = tmp_path / "data"
    log = tmp_path / "run.log"
    environment = {n: v for n, v in os.environ.items() if not n.startswith("BLACKBOX_")}
    with log.open("wb") as file, subprocess.Popen(
        [sys.executable, "-m", "blackbox", "run", "--embedded", "--data", str(data)],
        env=environment | {"BLACKBOX_HTTP_PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=file,
        text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            exports = [process.stdout.readline().split()[1].partition("=") for _ in range(2)]
            given = {name: value for name, _, value in exports}
            until("it delivers", lambda: "blackbox.run: started" in log.read_text())
            status = blackbox(given, "status", "--json").json
            assert isinstance(status["shards"], list)
            assert len(status["shards"]) == 4
        finally:
            process.terminate()
            process.wait(30)
    assert process.returncode == 0, log.read_text()
    assert "every user of this machine can read, write and delete the topics" in log.read_text()
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if str(data) in str(p.info)]
    assert (data / "kafka").is_dir()
