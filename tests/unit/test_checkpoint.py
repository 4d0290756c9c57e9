"""Folders of queries: removed with them, or by the next query if their driver is gone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from blackbox.engine.spark.checkpoint import PREFIX, Checkpoint


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_checkpoint_is_removed_with_its_query(place: Path) -> None:
    checkpoint = Checkpoint()
    (checkpoint.folder / "offsets").mkdir()

    checkpoint.close()

    assert not list(place.iterdir())


def test_only_checkpoints_of_killed_drivers_are_removed(place: Path) -> None:
    living = Checkpoint()
    killed = Checkpoint()
    os.close(killed._lock)  # as a process that ends does
    (killed.folder / "offsets").mkdir()
    (place / f"{PREFIX}file").touch()
    (place / f"{PREFIX}link").symlink_to(place)

    new = Checkpoint()

    assert {path.name for path in place.iterdir()} == {
        living.folder.name,
        new.folder.name,
        f"{PREFIX}file",
        f"{PREFIX}link",
    }
    living.close()
    new.close()
