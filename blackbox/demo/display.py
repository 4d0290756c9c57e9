"""The demo's output: a live panel on a terminal, one line per second elsewhere."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from blackbox.demo.verdict import WARM_MS, DemoVerdict, percentile
from blackbox.embedded import OPEN_KAFKA

WIDTH = 76
PLAIN_EVERY_S = 1.0
FAULTS_SHOWN = 3


class DemoProgress(NamedTuple):
    """The demo's progress. `pending` counts outcomes still to come, `wanted` all messages to be delivered."""

    elapsed_s: float
    requests: int
    wanted: int
    sent: int
    pending: int
    delivered: int
    dead: int
    p50_ms: int
    p99_ms: int
    per_second: float


class Display:
    """Writes to one console, in the order of the calls."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._shown_at_s = 0.0

    def title(self, text: str) -> None:
        self._console.print(Text.assemble(("blackbox demo", "bold"), f"  {text}"))
        self._console.print()

    @contextmanager
    def step(self, doing: str) -> Iterator[Callable[[str], None]]:
        """Show a step while it runs; yields a function that takes the text of its result."""
        began = time.monotonic()
        done = ""

        def say(text: str) -> None:
            nonlocal done
            done = text

        # Spinners and live panels move the cursor, which a file or a pipe records as escape codes.
        if self._console.is_terminal:
            with self._console.status(f"{doing} …", spinner="dots"):
                yield say
        else:
            self._console.print(f"{doing} …", highlight=False)
            yield say
        took = f"{time.monotonic() - began:5.1f} s  "
        self._console.print(Text.assemble(("✔ ", "green"), (took, "dim"), done or doing))

    def note(self, text: str) -> None:
        """Print a line about the current step."""
        self._console.print(Text(f"  {text}", style="dim"))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Draw what `show` gets as a live panel while the context is open, if this is a terminal."""
        self._console.print()
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def show(self, progress: DemoProgress, *, is_last: bool = False) -> None:
        if self._live is not None:
            self._live.update(_panel(progress), refresh=True)
        elif is_last or progress.elapsed_s - self._shown_at_s >= PLAIN_EVERY_S:
            self._shown_at_s = progress.elapsed_s
            self._console.print(_line(progress), highlight=False, soft_wrap=True)

    def verdict(self, verdict: DemoVerdict, first_delivery_s: float | None) -> None:
        lines: list[RenderableType] = [_sentence(verdict), Text()]
        lines += [_counts(verdict), _lateness(verdict), _letters(verdict)]
        if verdict.delivered and "damaged" not in verdict.faults:
            lines.append(Text(f"key, headers and id intact on all {verdict.delivered:,}"))
        if first_delivery_s is not None:
            lines.append(Text(f"first delivery {first_delivery_s:.1f} s after the command"))
        self._console.print()
        self._console.print(
            Panel(
                Group(*lines, *_faults(verdict)), title="verdict", title_align="left",
                border_style="green" if verdict.is_good else "red", box=ROUNDED, padding=(1, 2),
                width=min(WIDTH, self._console.width),
            )
        )  # fmt: skip

    def page(self, path: Path) -> None:
        opener = "open" if sys.platform == "darwin" else "xdg-open"
        self._console.print("\nThe audit report, with plots:\n")
        # Not wrapped: the line is to be copied into a shell.
        self._console.print(Text(f"  {opener} {shlex.quote(str(path))}"), soft_wrap=True)

    def addresses(self, bootstrap_servers: str, redis_url: str, http: str) -> None:
        """Print the addresses of the servers, and how to use them from another terminal."""
        exports = (
            f"export BLACKBOX_KAFKA_BOOTSTRAP_SERVERS={bootstrap_servers}",
            f"export BLACKBOX_REDIS_URL={redis_url}",
            'blackbox send --topic orders.unpaid --message "hello" --countdown 5',
            "blackbox status",
        )
        self._console.print(f"\nStill running: metrics at {http}/metrics. Try it:\n")
        for line in exports:
            self._console.print(f"  {line}", highlight=False, soft_wrap=True)
        self._console.print(f"\nUntil you stop it, {OPEN_KAFKA}.")
        self._console.print("\nPress Ctrl-C to stop.")


