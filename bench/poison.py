"""The cost of undeliverable messages for the others: the drain of good messages with and without them."""

from __future__ import annotations

import statistics
import time

import typer
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

from bench.field import Field, wait
from bench.ground import MESSAGE_BYTES
from blackbox.embedded import EmbeddedStack

PARTITIONS = 4
AT_THE_HEAD = 1000
ONE_OF = 100
NOWHERE = "nowhere"
STRICT = {
    "keyless": {"cleanup.policy": "compact"},
    "too-large": {"max.message.bytes": str(MESSAGE_BYTES // 2)},
}
"""Topics that refuse all of these messages, and their configurations."""

KINDS = (NOWHERE, *STRICT)
SETTLED_S = 5.0


class PoisonedField(Field):
    """Requests of which the first thousand, and one in each hundred, cannot be delivered."""

    poison: str | None = None

    def _request(self, number: int, **when: float) -> bytes:
        good = super()._request(number, **when)
        if self.poison is None or (number >= AT_THE_HEAD and number % ONE_OF):
            return good
        return good.replace(self.target.encode(), f"{self.name}.{self.poison}".encode())


def main(
    requests: int = 100_000,
    rounds: int = 3,
    kinds: list[str] = typer.Option(list(KINDS)),  # noqa: B008
    engine: str = "process",
) -> None:
    """Measure the delivery rate of good messages from a backlog with one due time, in alternating rounds."""
    console = Console()
    rates: dict[str, list[float]] = {name: [] for name in ("clean", *kinds)}
    with EmbeddedStack() as stack:
        for number in range(rounds):
            for name, found in rates.items():
                with console.status(f"round {number + 1} of {rounds}: {name}"):
                    field = PoisonedField(stack, engine, PARTITIONS, stack.folder)
                    poison = None if name == "clean" else name
                    found.append(_good_per_s(field, stack, requests, poison))
                console.print(f"{name}: {found[-1]:,.0f} /s")
    table = Table(title=f"{requests:,} requests of {MESSAGE_BYTES} bytes due at once, {engine}")
    for column in ("1,000 at the head and 1 % of the rest", "good /s", "of clean"):
        table.add_column(column, justify="left" if column.startswith("1") else "right")
    for name, found in rates.items():
        # Share of the clean drain of the same round: two clean drains differ by up to 8 %.
        shares = [one / clean for one, clean in zip(found, rates["clean"], strict=True)]
        table.add_row(name, f"{statistics.median(found):,.0f}", f"{statistics.median(shares):.2f}")
    console.print(table)


def _good_per_s(
    field: PoisonedField, stack: EmbeddedStack, requests: int, poison: str | None
) -> float:
    strict = [NewTopic(f"{field.name}.{name}", 1, config=how) for name, how in STRICT.items()]
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    for future in admin.create_topics(strict).values():
        future.result()
    with field.service():
        start = field.ends()
        # In both kinds of rounds, the first batches open connections and look up topics.
        field.write(1000, countdown=0)
        wait("warm", lambda: sum(field.ends().values()) > sum(start.values()) + 999)
        field.poison = poison
        start = field.ends()
        # All are due at one instant after they are stored, so that only the drain is measured.
        due_ms = int((time.time() + requests / 20_000 + SETTLED_S) * 1000)
        field.write(requests, at=due_ms)
        wait("stored", lambda: field.stored(requests))
        if time.time() * 1000 > due_ms:
            raise SystemExit("the requests were not stored before they were due")
        bad = 0
        if field.poison is not None:
            bad = AT_THE_HEAD + (requests - AT_THE_HEAD) // ONE_OF
        good = requests - bad
        wait("drained", lambda: sum(field.ends().values()) - sum(start.values()) >= good)
        # Offsets of the target also count transaction markers, so the messages are counted.
        came: list[tuple[int, int]] = []
        while len(came) < good:
            came = field.read_back(start)
        return good / ((max(at for _, at in came) - due_ms) / 1000)


if __name__ == "__main__":
    typer.run(main)
