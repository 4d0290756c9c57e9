"""Nobody who writes waits for somebody who puts letters away."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from blackbox.client.request import request_value
from blackbox.control import control as module
from blackbox.control.control import Control
from blackbox.control.letters import PutAway
from blackbox.request import locate
from blackbox.settings import load


@pytest.fixture
def control(tmp_path: Path) -> Control:
    config = tmp_path / "kafka.properties"
    config.write_text("test.mock.num.brokers=1\nallow.auto.create.topics=true\n")
    return Control(load(kafka_bootstrap_servers="in-process", kafka_config=config))


def test_a_request_is_written_while_letters_are_put_away(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = Event(), Event()

    def slow(*_: Any, **__: Any) -> PutAway:
        begun.set()
        assert may_end.wait(30)
        return PutAway([], {})

    monkeypatch.setattr(module, "put_away", slow)
    monkeypatch.setattr(control, "_registry", lambda: SimpleNamespace(access=None))
    with ThreadPoolExecutor() as pool:
        putting_away = pool.submit(control.put_away, ["letters/0@1"], again=False)
        assert begun.wait(10)
        [id] = pool.submit(control.ask, [request_value("orders", 1, countdown_s=9)], None).result(5)
        assert not putting_away.done()
        may_end.set()
        putting_away.result(10)
    assert isinstance(id, str)
    assert locate(id, ["TB"])[0].topic == "TB"
