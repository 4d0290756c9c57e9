"""A Kafka that requires passwords over TLS and refuses everything without an ACL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AclBindingFilter, AclPermissionType, AdminClient
from confluent_kafka.admin import AclOperation as Operation
from confluent_kafka.admin import ResourcePatternType as Pattern
from confluent_kafka.admin import ResourceType as Resource

from blackbox.embedded import EmbeddedKafka
from tests.security.certificates import Certificates
from tests.security.rights import Right
from tests.support.world import read_with, until

ANY: Any = None
ADMIN, ADMINS_PASSWORD = "admin", "admins-own"
USER, PASSWORD = "blackbox", "s3cret-of-kafka"


class GuardedKafka:
    """The broker, its admin, and what the user `blackbox` may do."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        self.certificates = certificates
        self.kafka = EmbeddedKafka(
            folder,
            settings=guarded_settings(certificates),
            users={ADMIN: ADMINS_PASSWORD, USER: PASSWORD},
            client=self.login(ADMIN, ADMINS_PASSWORD),
        )

    def start(self) -> None:
        self.kafka.start()
        self.admin = AdminClient(self.client(ADMIN, ADMINS_PASSWORD))
        self.producer = Producer(self.client(ADMIN, ADMINS_PASSWORD))

    def login(self, user: str = USER, password: str = PASSWORD) -> dict[str, str]:
        """The settings of librdkafka for this user."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": password,
            "ssl.ca.location": str(self.certificates.ca),
        }

    def client(self, user: str = USER, password: str = PASSWORD) -> dict[str, Any]:
        """The same, and where the broker is."""
        return {
            "bootstrap.servers": self.kafka.bootstrap_servers,
            "log_level": 0,
            **self.login(user, password),
        }

    def allow(self, rights: Iterable[Right]) -> None:
        """Give the user exactly these permissions from now on."""
        wanted = {right.binding(USER) for right in rights}
        others = self.allowed() - wanted
        if others:
            filters = [as_filter(binding) for binding in others]
            for done in self.admin.delete_acls(filters).values():
                done.result()
        if wanted:
            for done in self.admin.create_acls(list(wanted)).values():
                done.result()
        until("the ACLs are in force", lambda: self.allowed() == wanted)

    def allowed(self) -> set[Any]:
        everything = AclBindingFilter(
            Resource.ANY, ANY, Pattern.ANY, f"User:{USER}", ANY, Operation.ANY,
            AclPermissionType.ANY,
        )  # fmt: skip
        return set(self.admin.describe_acls(everything).result())

    def send(
        self, topic: str, value: str | bytes, headers: Any = None, key: str | None = None
    ) -> None:
        """Write any record as the admin."""
        self.producer.produce(topic, value, key, headers=headers)
        assert self.producer.flush(20) == 0

    def read(self, topic: str) -> list[Message]:
        """Everything that a read_committed consumer can read."""
        return list(read_with(Consumer(reading(self.client(ADMIN, ADMINS_PASSWORD))), topic))

    def stop(self) -> None:
        self.kafka.stop()


def reading(client: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **client,
        "group.id": "reader",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 20,
    }


def as_filter(binding: Any) -> AclBindingFilter:
    return AclBindingFilter(
        binding.restype, binding.name, binding.resource_pattern_type, binding.principal,
        binding.host, binding.operation, binding.permission_type,
    )  # fmt: skip


def guarded_settings(certificates: Certificates) -> dict[str, str]:
    """The only listener for clients keeps its name, PLAINTEXT, although it is not plaintext."""
    login = f'username="{ADMIN}" password="{ADMINS_PASSWORD}"'
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    return {
        "listener.security.protocol.map": "PLAINTEXT:SASL_SSL,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
        "listener.name.plaintext.scram-sha-512.sasl.jaas.config": f"{module} required {login};",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates.both),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates.ca),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        # The broker is anonymous to its own controller, which has no listener for clients.
        "super.users": f"User:{ADMIN};User:ANONYMOUS",
    }
