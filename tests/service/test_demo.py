"""The demo as a new user runs it, and its output when something is wrong."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from blackbox.demo import performance
from blackbox.demo.display import Display
from blackbox.demo.performance import Demo
from blackbox.demo.script import ExpectedOutcome, ScriptedRecord
from blackbox.demo.service import DemoService
from blackbox.embedded import EmbeddedStack
from tests.support.world import AT_LENGTH, until

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("stack")]

PATIENCE_S = 400.0
"""Three JVMs and an audit without warm-up, beside another worker's."""


class RunningDemo:
    """A demo in its own process, with its temporary files in a folder of the test.

    It writes its page beside that folder, into the current one.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.page = folder.parent / "blackbox-audit.html"
        self._log = folder.parent / f"{folder.name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "blackbox", "demo", *arguments],
                cwd=folder.parent,
                env=os.environ | {"TMPDIR": str(folder), "BLACKBOX_REQUEST_TOPICS": "not for it"},
                stdout=log,
                stderr=log,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def says(self, text: str) -> None:
        until(
            f"it says {text!r}",
            lambda: text in self.said or self.process.poll() is not None,
            PATIENCE_S,
        )
        assert text in self.said, self.said

    def left_behind(self) -> list[object]:
        processes = [
            process.info
            for process in psutil.process_iter(["pid", "cmdline"])
            if str(self.folder) in str(process.info["cmdline"])
        ]
        return [*processes, *(path for path in self.folder.iterdir() if not is_probe(path))]


def is_probe(path: Path) -> bool:
    """A file that Python's `tempfile` writes and removes to find a writable folder: it stays after a kill."""
    return path.is_file() and path.read_bytes() in (b"", b"blat")


StartDemo = Callable[..., RunningDemo]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[StartDemo]:
    """Starts a demo, and ends it if a failing test leaves it running."""
    folder = tmp_path / "demo"
    folder.mkdir()
    started: list[RunningDemo] = []

    def start(*arguments: str) -> RunningDemo:
        started.append(RunningDemo(folder, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(30)


@pytest.mark.timeout(600)
def test_a_kept_demo_has_a_good_verdict_and_runs_until_ctrl_c(demo: StartDemo) -> None:
    running = demo("--requests", "300", "--seconds", "2", "--keep")
    running.says("Press Ctrl-C to stop")
    assert "300 asked · 294 delivered · 0 lost · 0 duplicated · 0 early" in running.said
    assert "4 dead letters, as expected" in running.said
    assert "sent 300" in running.said
    assert "first delivery" in running.said
    assert "audit: each of 300 requests has exactly one state, no exceptions" in running.said
    assert str(running.page) in running.said
    assert "Every request is accounted for" in running.page.read_text()
    assert "export BLACKBOX_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:" in running.said
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(30) == 0, running.said
    assert running.left_behind() == []


def test_the_password_of_the_demos_redis_is_not_in_the_process_list(tmp_path: Path) -> None:
    stack = EmbeddedStack(tmp_path)
    stack.kafka.port = stack.redis.port = 1  # nobody answers there
    service = DemoService(stack, engine="process")
    try:
        process = psutil.Process(service.pid)
        family = [process, *process.parents()]
        assert process.environ()["BLACKBOX_REDIS_URL"] == stack.redis_url
        password = stack.redis.settings["requirepass"]
        assert not [one for one in family if password in str(one.cmdline())]
    finally:
        service.kill()


@pytest.mark.proof
@pytest.mark.parametrize(
    ("moment", "seconds"),
    [("all shards open", 60)]
    + [("starting Kafka", 60), ("starting blackbox", 60), ("auditing", 1)] * AT_LENGTH,
)
def test_ctrl_c_ends_the_demo_cleanly_at_any_time(
    demo: StartDemo, moment: str, seconds: int
) -> None:
    running = demo("--requests", "300", "--seconds", str(seconds))
    running.says(moment)
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(30) == 130, running.said
    assert "Interrupted; all servers were stopped." in running.said
    assert "Traceback" not in running.said
    assert running.left_behind() == []


@pytest.mark.at_length
def test_a_missing_message_makes_the_verdict_bad(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    honest = performance.send

    def forgetful(script: Sequence[ScriptedRecord], bootstrap_servers: str) -> Iterator[int]:
        first = next(
            n for n, line in enumerate(script) if line.expected is ExpectedOutcome.DELIVERED
        )
        return honest([*script[:first], *script[first + 1 :]], bootstrap_servers)

    monkeypatch.setattr(performance, "send", forgetful)
    monkeypatch.setattr(performance, "OVERTIME_S", 3.0)
    said = io.StringIO()
    report = tmp_path / "audit.html"
    demo = Demo(50, 1, engine="process", keep=False, began_s=time.time(), report=report)
    assert not demo.perform(Display(Console(file=said, width=80)))
    assert "50 asked · 43 delivered · 1 lost · 0 duplicated · 0 early" in said.getvalue()
    assert "Not as expected: lost, unread" in said.getvalue()
