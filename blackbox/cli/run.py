"""`blackbox run`: run the service."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Annotated

import typer

from blackbox.cli import signals
from blackbox.cli.error_exit import FAILED, REFUSED, BadUsage, error_exit
from blackbox.config.settings import Half, Settings, load
from blackbox.embedded import EmbeddedError
from blackbox.embedded.java import find_java
from blackbox.spark import missing_packages
from blackbox.spark.job_failures import in_one_line
from blackbox.support import logs

SPARK_PACKAGES = ("pyspark", "pyarrow", "pandas")
OF_SPARK = ("py4j.", "pyspark.", "blackbox.spark.", "blackbox.engine.spark.")


Embedded = Annotated[
    bool,
    typer.Option(
        "--embedded",
        help="Also start Kafka and Redis, on free ports, for demos and tests: every user of this "
        "machine can use this Kafka.",
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(help="With --embedded: the folder for their data; default: a temporary folder."),
]
EngineName = Annotated[str | None, typer.Option(help="spark or process; default: BLACKBOX_ENGINE.")]
OnlyHalf = Annotated[
    Half | None,
    typer.Option(help="With Spark: run only intake or only dispatch; start the other separately."),
]


def run(
    embedded: Embedded = False,
    data: DataFolder = None,
    engine: EngineName = None,
    only: OnlyHalf = None,
) -> None:
    """Run the service: read requests and deliver their messages, until SIGTERM or Ctrl-C.

    Exits with 0 after SIGTERM or Ctrl-C, and with 3 when `check` refuses the settings of Kafka or Redis.
    """
    from blackbox.run import UnsafeConfiguration, serve

    if data is not None and not embedded:
        raise BadUsage(f"--data {data} is only for embedded servers; add --embedded")
    logs.to_stderr()
    overrides = {} if engine is None else {"engine": engine}
    # Loaded before the servers start, which takes seconds: a bad value is reported at once. Brokers
    # are required, so they get a name that is replaced below.
    settings = load(**overrides | ({"kafka_bootstrap_servers": "embedded"} if embedded else {}))
    _check_engine(settings, only)
    code = 0
    with ExitStack() as ending:
        if embedded:
            settings = load(**overrides | _start_servers(data, ending))
        # Only now: while servers start, Ctrl-C must raise, as nothing waits for `stop` yet.
        stop = Event()
        signals.announce(stop)
        try:
            has_ended = serve(settings, stop, only)
        except UnsafeConfiguration as refusal:
            raise error_exit(str(refusal), REFUSED) from None
        except Exception as failure:
            # A failure in Spark comes with the JVM's stack traces; others are faults of blackbox.
            if not type(failure).__module__.startswith(OF_SPARK):
                raise
            error_exit(f"Spark failed: {in_one_line(failure)}")
            # Threads that wait for an answer of its JVM would keep this process for good.
            has_ended, code = False, FAILED
    # After the embedded servers have stopped: leaving skips all that is still on the stack.
    if not has_ended:
        signals.leave(code)


def _check_engine(settings: Settings, only: Half | None) -> None:
    if settings.engine != "spark":
        if only is not None:
            raise BadUsage(
                f"--only {only} is only for the Spark engine, and the engine is {settings.engine}; "
                "remove it"
            )
        return
    # Reads the file: a bad one is refused here, not after Kafka and Redis have started.
    settings.spark_settings()
    missing = missing_packages(SPARK_PACKAGES)
    if missing:
        raise BadUsage(
            f"the Spark engine needs {', '.join(missing)}; pip install '.[spark]' in a checkout"
            " of blackbox, or choose --engine process (BLACKBOX_ENGINE=process)"
        )
    try:
        find_java()
    except EmbeddedError as error:
        raise BadUsage(
            f"{error}; the Spark engine needs it too; --engine process (BLACKBOX_ENGINE=process) "
            "does not"
        ) from None


def _start_servers(data: Path | None, ending: ExitStack) -> dict[str, str]:
    from blackbox.embedded import OPEN_KAFKA, EmbeddedStack

    # Until the service runs, a signal must unwind `ending`, which stops the servers.
    signals.interrupt()
    stack = EmbeddedStack(data, progress=lambda text: typer.echo(text, err=True))
    ending.enter_context(stack)
    typer.echo(OPEN_KAFKA, err=True)
    typer.echo(f"export BLACKBOX_KAFKA_BOOTSTRAP_SERVERS={stack.bootstrap_servers}")
    typer.echo(f"export BLACKBOX_REDIS_URL={stack.redis_url}")
    return {"kafka_bootstrap_servers": stack.bootstrap_servers, "redis_url": stack.redis_url}
