"""The client library: write requests to a request topic and look up their outcome, without Redis."""

from blackbox.client.client import AsyncClient, Client, Later, TooLate
from blackbox.client.pending_write import MaybeSent, NotSent
from blackbox.client.retry import Exhausted, Retry
from blackbox.client.state_reader import LookupFailed, State

__all__ = [
    "AsyncClient", "Client", "Exhausted", "Later", "LookupFailed", "MaybeSent", "NotSent", "Retry",
    "State", "TooLate",
]  # fmt: skip
