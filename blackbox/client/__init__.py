"""The client library: write requests to a request topic and look up their outcome, without Redis."""

from blackbox.client.asking import NotSent
from blackbox.client.client import AsyncClient, Client, Later, TooLate
from blackbox.client.retry import Exhausted, Retry
from blackbox.client.state import LookupFailed, State

__all__ = [
    "AsyncClient", "Client", "Exhausted", "Later", "LookupFailed", "NotSent", "Retry", "State",
    "TooLate",
]  # fmt: skip
