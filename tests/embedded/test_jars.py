from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from blackbox.embedded import EmbeddedError, jars
from blackbox.embedded.jars import kafka_jars

FAKE_IVY = """#!/bin/sh
echo run >> {runs}
for last; do :; done
mkdir -p "$(dirname "$last")"
echo jar > "$(dirname "$last")/kafka_2.13-4.1.0.jar"
"""


def program(folder: Path, text: str) -> str:
    path = folder / "java"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(autouse=True)
def _some_ivy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "find_ivy", lambda: tmp_path / "ivy.jar")


def test_concurrent_callers_fetch_the_jars_once(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    java = program(tmp_path, FAKE_IVY.format(runs=runs))
    found: list[Path] = []
    askers = [
        threading.Thread(
            target=lambda: found.append(kafka_jars(java, lambda _: None, tmp_path / "cache"))
        )
        for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(set(found)) == 1
    assert [jar.name for jar in found[0].iterdir()] == ["kafka_2.13-4.1.0.jar"]
    assert runs.read_text().splitlines() == ["run"]
    assert sorted(os.listdir(tmp_path / "cache")) == [".lock", found[0].name]


def test_a_failed_fetch_leaves_no_files_and_shows_the_output_of_ivy(tmp_path: Path) -> None:
    java = program(tmp_path, "#!/bin/sh\necho no route to host\nexit 1\n")
    with pytest.raises(EmbeddedError, match=r"check the network(.|\n)*no route to host"):
        kafka_jars(java, lambda _: None, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == [".lock"]


def test_a_missing_pyspark_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(EmbeddedError, match="PySpark is not installed; install blackbox"):
        kafka_jars("java", lambda _: None, tmp_path)
