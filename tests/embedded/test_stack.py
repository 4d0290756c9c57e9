from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from redis import AuthenticationError, Redis

from blackbox.embedded import EmbeddedError, EmbeddedStack
from tests.embedded.processes import is_alive

pytestmark = pytest.mark.usefixtures("redis_is_there", "kafka_is_there")


@pytest.mark.proof
def test_a_second_run_on_a_given_folder_finds_its_data(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path / "run") as stack:
        admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
        admin.create_topics([NewTopic("kept", 3, 1)])["kept"].result(10)
        Redis.from_url(stack.redis_url).set("kept", "yes")
        pids = [stack.kafka.pid, stack.redis.pid]
    assert not any(map(is_alive, pids))
    with EmbeddedStack(tmp_path / "run") as stack:
        topics = AdminClient({"bootstrap.servers": stack.bootstrap_servers}).list_topics().topics
        assert len(topics["kept"].partitions) == 3
        assert Redis.from_url(stack.redis_url).get("kept") == b"yes"


@pytest.mark.proof
def test_other_users_can_neither_use_its_redis_nor_read_its_files(
    tmp_path: Path,
) -> None:
    with EmbeddedStack(tmp_path / "run") as stack:
        with pytest.raises(AuthenticationError), Redis(port=stack.redis.port) as stranger:
            stranger.config_set("appendfsync", "no")
        assert Redis.from_url(stack.redis_url).ping()
        folders = [stack.redis.folder, stack.kafka.folder]
    assert [folder.stat().st_mode & 0o077 for folder in folders] == [0, 0]


def test_a_temporary_folder_is_removed_with_the_stack_even_if_kafka_is_frozen() -> None:
    with EmbeddedStack() as stack:
        folder, pids = stack.folder, [stack.kafka.pid, stack.redis.pid]
        assert folder.exists()
        os.kill(stack.kafka.pid, signal.SIGSTOP)
    assert not folder.exists()
    assert not any(map(is_alive, pids))


def test_if_one_server_fails_the_other_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = EmbeddedStack(tmp_path)
    (tmp_path / "kafka").write_text("not a folder")
    with pytest.raises(OSError, match="kafka"):
        stack.start()
    with pytest.raises(EmbeddedError, match=r"call start\(\) first"):
        _ = stack.redis.pid


def test_a_stack_interrupted_at_any_moment_leaves_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stack = EmbeddedStack()
    assert list(tmp_path.iterdir()) == [], "after a Ctrl-C here nothing would remove it"

    def interrupted() -> None:
        assert stack.folder.stat().st_mode & 0o777 == 0o700
        raise KeyboardInterrupt

    monkeypatch.setattr(stack.kafka, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stack.start()
    assert list(tmp_path.iterdir()) == []
