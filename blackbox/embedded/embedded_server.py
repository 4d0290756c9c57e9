"""Base of the embedded servers: a folder, a port that stays the same, a guarded process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import ClassVar

from blackbox.embedded.guarded_process import (
    EmbeddedError,
    GuardedProcess,
    ServerDiedError,
    lock_folder,
)
from blackbox.embedded.tcp_ports import HOST, free_port

START_DEADLINE_S = 60.0
STOP_GRACE_S = 10.0
START_ATTEMPTS = 5
PORT_TAKEN = "Address already in use"


@dataclass(eq=False, repr=False)
class EmbeddedServer(ABC):
    """A server whose data are in `folder`.

    Without `port` a free one is taken at the first start; it then stays the same, also after `kill()`.
    `settings` override the defaults. `disposable` is a folder to be removed if this process dies
    without `stop()`.
    """

    NAME: ClassVar[str]

    folder: Path
    _: KW_ONLY
    port: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    disposable: Path | None = None
    progress: Callable[[str], None] = field(default=lambda _: None)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.log = self.folder / f"{self.NAME.lower()}.log"
        self._process: GuardedProcess | None = None

    @property
    def address(self) -> str:
        """`host:port`; known once `start()` has returned, and the same after a restart."""
        if not self.port:
            raise EmbeddedError(f"the embedded {self.NAME} has no port yet; call start() first")
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """That of the server itself, not of its guard."""
        if self._process is None:
            raise EmbeddedError(f"the embedded {self.NAME} is not running; call start() first")
        return self._process.pid

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.is_running

    def start(self) -> None:
        """Start it, and return when it answers (Kafka 2-3 s; 4 s after a kill); does nothing if it runs.

        Raises EmbeddedError.
        """
        if self._is_running:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)  # mkdir leaves the mode of a folder that exists
        lock = lock_folder(self.folder)
        try:
            self._prepare()
            self._start_on_a_free_port(lock)
        finally:
            # The guard keeps its copy for as long as the server may be alive.
            os.close(lock)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop it gracefully, or kill it after `grace_s`; does nothing if it does not run."""
        if self._process is not None:
            self._process.stop(grace_s)
            self._process = None

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    @abstractmethod
    def _prepare(self) -> None:
        """Find the program, and prepare the folder, which is locked."""

    @abstractmethod
    def _launch(self, port: int, lock: int) -> tuple[GuardedProcess, Callable[[], bool]]:
        """Start the process on this port; also returns a function that says whether it answers."""

    def _start_on_a_free_port(self, lock: int) -> None:
        self.progress(f"starting {self.NAME} in {self.folder}")
        for attempt in range(1, START_ATTEMPTS + 1):
            port = self.port or free_port()
            process, answers = self._launch(port, lock)
            name = f"the embedded {self.NAME}"
            try:
                process.wait_until(answers, name=name, deadline_s=START_DEADLINE_S)
            except ServerDiedError as error:
                # A free port can be taken before the server binds it. A port that is fixed is
                # tried again: the server of a killed owner may need a moment to end.
                if PORT_TAKEN not in error.log or attempt == START_ATTEMPTS:
                    raise
                continue
            self.port, self._process = port, process
            return
