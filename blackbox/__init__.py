"""Delayed messages for Kafka; `from blackbox import Client` is a caller's way in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blackbox.client import (
        AsyncClient,
        Client,
        Exhausted,
        Later,
        LookupFailed,
        MaybeSent,
        NotSent,
        Retry,
        State,
        TooLate,
    )

__all__ = [
    "AsyncClient", "Client", "Exhausted", "Later", "LookupFailed", "MaybeSent", "NotSent", "Retry",
    "State", "TooLate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Only who asks for a client loads what it needs."""
    if name not in __all__:
        raise AttributeError(f"module 'blackbox' has no attribute {name!r}")
    from blackbox import client

    return getattr(client, name)
