"""Cut a torn tail off Redis' append-only file before Redis reads it.

Redis can load a file whose tail was lost inside a MULTI as if a later transaction had never happened:
the result is not a prefix of what was written. `redis-check-aof --fix` cuts it before that MULTI.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from blackbox.embedded.errors import EmbeddedError

CHECK_DEADLINE_S = 300.0


def repair_append_only_files(redis_server: str, folder: Path) -> None:
    """Check, and where needed cut, the files that Redis would load from `folder`, if any.

    Redis 7 keeps several files and a manifest that names them; Redis 6.2 keeps a single one.
    """
    manifests = sorted(folder.glob("appendonlydir/*.manifest"))
    for file in manifests or sorted(folder.glob("appendonly.aof")):
        if file.stat().st_size:
            _check(redis_server, file)


def _check(redis_server: str, file: Path) -> None:
    done = subprocess.run(
        ["redis-check-aof", "--fix", str(file)],
        # The server binary is the checker when it is called by that name.
        executable=redis_server,
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
