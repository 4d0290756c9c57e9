"""How commands report failures: clear lines on stderr, and an exit code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from blackbox.client import NotSent
from blackbox.config.settings import Settings
from blackbox.config.settings_error import SettingsError
from blackbox.embedded import EmbeddedError
from blackbox.index.address import read
from blackbox.records.errors import IndexFull, IndexLost, NotAllowed, RecoveryRequired
from blackbox.spark.job_failures import AuditError, LedgerError
from blackbox.support import logs

FAILED = 1
"""The command failed, did not do all of what was asked, or found what it warns of."""
BAD_USAGE = 2
"""An argument, an option or a setting is invalid; nothing was done."""
REFUSED = 3
"""`run`: the settings of Kafka or Redis are unsafe. `load`: a row is invalid. Nothing was started or sent."""
INTERRUPTED = 130
"""Interrupted by Ctrl-C, or `demo` by SIGTERM; `run` exits with 0 instead."""


class BadUsage(Exception):
    """Invalid usage; the text names the value and what to type instead."""


@contextmanager
def failures_explained() -> Iterator[None]:
    """Turn expected failures into error lines and an exit code."""
    try:
        yield
    except (SettingsError, BadUsage) as error:
        raise error_exit(str(error), BAD_USAGE) from None
    except (NotSent, EmbeddedError, IndexFull, LedgerError, AuditError) as error:
        raise error_exit(str(error)) from None
    except RecoveryRequired as error:
        raise error_exit(_with_remedy(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def error_exit(text: str, code: int = FAILED) -> typer.Exit:
    """Print the lines of an error; raise the returned exception to end the command."""
    # https://no-color.org, which typer does not support.
    mark = "error:" if os.environ.get("NO_COLOR") else typer.style("error:", fg="red")
    for line in text.split("\n"):
        typer.echo(f"{mark} {logs.printable(line)}", err=True)
    return typer.Exit(code)


def no_topics_exit(settings: Settings) -> typer.Exit:
    """As `error_exit`, for when no request topic exists."""
    topics, servers = ", ".join(settings.topics), settings.kafka_bootstrap_servers
    text = f"no request topic ({topics}) exists on {servers}; `blackbox run` creates them"
    return error_exit(text)


def _with_remedy(error: RecoveryRequired) -> str:
    if isinstance(error, IndexLost):
        address = read(os.environ.get("BLACKBOX_REDIS_URL", "redis://localhost:6379/0"))
        return f"{error}; check that Redis runs at {address} (BLACKBOX_REDIS_URL)"
    if isinstance(error, NotAllowed):
        return str(error)
    servers = os.environ.get("BLACKBOX_KAFKA_BOOTSTRAP_SERVERS", "")
    return f"{error}; check that Kafka runs at {servers} (BLACKBOX_KAFKA_BOOTSTRAP_SERVERS)"
