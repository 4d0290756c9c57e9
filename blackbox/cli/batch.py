"""Shared by the commands that run on Spark: a Spark session, and a progress bar of its tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from blackbox.cli.error_exit import error_exit
from blackbox.config.settings import Settings
from blackbox.records.errors import RecoveryRequired
from blackbox.spark import missing_packages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_S = 0.5


def need_spark() -> None:
    """Exit with a line that says what to install, if packages are missing."""
    if missing := missing_packages():
        raise error_exit(
            f"not installed: {', '.join(missing)}; this command runs on Spark: "
            "pip install '.[spark]' in a checkout of blackbox"
        )


class Bar(Progress):
    """A progress bar on stderr: the current step, and how much of it is done."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        super().__init__(*columns, TimeElapsedColumn(), console=Console(stderr=True))
        self.step = self.add_task("", total=None)

    def show(self, doing: str, total: int | None = None) -> None:
        self.reset(self.step, description=doing, total=total, completed=0)

    @contextmanager
    def following(self, look: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Show what `look` returns, done and total, twice a second; show all as done at the end."""
        over = Event()

        def follow() -> None:
            while not over.wait(LOOK_S):
                # A progress bar is not worth a failed command; the next look may succeed.
                with suppress(RecoveryRequired):
                    done, total = look()
                    self.update(self.step, completed=done, total=total or None)

        follower = Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            over.set()
            follower.join()
        self.update(self.step, completed=self.tasks[0].total)


@contextmanager
def spark(settings: Settings, doing: str) -> Iterator[SparkSession]:
    """A Spark session for one command; `doing` and the progress are shown on stderr."""
    need_spark()
    # Not at the top: the other commands must start without pyspark, and without its import time.
    from blackbox.spark.spark_session import start_session

    with Bar() as bar:
        bar.show(f"{doing}: starting Spark")
        with start_session(settings.spark_master, settings.spark_settings()) as session:
            bar.show(doing)
            with bar.following(tasks_of(session)):
                yield session


def tasks_of(session: SparkSession) -> Callable[[], tuple[int, int]]:
    """A function that counts the tasks done, and all tasks that Spark has planned so far."""
    tracker = session.sparkContext.statusTracker()
    stages: dict[int, tuple[int, int]] = {}

    def count() -> tuple[int, int]:
        for stage in {*stages, *tracker.getActiveStageIds()}:
            if (found := tracker.getStageInfo(stage)) is not None:
                stages[stage] = found.numCompletedTasks, found.numTasks
            # Spark forgets old stages. Without this, the count of finished tasks would go down.
            elif stage in stages:
                stages[stage] = stages[stage][1], stages[stage][1]
        done, planned = zip((0, 0), *stages.values(), strict=True)
        return sum(done), sum(planned)

    return count
