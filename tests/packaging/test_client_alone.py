"""`pip install .` is for callers: it installs the client, and nothing that only the server needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.client_alone import install, packages, python

EVERYTHING = """
import pkgutil, blackbox, blackbox.client
for name in blackbox.__all__:
    getattr(blackbox, name)
for module in pkgutil.walk_packages(blackbox.client.__path__, "blackbox.client."):
    __import__(module.name)
client = blackbox.Client("localhost:1", caller="billing")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("alone") / "packages")


def test_a_caller_installs_nine_small_packages() -> None:
    assert packages() == {
        "annotated-types", "confluent-kafka", "cronsim", "orjson", "pydantic", "pydantic-core",
        "typing-extensions", "typing-inspection", "tzdata",
    }  # fmt: skip


def test_the_client_needs_nothing_of_the_server(installed: Path) -> None:
    done = python(installed, "-c", EVERYTHING)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_says_what_to_install(installed: Path) -> None:
    done = python(installed, "-m", "blackbox", "status")
    assert done.returncode == 1
    assert "needs the package typer, which is not installed; pip install '.[server]'" in done.stderr
    assert "Traceback" not in done.stderr
