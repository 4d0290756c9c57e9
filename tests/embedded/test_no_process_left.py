"""However the parent ends, its servers end and its temporary folder is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.embedded.processes import becomes_true, is_alive

PROLOGUE = """
import os, signal, sys, time
from pathlib import Path
from blackbox.embedded import EmbeddedRedis, EmbeddedStack

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
"""
REDIS = """
folder = Path(sys.argv[1])
redis = EmbeddedRedis(folder, disposable=folder)
redis.start()
print(folder, redis.pid, flush=True)
"""
STACK = """
stack = EmbeddedStack()
stack.start()
print(stack.folder, stack.kafka.pid, stack.redis.pid, flush=True)
"""
WAIT = "time.sleep(600)\n"


@contextmanager
def parent(script: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python in its own session, so that it gets signals as in a terminal."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + script, str(folder / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def folder_and_pids(process: subprocess.Popen[str]) -> tuple[Path, list[int]]:
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    servers = [int(pid) for pid in pids]
    guards = [psutil.Process(pid).ppid() for pid in servers]
    assert all(map(is_alive, servers + guards))
    return Path(folder), servers + guards


def assert_all_gone(folder: Path, pids: list[int]) -> None:
    assert becomes_true(lambda: not any(map(is_alive, pids))), [
        pid for pid in pids if is_alive(pid)
    ]
    assert becomes_true(lambda: not folder.exists())


@pytest.mark.usefixtures("redis_is_there")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_parent_ends_its_server(tmp_path: Path, number: signal.Signals) -> None:
    with parent(REDIS + WAIT, tmp_path) as process:
        folder, pids = folder_and_pids(process)
        process.send_signal(number)
        process.wait(10)
        assert_all_gone(folder, pids)


@pytest.mark.usefixtures("redis_is_there", "kafka_is_there")
def test_a_killed_parent_leaves_neither_kafka_nor_redis_nor_its_folder(tmp_path: Path) -> None:
    with parent(STACK + WAIT, tmp_path) as process:
        folder, pids = folder_and_pids(process)
        assert len(pids) == 4
        process.kill()
        assert_all_gone(folder, pids)


@pytest.mark.usefixtures("redis_is_there")
@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise ValueError", "os._exit(0)"], ids=repr)
def test_a_parent_that_exits_without_stopping_its_server_ends_it(
    tmp_path: Path, ending: str
) -> None:
    with parent(f"{REDIS}sys.stdin.readline()\n{ending}\n", tmp_path) as process:
        folder, pids = folder_and_pids(process)
        process.communicate("\n")
        assert_all_gone(folder, pids)


@pytest.mark.usefixtures("redis_is_there")
def test_a_surviving_forked_child_does_not_keep_the_server(tmp_path: Path) -> None:
    fork = "child = os.fork()\nif child: print(child, flush=True)\n"
    with parent(REDIS + fork + WAIT, tmp_path) as process:
        folder, pids = folder_and_pids(process)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait(10)
        try:
            assert_all_gone(folder, pids)
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("redis_is_there")
def test_a_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    start = "import threading\nfolder = Path(sys.argv[1])\nredis = EmbeddedRedis(folder)\n"
    thread = "starter = threading.Thread(target=redis.start)\nstarter.start()\nstarter.join()\n"
    ask = "import redis as r\nprint(r.Redis.from_url(redis.url).ping(), flush=True)\n"
    with parent(start + thread + ask, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"


@pytest.mark.usefixtures("redis_is_there")
def test_ctrl_c_in_the_terminal_does_not_reach_the_server(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGINT, lambda *_: print(redis.stop(), flush=True))\n"
    with parent(REDIS + deaf + "print('deaf', flush=True)\n" + WAIT, tmp_path) as process:
        _, pids = folder_and_pids(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "deaf\n"
        groups = {os.getpgid(pid) for pid in pids}
        assert os.getpgid(process.pid) not in groups
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "None\n"
    log = (tmp_path / "data" / "redis.log").read_text()
    assert "Received SIGTERM" in log
    assert "Received SIGINT" not in log


@pytest.mark.usefixtures("redis_is_there")
def test_a_killed_guard_ends_its_server(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux can tie a child to its parent")
    with parent(REDIS + WAIT, tmp_path) as process:
        _, (server, guard) = folder_and_pids(process)
        os.kill(guard, signal.SIGKILL)
        assert becomes_true(lambda: not is_alive(server))
