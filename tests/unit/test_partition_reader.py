"""Reading stretches of partitions, where no broker is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from blackbox.doubt import JournalLost
from blackbox.journal import partition_reader
from blackbox.journal.access import Fetched
from blackbox.journal.partition_reader import PartitionReader


class Message:
    def error(self) -> None: ...

    def offset(self) -> int:
        return 99


class Client:
    """A consumer that has nothing to say but where it is: each time a little further, then a message."""

    def __init__(self, positions: tuple[int, ...], fetched: Callable[[str], None]) -> None:
        self._positions = list(positions)
        self._fetched = fetched
        self.is_closed = False

    def assign(self, partitions: object) -> None: ...

    def poll(self, timeout: float) -> Message | None:
        assert timeout == partition_reader.SILENCE_S
        if not self._positions:
            return Message()
        partitions = {"3": {"next_offset": self._positions.pop(0)}}
        self._fetched(json.dumps({"topics": {"TB": {"partitions": partitions}}}))
        return None

    def consume(self, count: int, timeout: float) -> list[Message]:
        return []

    def close(self) -> None:
        self.is_closed = True


class Access:
    group_id = "blackbox"

    def __init__(self, *positions: int) -> None:
        fetched = Fetched()
        self.client = Client(positions, fetched)
        self.fetching_consumer: Any = lambda **_: (self.client, fetched)


def read(access: Access, start: int, end: int) -> list[int]:
    """The offsets reached."""
    reader = PartitionReader(access)  # type: ignore[arg-type]
    found = [reached for _, reached in reader.read_patiently("TB", 3, start, end)]
    assert access.client.is_closed
    return found


@pytest.mark.parametrize("positions", [(), (8,), (8, 50, 90)])
def test_a_client_that_goes_on_is_waited_for(positions: tuple[int, ...]) -> None:
    assert read(Access(*positions), 7, 100) == [100]


def test_what_lies_behind_the_end_is_not_waited_for() -> None:
    assert read(Access(50, 100, 150, 200), 7, 100) == [100]


@pytest.mark.parametrize("positions", [(-1001,), (7,), (8, 8), (9, 8)])
def test_a_client_that_does_not_go_on_is_silent(positions: tuple[int, ...]) -> None:
    with pytest.raises(JournalLost, match="TB/3: nothing read for 15"):
        read(Access(*positions), 7, 100)
