"""Bugs in `blackbox/cli`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "cells-as-they-are",
        "Tables of commands print the texts of servers as they are, with control characters for the terminal.",
        (
            Change(
                "cli/terminal.py",
                "        super().add_row(*map(_escaped, cells), **options)\n",
                "        super().add_row(*cells, **options)\n",
            ),
        ),
        (),
        ("tests/unit/test_terminal.py",),
    ),
    Bug(
        "lines-as-they-are",
        "Commands print lines with texts of servers as they are, with control characters for the terminal.",
        (
            Change(
                "cli/terminal.py",
                "    typer.echo(logs.printable(text), err=err)\n",
                "    typer.echo(text, err=err)\n",
            ),
        ),
        (),
        ("tests/unit/test_terminal.py",),
    ),
)
