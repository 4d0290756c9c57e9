"""The docstrings of constants and fields in the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from itertools import pairwise
from textwrap import dedent
from types import ModuleType

_ITEM = re.compile(r"^(\w+) +-- (.*(?:\n .*)*)", re.MULTILINE)


def docstrings_in(code: ModuleType | Callable[..., object]) -> dict[str, str]:
    """The docstrings below assignments in a module or a function, by the assigned name."""
    tree = ast.parse(dedent(inspect.getsource(code)))
    body = tree.body if isinstance(code, ModuleType) else _body(tree)
    found: dict[str, str] = {}
    for statement, below in pairwise(body):
        if isinstance(statement, ast.Assign) and isinstance(below, ast.Expr):
            name, text = statement.targets[0], below.value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                named = name.attr if isinstance(name, ast.Attribute) else ast.unparse(name)
                found[named] = inspect.cleandoc(text.value)
    return found


def _body(tree: ast.Module) -> list[ast.stmt]:
    [function] = tree.body
    assert isinstance(function, ast.FunctionDef)
    return function.body


def items_in(docstring: str) -> dict[str, str]:
    """The lines `name -- meaning` of a docstring; a meaning may continue in indented lines."""
    items = _ITEM.findall(inspect.cleandoc(docstring))
    return {name: " ".join(text.split()) for name, text in items}
