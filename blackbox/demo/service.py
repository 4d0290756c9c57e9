"""The demo's service and its audit: processes of their own, told nothing but their environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import orjson

from blackbox.embedded import EmbeddedError, EmbeddedStack
from blackbox.embedded.ports import HOST, free_port
from blackbox.embedded.process import GuardedProcess

START_DEADLINE_S = 120.0
STOP_GRACE_S = 6.0
RETRIES = 1
"""A target that does not exist becomes a dead letter after one more try, so that the demo ends."""

JVM_FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
AUDIT_DEADLINE_S = 300.0


class DemoService:
    """`blackbox run` against the stack, from entering the context to leaving it."""

    def __init__(self, stack: EmbeddedStack, *, engine: str) -> None:
        self._port = free_port()
        self.log: Path = stack.folder / "service.log"
        more = {
            "BLACKBOX_ENGINE": engine,
            "BLACKBOX_RETRIES": str(RETRIES),
            "BLACKBOX_HTTP_PORT": str(self._port),
        }
        self._process = GuardedProcess(_command(stack, more, "run"), log=self.log)

    @property
    def http(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    def wait_ready(self) -> None:
        """Until it owns its shards and all are open. Raises EmbeddedError, with the end of its log."""
        self._process.wait_until(
            self._is_ready, name="the blackbox service", deadline_s=START_DEADLINE_S
        )

    def tail(self) -> str:
        """The last lines it logged."""
        return self._process.tail()

    def stop(self) -> None:
        self._process.stop(STOP_GRACE_S)

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.http}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class DemoAudit:
    """`blackbox audit` against the stack, beside the service; it writes its page to `page`.

    What Spark leaves in temporary folders is in the stack's, and goes with it.
    """

    def __init__(self, stack: EmbeddedStack, page: Path) -> None:
        folder = stack.folder / "audit"
        folder.mkdir()
        spark = folder / "spark.properties"
        spark.write_text(f"spark.driver.extraJavaOptions={JVM_FLAGS} -Djava.io.tmpdir={folder}\n")
        more = {
            "TMPDIR": str(folder),
            "SPARK_LOCAL_DIRS": str(folder),
            "BLACKBOX_SPARK_CONFIG": str(spark),
        }
        options = ("--targets", "--json", "--html", str(page))
        self._process = GuardedProcess(
            _command(stack, more, "audit", *options), log=folder / "audit.log"
        )

    def wait(self) -> dict[str, Any]:
        """Its verdict as JSON. Raises EmbeddedError, with the end of its log, when there is none."""
        code = self._process.wait(AUDIT_DEADLINE_S)
        said = self._process.tail()
        found = [line for line in said.splitlines() if line.startswith('{"')]
        if code is None or not found:
            ended = "did not end" if code is None else f"ended with {code}"
            raise EmbeddedError(f"the audit {ended}; the end of its log:\n{said}")
        verdict: dict[str, Any] = orjson.loads(found[-1])
        return verdict

    def stop(self) -> None:
        self._process.kill()


def _command(stack: EmbeddedStack, more: Mapping[str, str], *arguments: str) -> list[str]:
    """`blackbox` with these arguments and of all its variables only the ones it is given."""
    variables = {
        "BLACKBOX_KAFKA_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "BLACKBOX_REDIS_URL": stack.redis_url,
        **more,
    }
    inherited = [name for name in os.environ if name.startswith("BLACKBOX_")]
    return [
        "env",
        *(argument for name in inherited for argument in ("-u", name)),
        *(f"{name}={value}" for name, value in variables.items()),
        *(sys.executable, "-m", "blackbox", *arguments),
    ]
