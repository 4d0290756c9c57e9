"""An HTTP attacker neither delays messages nor fills memory, on the shipped stack and on a guarded one."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from blackbox.embedded import EmbeddedKafka, EmbeddedStack
from blackbox.embedded.tcp_ports import HOST, free_port
from tests.security.certificates import Certificates
from tests.security.conftest import REDIS_PASSWORD
from tests.security.guarded import PASSWORD, USER
from tests.security.rights import kafka_rights, redis_users
from tests.security.test_tls import TlsRedis
from tests.support.world import AT_LENGTH, ServiceProcess, World, both_engines_at_length

pytestmark = [pytest.mark.service, pytest.mark.timeout(1800)]

ATTACK_S = 600 if AT_LENGTH else 12
ASKED, ASKED_S = (3000, 6.0) if AT_LENGTH else (1000, 3.0)
FROM_S = 2.0
MOST, MOST_MS = 1.5, 0 if AT_LENGTH else 2000
MOST_BYTES = 100_000_000
TOKEN, READ_TOKEN = "t0ken-of-the-operator", "t0ken-of-who-looks"


class ShippedRedis(TlsRedis):
    """Over TLS, with the shipped users."""

    @property
    def url(self) -> str:
        login = f"rediss://blackbox:{REDIS_PASSWORD}"
        return f"{login}@{HOST}:{self.tls_port}/0?ssl_ca_certs={self.ca}"

    def give_users(self) -> None:
        with redis.Redis(port=self.port, protocol=2) as admin:
            for user, rules in redis_users().items():
                admin.execute_command("ACL", "SETUSER", user, *rules.split())
                passwords = [f"+{REDIS_PASSWORD}"]
                admin.acl_setuser(user, reset=False, enabled=True, passwords=passwords)


class GuardedWorld(World):
    """Its service logs in to Kafka and Redis over TLS with the listed permissions; the tests do not."""

    def __init__(self, folder: Path, certificates: Certificates, engine: str) -> None:
        ports = {name: free_port() for name in ("PLAINTEXT", "GUARDED", "CONTROLLER")}
        places = {name: f"{name}://{HOST}:{port}" for name, port in ports.items()}
        module = "org.apache.kafka.common.security.scram.ScramLoginModule"
        settings = {
            "controller.quorum.voters": f"1@{HOST}:{ports['CONTROLLER']}",
            "listeners": ",".join(places.values()),
            "advertised.listeners": f"{places['PLAINTEXT']},{places['GUARDED']}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,GUARDED:SASL_SSL,CONTROLLER:PLAINTEXT",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.guarded.scram-sha-512.sasl.jaas.config": f"{module} required;",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(certificates.both),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(certificates.ca),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }
        self._certificates = certificates
        self._guarded = f"{HOST}:{ports['GUARDED']}"
        users = {USER: PASSWORD}
        kafka = EmbeddedKafka(
            folder / "kafka", port=ports["PLAINTEXT"], settings=settings, users=users
        )
        super().__init__(kafka, ShippedRedis(folder / "redis", certificates), folder, engine)

    def __enter__(self) -> World:
        assert isinstance(self.redis, ShippedRedis)
        self.kafka.start()
        self.redis.start()
        self.redis.give_users()
        self._allow()
        return super().__enter__()

    def _allow(self) -> None:
        commands = (
            "run",
            "run to create its topics",
            "check",
            "API and cancel and reschedule",
            "letters",
        )
        names = {
            "TB": [self.requests],
            "TB.receipts": [f"{self.requests}.receipts"],
            "blackbox.dead-letters": [self.dead_letters],
            "orders": self.targets,
            "blackbox": [self.name],
            "blackbox/": [f"{self.name}/"],
            "blackbox/letters": [f"{self.name}/letters"],
        }
        bindings = {
            right._replace(name=name).binding(USER)
            for right in kafka_rights(*commands)
            for name in names[right.name]
        }
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        for done in admin.create_acls(list(bindings)).values():
            done.result(30)

    def __exit__(self, *ended: Any) -> None:
        super().__exit__(*ended)
        self.redis.stop()
        self.kafka.stop()

    def environment(self, **more: object) -> dict[str, str]:
        guarded = {
            "kafka_bootstrap_servers": self._guarded,
            "api_token": TOKEN,
            "api_read_token": READ_TOKEN,
        }
        found = super().environment(**guarded | more)
        config = self.folder / "kafka.properties"
        login = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            "ssl.ca.location": str(self._certificates.ca),
        }
        with config.open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in login.items())
        return found


@pytest.fixture(params=["as it is shipped"] + ["guarded"] * AT_LENGTH)
def attacked(
    request: pytest.FixtureRequest, stack: EmbeddedStack, certificates: Certificates, redis_7: str, tmp_path: Path,
    engine: str,
) -> Iterator[World]:  # fmt: skip
    open_world = partial(World, stack.kafka, stack.redis, tmp_path, engine)
    guarded_world = partial(GuardedWorld, tmp_path, certificates, engine)
    with (guarded_world if request.param == "guarded" else open_world)() as world:
        yield world


def p99_ms(world: World) -> int:
    """The 99th percentile of the lateness of new requests. Raises unless each is delivered once, and none early."""
    before = len(world.asked)
    world.ask(ASKED, from_s=FROM_S, within_s=FROM_S + ASKED_S)
    world.wait_delivered(120)
    verdict = world.verdict(late_from=before)
    assert (verdict.lost, verdict.duplicated, verdict.early_ms) == ([], [], []), verdict
    return verdict.late_at(0.99)


def memory(service: ServiceProcess) -> int:
    """Memory of the service and its children, in bytes."""
    held = 0
    for process in service.family():
        with suppress(psutil.NoSuchProcess):
            held += process.memory_info().rss
    return held


@pytest.mark.proof
@both_engines_at_length
def test_an_http_attacker_neither_delays_messages_nor_fills_memory(attacked: World) -> None:
    service = attacked.start_service(poll_interval_ms=100).wait_ready()
    p99_ms(attacked)  # warm-up
    calm, before = p99_ms(attacked), memory(service)
    port = service.address.rpartition(":")[2]
    tokens = [READ_TOKEN] if isinstance(attacked, GuardedWorld) else []
    command = [sys.executable, "-m", "tests.security.attacker", port, str(ATTACK_S), *tokens]
    seen, held = list[int](), list[int]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        while attacker.poll() is None:
            seen.append(p99_ms(attacked))
            held.append(memory(service))
            assert service.get("/livez")[0] == 200
        told, _ = attacker.communicate()

    seen.sort()
    print(
        f"{attacked.engine}, {'guarded' if tokens else 'as it is shipped'}: p99 {calm} ms before, {seen} ms beside, "
        f"memory at most {(max(held) - before) / 1e6:+.1f} MB; {json.loads(told)}"
    )
    assert json.loads(told)["idle"] >= 1000
    assert max(held) - before < MOST_BYTES
    assert seen[len(seen) // 2] <= max(MOST * calm, MOST_MS)


@pytest.mark.parametrize(("kept", "is_taken"), [("producer", True), ("uncompressed", False)])
def test_an_uncompressed_topic_limits_batches_by_their_uncompressed_size(
    stack: EmbeddedStack, kept: str, is_taken: bool
) -> None:
    servers: dict[str, Any] = {"bootstrap.servers": stack.kafka.bootstrap_servers}
    topic = f"bomb.{uuid.uuid4().hex[:8]}"
    new = NewTopic(topic, 1, config={"compression.type": kept})
    admin = AdminClient(servers)
    admin.create_topics([new])[topic].result(30)
    whole = {"linger.ms": 60_000, "batch.size": 64 << 20, "message.max.bytes": 64 << 20}
    producer = Producer({**servers, **whole, "compression.type": "zstd"})
    errors = list[KafkaError | None]()
    for _ in range(100):
        producer.produce(topic, b"x" * 100_000, on_delivery=lambda error, _: errors.append(error))
    producer.flush(30)

    assert len(errors) == 100
    codes = {error.code() for error in errors if error is not None}
    assert codes == (set() if is_taken else {KafkaError.MSG_SIZE_TOO_LARGE})
