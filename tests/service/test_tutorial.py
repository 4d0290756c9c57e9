"""The tutorial is run unchanged, in one pass, and prints what the page shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.world import until

pytestmark = [pytest.mark.service, pytest.mark.proof]

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(sh|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RECEIVER = re.compile(r"^python (\S*/receive\.py .*)$", re.MULTILINE)
ANY = [
    (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME"),
    (r"\d+ ms after", "N ms after"),
    (r"attempt \d", "attempt N"),
    (r"blackbox-due-ms': b'\d+'", "blackbox-due-ms': b'N'"),
]
"""Parts of the output that differ between runs."""


def lines_of(text: str) -> list[str]:
    for pattern, name in ANY:
        text = re.sub(pattern, name, text)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


class Reader:
    """Someone at three terminals, who types what the page says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log, self.received = folder / "service.log", folder / "received"
        self.received.touch()
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("BLACKBOX_")
        } | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    @contextmanager
    def terminal(self, command: str, output: Path, **more: str) -> Iterator[None]:
        """A terminal in which this runs until Ctrl-C."""
        with output.open("ab") as out:
            running = subprocess.Popen(
                command.split(), env=self.environment | more, cwd=self.folder,
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            yield
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(60)

    def copy_the_exports(self) -> bool:
        """As the page says, once the service is ready."""
        text = self.log.read_text()
        self.environment |= re.findall(r"^export (BLACKBOX_\w+)=(\S+)$", text, re.MULTILINE)
        return "started: process engine" in text

    def type(self, commands: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", RECEIVER.sub("", commands)],
            env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return lines_of(done.stdout)

    def has_received(self, lines: list[str]) -> bool:
        return set(lines) <= set(lines_of(self.received.read_text()))


@pytest.mark.timeout(600)
def test_the_tutorial_shows_the_actual_output(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    receiver = ExitStack()
    with ExitStack() as service, receiver:
        typed, printed = "", list[str]()
        for kind, block in BLOCKS:
            text = block.replace("/tmp/", f"{tmp_path}/")
            expected = lines_of(text)
            if kind == "sh" and text.startswith(("make install", "source")):
                continue
            if kind == "sh" and "run --embedded" in text:
                service.enter_context(reader.terminal(text, reader.log, BLACKBOX_HTTP_PORT="0"))
                until("the service is ready", reader.copy_the_exports, 120)
            elif kind == "sh":
                if "audit" in text:
                    until("it arrived", lambda: '"invoice": 10}' in reader.received.read_text())
                typed, printed = text, reader.type(text)
                for command in RECEIVER.findall(text):
                    receiver.close()
                    receiver.enter_context(
                        reader.terminal(f"{sys.executable} {command}", reader.received)
                    )
            elif expected[0].startswith(("reminders {", "invoices {")):
                until(f"{expected} is received", partial(reader.has_received, expected), 120)
            elif not expected[0].startswith("export "):
                # A page may say "wait half a minute": then the same command shows it after a while.
                is_look = typed.strip() == "blackbox letters"
                if is_look:
                    until("a dead letter", lambda: reader.type("blackbox letters"), 90)
                    printed = reader.type(typed)
                assert set(expected) <= set(printed), f"{typed}\n{printed}"
    assert "the index is empty, rebuilding it from the journals" in reader.log.read_text()
