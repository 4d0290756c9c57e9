"""`python -m bench`: throughput of blackbox beside the same work without it, a simple loop, and its peers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from bench.page import Report
from bench.peers.contestant import Contestant, Site
from bench.peers.phases import Limits
from bench.peers.processes import machine
from bench.peers.rounds import Peers, contestants
from bench.rates import Verbs
from bench.report import say
from blackbox.embedded import EmbeddedStack
from blackbox.support import interpreter

BUILD = Path("build")


class Rounds(NamedTuple):
    """How many rounds: of the verbs, of services and peers, and of these with a kill."""

    verbs: int
    peers: int
    kills: int


def main(
    requests: Annotated[int, typer.Option(help="Requests of a round of the verbs.")] = 200_000,
    rounds: Annotated[int, typer.Option(help="Alternating rounds.")] = 5,
    peer_rounds: Annotated[
        int, typer.Option(help="In how many of the rounds services and peers run; 0: never.")
    ] = 3,
    kill_rounds: Annotated[
        int, typer.Option(help="In how many of these rounds workers are killed.")
    ] = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="Services and peers whose names contain this.")
    ] = None,
    most: Annotated[int, typer.Option(help="The most jobs of a service or a peer.")] = 100_000,
    seconds: Annotated[
        float, typer.Option(help="A slow peer gets as many jobs as it does in this time.")
    ] = 10.0,
    late_s: Annotated[int, typer.Option(help="Seconds of each measurement of lateness.")] = 10,
    etf1: Annotated[
        Path | None, typer.Option(help="The program of etf1's kafka-message-scheduler.")
    ] = None,
    write: Annotated[
        Path, typer.Option(help="The folder of bench.md, bench.json and the plots.")
    ] = BUILD / "bench",
) -> None:
    """Medians of alternating rounds on the embedded servers, all on this machine."""
    # So that workers, which have sessions of their own, are ended with the bench.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # as a service does: the verbs run in this process
    interpreter.tune()
    with EmbeddedStack() as stack:
        folder = stack.folder / "bench"
        folder.mkdir()
        site = Site(stack, (BUILD / "peers").resolve(), folder)
        found = contestants(site, etf1.resolve() if etf1 else None)
        chosen = [one for one in found if peer_rounds and _is_chosen(one, only)]
        peers = Peers(site, chosen, Limits(most, seconds, late_s), say)
        report = _run(stack, requests, peers, Rounds(rounds, peer_rounds, kill_rounds), write)
    console = Console()
    for table in report.tables():
        console.print(table)
    console.print(f"report: {write / 'bench.md'}")


def _run(stack: EmbeddedStack, requests: int, peers: Peers, rounds: Rounds, folder: Path) -> Report:
    peers.install()
    say("writing the requests")
    verbs = Verbs(stack, requests)
    report = Report(machine(stack), requests, verbs.rates, peers.entries)
    for number in range(max(rounds.verbs, rounds.peers)):
        say(f"round {number + 1}")
        if number < rounds.verbs:
            verbs.run(say)
        if number < rounds.peers:
            peers.run(kills=number < rounds.kills, measured=lambda: report.save(folder))
        # After each round, so that an interrupted run leaves the rounds before it.
        report.write(folder)
    return report


def _is_chosen(one: Contestant, only: list[str] | None) -> bool:
    return not only or any(part.lower() in one.name.lower() for part in only)


if __name__ == "__main__":
    typer.run(main)
