"""Both engines side by side, as services: intake, drain, lateness, processor time, memory, idling."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import typer
from rich.console import Console
from rich.table import Table

from bench.field import Field, cpu_s, lateness_ms, memory_mb, wait
from bench.ground import MESSAGE_BYTES
from blackbox.embedded import EmbeddedStack

ENGINES = ("spark", "process")
WARM_UP = 20_000
LATENESS_S = 20
IDLE_S = 30
FAR_S = 86_400


@dataclass(slots=True)
class Figures:
    """The measurements of one engine. Rates are per second, times in the unit of the name."""

    start_s: float = 0.0
    intake: float = 0.0
    drain: float = 0.0
    late_ms: dict[int, tuple[int, int]] = field(default_factory=dict)
    cpu_us: dict[str, float] = field(default_factory=dict)
    idle_share: float = 0.0
    memory_mb: dict[str, float] = field(default_factory=dict)


def measure(
    field: Field, figures: Figures, requests: int, drained: int, say: Callable[[str], None]
) -> None:
    began = time.monotonic()
    with field.service() as service:
        figures.start_s = time.monotonic() - began
        say("warming up")
        field.write(WARM_UP, countdown=3)
        wait("warm", lambda: field.stored(1))
        wait("delivered", lambda: field.pending() == 0)
        figures.memory_mb["idle"] = memory_mb(service)

        say("idle")
        before = cpu_s(service)
        time.sleep(IDLE_S)
        figures.idle_share = (cpu_s(service) - before) / IDLE_S

        say("intake")
        # A smaller load first as a warm-up: only the second figure is kept.
        for count in (requests // 4, requests):
            before = cpu_s(service)
            field.write(count, countdown=FAR_S)
            began = time.monotonic()
            wait("stored", lambda count=count: field.stored(count))  # type: ignore[misc]
            figures.intake = count / (time.monotonic() - began)
            figures.cpu_us["intake"] = (cpu_s(service) - before) / count * 1e6
            field.forget()

        say("drain")
        figures.memory_mb["busy"] = memory_mb(service)
        for count in (drained // 4, drained):
            start = field.ends()
            # The time to store them first: at 40,000 per second, plus 4 s.
            due_ms = int(time.time() * 1000) + int(count / 40) + 4000
            field.write(count, at=due_ms)
            wait("stored", lambda count=count: field.stored(count))  # type: ignore[misc]
            if time.time() * 1000 > due_ms:
                raise SystemExit("the requests were not stored before they were due")
            before = cpu_s(service)
            wait("drained", lambda: field.pending() == 0)
            found = field.read_back(start)
            took_s = (max(at for _, at in found) - due_ms) / 1000
            figures.drain = len(found) / took_s
            figures.cpu_us["drain"] = (cpu_s(service) - before) / count * 1e6

        for per_second in (1_000, 10_000):
            say(f"lateness at {per_second:,} per second")
            before, count = cpu_s(service), per_second * LATENESS_S
            late = lateness_ms(field, per_second, LATENESS_S)
            figures.late_ms[per_second] = late[len(late) // 2], late[int(len(late) * 0.99)]
            figures.cpu_us[f"{per_second:,} /s"] = (cpu_s(service) - before) / count * 1e6


def main(
    partitions: list[int] = typer.Option([4, 8]),  # noqa: B008
    requests: int = 1_000_000,
    drained: int = 400_000,
    engines: list[str] = typer.Option(list(ENGINES)),  # noqa: B008
) -> None:
    """Measure the engines one after the other: a real broker and Redis, requests of 200 bytes, services as processes."""
    console = Console()
    found: dict[tuple[str, int], Figures] = {}
    with EmbeddedStack() as stack:
        for count in partitions:
            for engine in engines:
                figures = found[engine, count] = Figures()
                field = Field(stack, engine, count, stack.folder)
                label = f"{engine}, {count} partitions"
                with console.status(label) as status:
                    measure(
                        field, figures, requests, drained,
                        lambda doing, s=status, n=label: s.update(f"{n}: {doing}"),  # type: ignore[misc]
                    )  # fmt: skip
                console.print(label, figures)
    console.print(_table(found))


def _table(found: dict[tuple[str, int], Figures]) -> Table:
    table = Table(title=f"messages of {MESSAGE_BYTES} bytes, exactly once")
    table.add_column("")
    for engine, count in found:
        table.add_column(f"{engine}, {count}", justify="right")
    rows: dict[str, Callable[[Figures], str]] = {
        "start to ready, s": lambda f: f"{f.start_s:.1f}",
        "intake /s": lambda f: f"{f.intake:,.0f}",
        "drain /s": lambda f: f"{f.drain:,.0f}",
        "lateness at 1,000 /s, p50 / p99 ms": lambda f: "{} / {}".format(*f.late_ms[1_000]),
        "lateness at 10,000 /s, p50 / p99 ms": lambda f: "{} / {}".format(*f.late_ms[10_000]),
        "processor µs a message: intake": lambda f: f"{f.cpu_us['intake']:.1f}",
        "drain": lambda f: f"{f.cpu_us['drain']:.1f}",
        "both at 1,000 /s": lambda f: f"{f.cpu_us['1,000 /s']:.0f}",
        "both at 10,000 /s": lambda f: f"{f.cpu_us['10,000 /s']:.0f}",
        "idle, % of a core": lambda f: f"{100 * f.idle_share:.1f}",
        "memory idle / busy, MB": lambda f: (
            f"{f.memory_mb['idle']:.0f} / {f.memory_mb['busy']:.0f}"
        ),
    }
    for name, show in rows.items():
        table.add_row(name, *(show(figures) for figures in found.values()))
    return table


if __name__ == "__main__":
    typer.run(main)
