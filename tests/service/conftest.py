"""What the tests of real services share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.world import World

Serve = Callable[..., httpx.Client]


@pytest.fixture
def serve(world: World) -> Iterator[Serve]:
    """Starts a service, with more settings; a client of its HTTP server."""
    with ExitStack() as ending:

        def started(**more: Any) -> httpx.Client:
            process = world.start_service(**more).wait_ready()
            client = httpx.Client(base_url=process.address, trust_env=False, timeout=30)
            return ending.enter_context(client)

        yield started
