"""The environment of kafka-message-scheduler, read as blackbox's own; `docs/scheduler.md` lists it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

TOPICS, GROUP = "schedules", "scheduler-cg"
"""That design's defaults of SCHEDULES_TOPICS and GROUP_ID."""


class Alias(NamedTuple):
    """The value of a setting that another variable gives."""

    variable: str
    value: str


def aliases(environment: Mapping[str, str]) -> dict[str, Alias]:
    """The aliases by setting; none unless BOOTSTRAP_SERVERS alone names the brokers, as in that design.

    A BLACKBOX_ variable that is set wins over its alias.
    """
    if "BOOTSTRAP_SERVERS" not in environment or "BLACKBOX_KAFKA_BOOTSTRAP_SERVERS" in environment:
        return {}
    given = {"SCHEDULES_TOPICS": TOPICS, "GROUP_ID": GROUP} | dict(environment)
    host, _, port = given.get("SERVER_ADDR", "").rpartition(":")
    topics = ",".join(f"{name.strip()}:scheduler" for name in given["SCHEDULES_TOPICS"].split(","))
    read = {
        "kafka_bootstrap_servers": Alias("BOOTSTRAP_SERVERS", given["BOOTSTRAP_SERVERS"]),
        "request_topics": Alias("SCHEDULES_TOPICS", topics),
        "group_id": Alias("GROUP_ID", given["GROUP_ID"]),
        "history_topic": Alias("HISTORY_TOPIC", given.get("HISTORY_TOPIC", "")),
        "scheduler_grace_s": Alias(
            "SCHEDULE_GRACE_INTERVAL", given.get("SCHEDULE_GRACE_INTERVAL", "")
        ),
        # As in Go, an address without a host, such as `:8000`, is that of all interfaces.
        "http_host": Alias("SERVER_ADDR", (host or "0.0.0.0") if port else ""),
        "http_port": Alias("SERVER_ADDR", port),
        "metrics_addr": Alias("METRICS_ADDR", given.get("METRICS_ADDR", "")),
    }
    return {
        name: alias
        for name, alias in read.items()
        if alias.value and f"BLACKBOX_{name.upper()}" not in environment
    }
