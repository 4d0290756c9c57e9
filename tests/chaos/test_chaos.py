"""A sample of `make chaos`: one schedule of each of these faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blackbox.embedded import EmbeddedError
from tests.chaos.faults import FAULTS
from tests.chaos.play import play
from tests.chaos.schedule import schedules
from tests.chaos.servers import FAKETIME, Servers
from tests.conftest import missing, missing_tool

pytestmark = [pytest.mark.service, pytest.mark.fault]

SEED = 1
SAMPLE = [
    "service killed",
    "service frozen past its session, beside another",
    *(f"crash after {step}" for step in ("I3", "D3", "D4", "R3", "R4", "records were carried on")),
    "crash after D4, and once more",
    "reply to EXEC lost",
    "reply to EndTxn lost",
    "Redis emptied while it is rebuilt",
    "Redis started with its last writes lost",
    "Redis put back from after a cancel to before it",
    "Redis put back to before a trim",
    "crash in a rebuild after a batch of a rebuild",
    "Redis cannot write its file",
    "Redis' clock an hour ahead",
    "target topic deleted",
    "several of these",
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    shared = Servers(tmp_path_factory.mktemp("chaos"), lanes=1)
    try:
        shared.start()
    except EmbeddedError as error:
        missing(str(error))
    yield shared
    shared.close()


@pytest.mark.parametrize("fault", SAMPLE)
def test_each_request_is_delivered_once_and_never_early_despite_faults(
    fault: str, servers: Servers, tmp_path: Path
) -> None:
    if FAULTS[fault].needs_faketime and not FAKETIME:
        missing_tool("libfaketime is not installed; on Debian: apt-get install faketime")
    [schedule] = schedules(SEED, {fault: 1})

    played = play(schedule, servers, 0, tmp_path)

    assert not played.complaints, f"{played.complaints}, see {played.folder}"
    assert played.books.delivered > 10
