"""Who is in a consumer group, for commands that must not run beside a service."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException

from blackbox.journal.access import REQUEST_TIMEOUT_S, KafkaAccess, doubt

PATIENCE_S = 15.0
LOOK_S = 0.2


def count_members(access: KafkaAccess, groups: Sequence[str]) -> dict[str, int]:
    """How many members each group has; none if there is no such group.

    Raises JournalLost when the brokers do not answer within 15 s.
    """
    return {group: _count(access, group) for group in groups}


def _count(access: KafkaAccess, group: str) -> int:
    admin = access.admin()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        asked = admin.describe_consumer_groups([group], request_timeout=REQUEST_TIMEOUT_S)
        try:
            return len(asked[group].result().members)
        except KafkaException as error:
            cause = error.args[0]
            if cause.code() == KafkaError.GROUP_ID_NOT_FOUND:
                return 0
            # A cluster that never had a group makes the topic of offsets now.
            is_coming = cause.retriable() or cause.code() in _COMING
            if not is_coming or time.monotonic() > deadline:
                what = f"cannot ask for the members of the group {group}"
                raise doubt(error, what, f"Describe on group {group}") from None
        time.sleep(LOOK_S)


_COMING = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)
