"""How much of Redis a refused request takes until its dead letter is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from blackbox.core.intake import Intake
from blackbox.core.plan import Batch, Positions
from blackbox.formats import Options, make_format
from blackbox.index.shard_index import ShardIndex
from blackbox.index.shared_state import SharedState
from blackbox.records.request import Headers, Record
from blackbox.rules.admission import CallerAdmission
from blackbox.rules.file import RulesFile
from tests.contract.conftest import Backend
from tests.contract.held import GRACE_S, NOW_MS, SHARD

COUNT = 3000
RULES = "[callers.hoarder]\nmost_pending = 1\n[others]\nadmitted = false"
CONTROL = b"\1"  # six bytes in JSON
LONGEST = "\U0001f600" * 251  # an id has at most 255 characters

Write = Callable[[int], tuple[bytes, Headers]]


def headers_only(value: bytes) -> Write:
    return lambda offset: (b"{", [("trace", value)])


def asked(bytes_: int = 0, caller: str = "hoarder", id: str | None = None) -> Write:
    def write(offset: int) -> tuple[bytes, Headers]:
        named = {} if id is None else {"id": f"{id}{offset:04}"}
        request = {"topic": "orders", "message": "m" * bytes_, "countdown": 9} | named
        return json.dumps(request).encode(), [("CALLER_SERVICE", caller.encode())]

    return write


@pytest.mark.parametrize(
    ("write", "most_bytes"),
    [
        pytest.param(lambda offset: (b"{", []), 600, id="one byte"),
        pytest.param(lambda offset: (b"{" * 800, []), 1500, id="the largest kept whole"),
        pytest.param(headers_only(CONTROL * 110), 1500, id="control characters, kept whole"),
        pytest.param(headers_only(CONTROL * 900), 160, id="control characters"),
        pytest.param(headers_only(b"\xff" * 900), 160, id="no text"),
        pytest.param(lambda offset: (b"{" * 100_000, []), 160, id="large"),
        pytest.param(asked(), 700, id="over a quota"),
        pytest.param(asked(2000), 160, id="large, over a quota"),
        pytest.param(asked(400, id="i" * 32), 1500, id="over a quota, with an id"),
        pytest.param(asked(2000, id="i" * 32), 800, id="large, over a quota, with an id"),
        pytest.param(asked(2000, LONGEST, LONGEST), 4500, id="the longest caller and id"),
    ],
)
def test_a_refused_request_takes_little_room_whatever_its_record_is(
    real_backend: Backend, tmp_path: Path, write: Write, most_bytes: int
) -> None:
    path = tmp_path / "callers.toml"
    path.write_text(RULES)
    connections, client = real_backend.connections(), real_backend.client
    format = make_format("countdown", Options(max_countdown_s=10**7, own_topics=lambda name: False))
    with closing(ShardIndex(SHARD, connections, grace_s=GRACE_S)) as index:
        index.begin(Positions(0, 0))
        admission = CallerAdmission(RulesFile(path), SharedState(connections), lambda: [SHARD])
        intake = Intake(format, index, None, admission)

        def take(start: int, end: int) -> int:
            written = [write(offset) for offset in range(start, end)]
            records = [
                Record(offset, NOW_MS, None, value, headers)
                for offset, (value, headers) in enumerate(written, start)
            ]
            taken = intake.parse_and_store(Batch(start, end, records), NOW_MS)
            return taken.invalid + sum(taken.refused.values())

        take(0, 100)  # also what each caller, connection and shard takes
        before = client.info("memory")["used_memory"]
        assert sum(take(start, start + 100) for start in range(100, COUNT, 100)) == COUNT - 100
        each = (client.info("memory")["used_memory"] - before) / (COUNT - 100)
    print(f"{each:.0f} bytes")
    assert each < most_bytes
