"""The permissions that `deploy/` ships, as values."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

ROOT = Path(__file__).parents[2]
KAFKA_ACLS = ROOT / "deploy" / "kafka-acls.csv"
REDIS_ACL = ROOT / "deploy" / "redis.acl"

OPERATIONS = {operation.name.replace("_", "").lower(): operation for operation in AclOperation}


class Right(NamedTuple):
    """A row of the list: a permission of the user on a resource of Kafka, and the command that needs it."""

    command: str
    resource: str
    name: str
    pattern: str
    operation: str
    what_for: str

    def __str__(self) -> str:
        return f"{self.command}: {self.operation} on {self.resource} {self.name}"

    def binding(self, user: str) -> AclBinding:
        return AclBinding(
            ResourceType[self.resource.replace("-", "_").upper()],
            self.name,
            ResourcePatternType[self.pattern.upper()],
            f"User:{user}",
            "*",
            OPERATIONS[self.operation.lower()],
            AclPermissionType.ALLOW,
        )


def kafka_rights(*commands: str) -> list[Right]:
    """The permissions of these commands; without arguments, of all."""
    with KAFKA_ACLS.open(newline="") as file:
        rights = [Right(*row) for row in csv.reader(file)][1:]
    return [right for right in rights if not commands or right.command in commands]


def redis_users() -> dict[str, str]:
    """The rules of each user that the file has."""
    lines = [line.split(maxsplit=2) for line in REDIS_ACL.read_text().splitlines()]
    assert all(word == "user" for word, _, _ in lines)
    return {name: rules for _, name, rules in lines}


def commands_of(user: str) -> set[str]:
    """The commands that the file allows this user, in the form of Redis' statistics: `config|get`."""
    rules = redis_users()[user].split()
    return {rule[1:] for rule in rules if rule.startswith("+")}
