"""The docstrings of constants and fields in the code."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise
from types import ModuleType

_ITEM = re.compile(r"^(\w+) +-- (.*(?:\n .*)*)", re.MULTILINE)


def docstrings_in(code: ModuleType | type) -> dict[str, str]:
    """The docstrings below the constants of a module, or the fields of a class, by their name."""
    body = ast.parse(inspect.getsource(code)).body
    if isinstance(code, type):
        [definition] = body
        assert isinstance(definition, ast.ClassDef)
        body = definition.body
    found: dict[str, str] = {}
    for statement, below in pairwise(body):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
            name = (
                statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            )
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                found[ast.unparse(name)] = inspect.cleandoc(below.value.value)
    return found


def items_in(docstring: str) -> dict[str, str]:
    """The lines `name -- meaning` of a docstring; a meaning may continue in indented lines."""
    items = _ITEM.findall(inspect.cleandoc(docstring))
    return {name: " ".join(text.split()) for name, text in items}