def _panel(progress: DemoProgress) -> Panel:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(width=12, style="dim")
    grid.add_column(ratio=1)
    grid.add_column(justify="right", width=9, no_wrap=True)
    rows = (
        ("sent", progress.sent, progress.requests, "cyan"),
        ("pending", progress.pending, progress.requests, "yellow"),
        ("delivered", progress.delivered, progress.wanted, "green"),
    )
    for name, count, total, style in rows:
        bar = ProgressBar(max(1, total), count, complete_style=style, finished_style=style)
        grid.add_row(name, bar, f"{count:,}")
    grid.add_row("dead letters", "", f"{progress.dead:,}")
    grid.add_row("lateness", _late(progress), "")
    grid.add_row("throughput", f"{progress.per_second:,.0f} /s", "")
    return Panel(
        grid, title=f"{progress.elapsed_s:.0f} s", title_align="right", border_style="dim",
        box=ROUNDED, padding=(0, 2), width=WIDTH,
    )  # fmt: skip


def _line(progress: DemoProgress) -> str:
    return (
        f"{progress.elapsed_s:5.1f} s  sent {progress.sent:,}  pending {progress.pending:,}  "
        f"delivered {progress.delivered:,}  dead letters {progress.dead:,}  "
        f"lateness {_late(progress)}  {progress.per_second:,.0f}/s"
    )


def _late(progress: DemoProgress) -> str:
    if not progress.delivered:
        return "-"
    return f"p50 {progress.p50_ms:,} ms  p99 {progress.p99_ms:,} ms"


def _sentence(verdict: DemoVerdict) -> Text:
    if verdict.is_good:
        good = "✔ Every message was delivered exactly once, and none early."
        return Text(good, style="bold green")
    return Text(f"✘ Not as expected: {', '.join(verdict.faults)}.", style="bold red")


def _counts(verdict: DemoVerdict) -> Text:
    text = Text(f"{verdict.requests:,} asked · {verdict.delivered:,} delivered")
    for name in ("lost", "duplicated", "early"):
        found = verdict.faults.get(name, [])
        text.append(f" · {len(found):,} {name}", style="red" if found else "")
    return text


def _lateness(verdict: DemoVerdict) -> Text:
    text = f"lateness  {_spread(verdict.late_ms)}"
    if verdict.warm_late_ms:
        without = f"(without the first {WARM_MS // 1000} s)"
        text += f"\nonce warm {_spread(verdict.warm_late_ms)}  {without}"
    return Text(text)


def _spread(late_ms: Sequence[int]) -> str:
    p50, p99, most = (percentile(late_ms, share) for share in (0.5, 0.99, 1.0))
    return f"p50 {p50:,} ms, p99 {p99:,} ms, max {most:,} ms"


def _letters(verdict: DemoVerdict) -> Text:
    by_reason = " · ".join(f"{count} {reason}" for reason, count in sorted(verdict.letters.items()))
    judged = "not as expected" if "misjudged" in verdict.faults else "as expected"
    return Text(
        f"{verdict.cancelled} cancelled · {verdict.replaced} replaced · "
        f"{verdict.letters.total()} dead letters, {judged}:\n{by_reason or 'none'}"
    )


def _faults(verdict: DemoVerdict) -> Iterator[Text]:
    for name, found in verdict.faults.items():
        yield Text(f"\n{name}: {len(found):,}", style="bold red")
        for one in found[:FAULTS_SHOWN]:
            yield Text(f"  {one}")
        if len(found) > FAULTS_SHOWN:
            yield Text(f"  and {len(found) - FAULTS_SHOWN:,} more")
