"""The interface between the probes and a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from blackbox.records.request import Shard


class Health(Protocol):
    """Liveness and readiness of a service, and the shards that prevent them."""

    def is_live(self) -> bool: ...
    def is_ready(self) -> bool: ...
    def stuck(self) -> Sequence[Shard]: ...
    def not_open(self) -> Sequence[Shard]: ...
    def why_not_open(self) -> Mapping[Shard, str]: ...
