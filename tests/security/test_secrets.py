"""Nothing that blackbox prints, logs or serves contains a password, whatever fails."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import quote

import pytest

from blackbox.client.request_writer import RequestWriter
from blackbox.config.settings import Settings, load
from blackbox.config.settings_error import SettingsError
from blackbox.config.wiring import kafka, own_topics
from blackbox.embedded import EmbeddedRedis
from blackbox.engine.metrics import Metrics
from blackbox.engine.process import ProcessEngine
from blackbox.index.bus import Bus
from blackbox.index.connection import RedisSession, pool, servers_of
from blackbox.index.inspector import Inspector
from blackbox.index.redis_servers import RedisServers
from tests.security.certificates import make_ca, make_locked_key
from tests.security.guarded import GuardedKafka
from tests.security.rights import kafka_rights
from tests.service.test_cli import blackbox
from tests.support.world import ForkedService, ServiceProcess, until

pytestmark = pytest.mark.service

PLANTED = "pl4nted"
REDIS_PASSWORD = f"{PLANTED}/of@redis?"
WRONG_PASSWORD = f"{PLANTED}-but-wrong"
KEY_PASSWORD = f"{PLANTED}-of-the-key"
SOON_S = 0.5
"""Long enough for a server on this machine to refuse."""

COMMANDS = (
    ("check",), ("check", "--json"), ("status",), ("show", "TB/0@0"), ("cancel", "x"),
    ("send", "--topic", "orders", "--message", "x", "--countdown", "0"),
)  # fmt: skip


class Vault:
    """Servers that require passwords, and settings that contain them."""

    def __init__(self, kafka: GuardedKafka, redis: EmbeddedRedis, folder: Path) -> None:
        self.kafka = kafka
        self.redis = redis
        self.folder = folder
        self.place = f"127.0.0.1:{redis.port}/0"
        self._numbers = count()
        key, certificate = make_locked_key(folder, KEY_PASSWORD)
        self.properties = {
            **kafka.login(),
            "ssl.key.location": str(key),
            "ssl.certificate.location": str(certificate),
            "ssl.key.password": KEY_PASSWORD,
            "debug": "all",
            "log_level": "7",
        }

    def redis_url(self, password: str = REDIS_PASSWORD, scheme: str = "redis") -> str:
        return f"{scheme}://:{quote(password, safe='')}@{self.place}"

    def environment(
        self, properties: Mapping[str, str] | None = None, **more: object
    ) -> dict[str, str]:
        config = self.folder / f"{next(self._numbers)}.properties"
        lines = (self.properties | dict(properties or {})).items()
        config.write_text("".join(f"{name}={value}\n" for name, value in lines))
        variables = {
            "kafka_bootstrap_servers": self.kafka.kafka.bootstrap_servers,
            "kafka_config": config,
            "redis_url": self.redis_url(),
            "engine": "process",
        }
        return {f"BLACKBOX_{k.upper()}": str(v) for k, v in (variables | more).items()}

    def settings(self) -> Settings:
        names = self.environment().items()
        return load(**{name.removeprefix("BLACKBOX_").lower(): value for name, value in names})


@pytest.fixture(scope="module")
def vault(guarded_kafka: GuardedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vault]:
    folder = tmp_path_factory.mktemp("vault")
    redis = EmbeddedRedis(folder / "redis", settings={"requirepass": REDIS_PASSWORD})
    redis.start()
    guarded_kafka.allow(kafka_rights())
    yield Vault(guarded_kafka, redis, folder)
    redis.stop()


NOWHERE = "127.0.0.1:1"
WAYS: dict[str, Callable[[Vault], dict[str, str]]] = {
    "nothing": lambda vault: vault.environment(),
    "Redis' password": lambda vault: vault.environment(redis_url=vault.redis_url(WRONG_PASSWORD)),
    "Redis' place": lambda vault: vault.environment(redis_url=f"redis://:{PLANTED}@{NOWHERE}/0"),
    "Redis' name": lambda vault: vault.environment(redis_url=f"redis://:{PLANTED}@no.invalid/0"),
    "Redis' TLS": lambda vault: vault.environment(redis_url=vault.redis_url(scheme="rediss")),
    "a socket": lambda vault: vault.environment(redis_url=f"unix://:{PLANTED}@/no/such/socket"),
    "a query": lambda vault: vault.environment(redis_url=f"redis://{NOWHERE}/0?password={PLANTED}"),
    "the URL": lambda vault: vault.environment(redis_url=f"redis://:{PLANTED}/x@{NOWHERE}/0"),
    "the scheme": lambda vault: vault.environment(redis_url=f"redis+x://:{PLANTED}@{NOWHERE}/0"),
    "the whole URL": lambda vault: vault.environment(redis_url=PLANTED),
    "Kafka's password": lambda vault: vault.environment({"sasl.password": WRONG_PASSWORD}),
    "the key's password": lambda vault: vault.environment({"ssl.key.password": WRONG_PASSWORD}),
    "Kafka's CA": lambda vault: vault.environment({"ssl.ca.location": str(make_ca(vault.folder))}),
    "Kafka's place": lambda vault: vault.environment(kafka_bootstrap_servers=NOWHERE),
    "the mechanism": lambda vault: vault.environment({"sasl.mechanism": "PLAIN"}),
    "a setting": lambda vault: vault.environment({"no.such.setting": PLANTED}),
    "the file": lambda vault: vault.environment({"sasl.password": f"\\u{PLANTED}"}),
}
"""Failures, each with the settings that cause it."""

AT_THE_START = (
    "Redis' password", "Redis' TLS", "Kafka's password", "Kafka's CA", "the key's password",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_failing_commands_print_no_secret(
    vault: Vault, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blackbox.journal.topics.REQUEST_TIMEOUT_S", SOON_S)
    environment = WAYS[way](vault)
    for command in COMMANDS:
        answer = blackbox(environment, *command)
        assert PLANTED not in answer.out
        assert PLANTED not in "\n".join(answer.errors)


@pytest.mark.proof
def test_services_that_cannot_connect_log_no_secret(vault: Vault) -> None:
    logs = {way: vault.folder / f"{number}.log" for number, way in enumerate(AT_THE_START)}

    def says_why(log: Path) -> bool:
        return "error" in log.read_text().lower() or "not started yet" in log.read_text()

    with ExitStack() as ending:
        for way, log in logs.items():
            ending.callback(ServiceProcess(WAYS[way](vault), log).close)
        for way, log in logs.items():
            until(f"it says why: {way}", partial(says_why, log))
            assert PLANTED not in log.read_text()


def test_a_running_service_logs_no_secret(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in os.environ if name.startswith("BLACKBOX_")]:
        monkeypatch.delenv(name)
    caplog.set_level(logging.DEBUG, "blackbox")  # a command run in this process sets another
    service = ProcessEngine(vault.settings(), Metrics())
    service.start()
    try:
        until("it is ready", service.is_ready)
    finally:
        service.stop()
    assert "sasl" in caplog.text.lower()
    assert PLANTED not in caplog.text


def test_a_service_serves_no_secret(vault: Vault) -> None:
    log = vault.folder / "service.log"
    service = ForkedService(vault.environment(), log)
    try:
        service.wait_ready()
        for path in ("/metrics", "/livez", "/readyz", "/", "/docs", "/openapi.json", "/%0a"):
            assert PLANTED not in service.get(path)[1]
        service.stop()
        assert PLANTED not in log.read_text()
    finally:
        service.close()


def test_no_object_shows_its_secret(vault: Vault) -> None:
    settings = vault.settings()
    access = kafka(settings)
    url = settings.redis_url.get_secret_value()
    connections = servers_of(pool(url), [b""])[b""]
    redis = RedisServers(url)
    objects: list[object] = [
        settings, settings.redis_url, settings.model_dump(), access, connections,
        pool(url), connections.make_connection(), RedisSession(connections), redis, vars(redis), Inspector.of(url),
        vars(Inspector.of(url)), vars(Bus(url, "x")), ProcessEngine(settings, Metrics()),
        own_topics(settings, access), vars(own_topics(settings, access)),
        RequestWriter(access.bootstrap_servers, kafka_settings=access.settings),
        vars(RequestWriter(access.bootstrap_servers, kafka_settings=access.settings)),
        access.admin(), access.consumer(), access.producer(None),
    ]  # fmt: skip
    for one in objects:
        assert PLANTED not in repr(one)
        assert PLANTED not in str(one)


@pytest.mark.parametrize(
    "line",
    [f"sasl.password=\\u12{PLANTED}", f"sasl.password={PLANTED}\\uzz{PLANTED}", f"x={PLANTED}\\u"],
)
def test_an_unreadable_settings_file_is_not_quoted(tmp_path: Path, line: str) -> None:
    file = tmp_path / "kafka.properties"
    file.write_text(line)
    settings = load(kafka_bootstrap_servers="127.0.0.1:1", kafka_config=file)
    with pytest.raises(SettingsError) as refused:
        settings.kafka_settings()
    said = str(refused.value).replace(str(file), "")
    assert PLANTED[:2] not in said
