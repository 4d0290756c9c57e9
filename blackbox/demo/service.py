"""The demo's service and audit, as separate processes configured by their environment and arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import orjson

from blackbox.embedded import EmbeddedError, EmbeddedStack
from blackbox.embedded.guarded_process import GuardedProcess
from blackbox.embedded.tcp_ports import HOST, free_port

START_DEADLINE_S = 120.0
# A second more than the five in which a service stops.
STOP_GRACE_S = 6.0
# A request to a missing target becomes a dead letter after one retry, so the demo can end soon.
RETRIES = 1

AUDIT_DEADLINE_S = 300.0

BLACKBOX = (sys.executable, "-m", "blackbox")


class DemoService(GuardedProcess):
    """`blackbox run` against the stack."""

    def __init__(self, stack: EmbeddedStack, *, engine: str) -> None:
        port = free_port()
        self.http = f"http://{HOST}:{port}"
        more = {
            "BLACKBOX_ENGINE": engine,
            "BLACKBOX_RETRIES": str(RETRIES),
            "BLACKBOX_HTTP_PORT": str(port),
            **_temporary_files_in(stack.folder / "service"),
        }
        super().__init__(
            [*BLACKBOX, "run"],
            log=stack.folder / "service.log",
            environment=_environment(stack, more),
        )

    def wait_ready(self) -> None:
        """Wait until all its shards are open. Raises EmbeddedError, with the end of its log."""
        self.wait_until(self._is_ready, name="the blackbox service", deadline_s=START_DEADLINE_S)

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.http}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        # Not listening yet, or the 503 of closed shards, which urllib raises.
        except OSError:
            return False


class DemoAudit(GuardedProcess):
    """`blackbox audit` against the stack, beside the service; it writes its page to `page`."""

    def __init__(self, stack: EmbeddedStack, page: Path) -> None:
        folder = stack.folder / "audit"
        more = _temporary_files_in(folder)
        options = ("--targets", "--json", "--html", str(page))
        super().__init__(
            [*BLACKBOX, "audit", *options],
            log=folder / "audit.log",
            environment=_environment(stack, more),
        )

    def verdict(self) -> dict[str, Any]:
        """The audit's verdict, parsed from JSON. Raises EmbeddedError, with the end of its log, without one."""
        code = self.wait(AUDIT_DEADLINE_S)
        # Output and log are one file, so the JSON is one of the last lines.
        said = self.tail()
        found = [line for line in said.splitlines() if line.startswith('{"')]
        if code is None or not found:
            ended = "did not end" if code is None else f"exited with {code}"
            raise EmbeddedError(f"the audit {ended}; the end of its log:\n{said}")
        verdict: dict[str, Any] = orjson.loads(found[-1])
        return verdict


def _temporary_files_in(folder: Path) -> dict[str, str]:
    """Variables for a process whose temporary files are removed with the stack, even if it is killed."""
    folder.mkdir()
    return {
        "TMPDIR": str(folder),
        # Not `spark.driver.extraJavaOptions`: that would replace the options for a quick start.
        "JDK_JAVA_OPTIONS": f"-Djava.io.tmpdir={folder}",
    }


def _environment(stack: EmbeddedStack, more: Mapping[str, str]) -> dict[str, str]:
    """That of this process, but with only the BLACKBOX_* variables set here."""
    # Those of the shell may name other servers, topics or rules.
    others = {name: held for name, held in os.environ.items() if not name.startswith("BLACKBOX_")}
    servers = {
        "BLACKBOX_KAFKA_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "BLACKBOX_REDIS_URL": stack.redis_url,
    }
    return {**others, **servers, **more}
