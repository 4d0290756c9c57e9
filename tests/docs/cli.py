"""The command line: the commands of the typer app, and the exit codes of `error_exit.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from typer.main import get_group
from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from blackbox.cli import app, error_exit
from tests.docs.docstrings import docstrings_in
from tests.docs.markdown import code, limits, paragraphs, table

DOCS = Path(__file__).parents[2] / "docs"

_PAGE = re.compile(r"docs/(\w+)\.md")


def table_of_exit_codes() -> str:
    rows = (
        (str(getattr(error_exit, name)), text) for name, text in docstrings_in(error_exit).items()
    )
    return table(("code", "meaning"), [("0", "Success."), *rows])


def table_of_commands() -> str:
    rows = ((f"[`{one.name}`](#{one.name})", one.help[0]) for one in _commands())
    return table(("command", "purpose"), rows)


def commands() -> str:
    """A section for each command."""
    return "\n\n".join(map(_section, _commands()))


class _Command(NamedTuple):
    """A command: its function, the paragraphs of its help, and its options as they are typed."""

    name: str
    function: Callable[..., object]
    help: list[str]
    options: dict[str, str]


def _commands() -> Iterator[_Command]:
    group = get_group(app)
    for name, known in group.commands.items():
        function = next(c.callback for c in app.registered_commands if _name_of(c) == name)
        assert function is not None
        yield _Command(
            name,
            function,
            paragraphs(known.help or ""),
            {p.name or "": p.opts[0] for p in known.params},
        )


def _name_of(command: CommandInfo) -> str | None:
    return command.name or (command.callback and command.callback.__name__)


def _section(command: _Command) -> str:
    every = list(_parameters(command))
    arguments = [shown for shown, is_argument, _ in every if is_argument]
    usage = " ".join(["    blackbox", command.name, *arguments, "[OPTIONS]"])
    text = [_PAGE.sub(r"[docs/\1.md](\1.md)", one) for one in command.help]
    if (DOCS / f"{command.name}.md").exists() and not _PAGE.search(" ".join(command.help)):
        text[-1] += f" See [{command.name}]({command.name}.md)."
    options = table(("option", "default", "meaning"), (row for _, _, row in every))
    return "\n\n".join([f"### {command.name}", usage, *text, options])


def _parameters(command: _Command) -> Iterator[tuple[str, bool, list[str]]]:
    """Each parameter as it is typed, whether it is an argument, and its row."""
    hints = get_type_hints(command.function, include_extras=True)
    for name, parameter in inspect.signature(command.function).parameters.items():
        kind, info = get_args(hints[name])
        is_argument = isinstance(info, ArgumentInfo)
        shown = _argument(name, kind) if is_argument else _option(command.options[name], kind, info)
        help_text, _, said = (info.help or "").removesuffix(".").partition("; default: ")
        default = _said(said) if said else _default(parameter.default)
        yield shown, is_argument, [code(shown), default, f"{help_text}{_values(kind, info)}."]


def _argument(name: str, kind: Any) -> str:
    return f"{name.upper()}…" if get_origin(kind) is list else name.upper()


def _option(option: str, kind: Any, info: OptionInfo) -> str:
    return option if kind is bool else f"{option} {info.metavar or _placeholder(kind)}"


def _placeholder(kind: Any) -> str:
    one = _one(kind)
    if get_origin(one) is Literal:
        return "|".join(get_args(one))
    return "N" if one in (int, float) else "PATH" if one is Path else "TEXT"


def _one(kind: Any) -> Any:
    """The type of a value that is not None."""
    known = [one for one in get_args(kind) if one is not type(None)]
    return known[0] if type(None) in get_args(kind) else kind


def _values(kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    """The limits of a number."""
    allowed = limits(info.min, info.max) if _one(kind) in (int, float) else ""
    return f"; {allowed}" if allowed else ""


def _said(default: str) -> str:
    return code(default) if default.startswith("BLACKBOX_") else default


def _default(default: object) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or default is False:
        return ""
    return code(f"{default:g}" if isinstance(default, float) else default)
