"""A caller's side: requests written to a request topic, without Redis."""

from blackbox.client.asking import NotSent
from blackbox.client.client import AsyncClient, Client, Later

__all__ = ["AsyncClient", "Client", "Later", "NotSent"]
