"""Reading stretches of partitions, where no broker is needed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blackbox.journal import partition_reader
from blackbox.journal.access import Fetched
from blackbox.journal.partition_reader import poll

MESSAGE: Any = object()


class Client:
    """A consumer that has nothing to say but where it is: each time a little further, then a message."""

    def __init__(self, *positions: int, then: Any = MESSAGE) -> None:
        self.fetched = Fetched()
        self._positions = list(positions)
        self._then = then

    def poll(self, timeout: float) -> Any:
        assert timeout == partition_reader.SILENCE_S
        if not self._positions:
            return self._then
        partitions = {"3": {"next_offset": self._positions.pop(0)}}
        self.fetched(json.dumps({"topics": {"TB": {"partitions": partitions}}}))
        return None


@pytest.mark.parametrize("positions", [(), (8,), (8, 1_000, 1_000_000)])
def test_a_client_that_goes_on_is_waited_for(positions: tuple[int, ...]) -> None:
    client: Any = Client(*positions)

    assert poll(client, client.fetched, "TB", 3, 7) is MESSAGE


@pytest.mark.parametrize("positions", [(-1001,), (7,), (8, 8), (9, 8)])
def test_a_client_that_does_not_go_on_is_silent(positions: tuple[int, ...]) -> None:
    client: Any = Client(*positions)

    assert poll(client, client.fetched, "TB", 3, 7) is None
