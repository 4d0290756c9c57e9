"""What the commands that run on Spark share: a session, and a bar of its tasks while it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from blackbox.cli.failures import FAILED, ended
from blackbox.pipeline import missing_packages
from blackbox.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_S = 0.2


def need_spark() -> None:
    """End the command, saying what to install, where this installation lacks something."""
    if missing := missing_packages():
        raise ended(
            f"not installed: {', '.join(missing)}; this command runs on Spark: "
            "pip install '.[spark]' in a checkout of blackbox",
            FAILED,
        )


@contextmanager
def started(settings: Settings) -> Iterator[SparkSession]:
    """A Spark session, ended with the context."""
    from blackbox.pipeline.session import start_session

    session = start_session(settings.spark_master, settings.spark_settings())
    try:
        yield session
    finally:
        session.stop()


def progress_bar() -> Progress:
    """How much of something is done, on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))


@contextmanager
def spark(settings: Settings, doing: str) -> Iterator[SparkSession]:
    """A Spark session for one command; what it does is shown on stderr, `doing` beside it."""
    need_spark()
    with progress_bar() as progress:
        shown = progress.add_task(f"{doing}: starting Spark", total=None)
        with started(settings) as session:
            over = Event()
            progress.update(shown, description=doing)
            follower = Thread(target=_follow, args=(session, progress, shown, over), daemon=True)
            follower.start()
            try:
                yield session
            finally:
                over.set()
                follower.join()


def _follow(session: SparkSession, progress: Progress, shown: Any, over: Event) -> None:
    """Tasks done, of all that Spark has planned so far."""
    tracker = session.sparkContext.statusTracker()
    stages: dict[int, tuple[int, int]] = {}
    while not over.wait(LOOK_S):
        for stage in tracker.getActiveStageIds():
            if (found := tracker.getStageInfo(stage)) is not None:
                stages[stage] = found.numCompletedTasks, found.numTasks
        for stage, (_, count) in stages.items():
            if (found := tracker.getStageInfo(stage)) is None or not found.numActiveTasks:
                done = count if found is None else found.numCompletedTasks
                stages[stage] = done, count
        total = sum(count for _, count in stages.values())
        progress.update(
            shown, completed=sum(done for done, _ in stages.values()), total=total or None
        )
