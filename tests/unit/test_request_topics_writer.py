"""What a service writes to request topics for its HTTP callers."""

from __future__ import annotations

from typing import Any

import pytest

from blackbox.admin import request_topics_writer
from blackbox.admin.request_topics_writer import RequestTopicsWriter
from blackbox.client.pending_write import NotSent
from blackbox.config.settings import load


def test_after_a_failure_the_next_request_is_written_by_a_new_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients: list[object] = []

    class Client:
        def __init__(self, *_: Any, **__: Any) -> None:
            clients.append(self)

    monkeypatch.setattr(request_topics_writer, "RequestWriter", Client)
    writer = RequestTopicsWriter(load(kafka_bootstrap_servers="127.0.0.1:1"))

    def fail(client: object) -> None:
        raise NotSent("a fatal error")

    assert [writer.with_writer("TB", clients.index) for _ in range(2)] == [0, 0]
    with pytest.raises(NotSent):
        writer.with_writer("TB", fail)
    assert writer.with_writer("TB", clients.index) == 1
