"""The error of a configuration that cannot be used, with one line for each variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from blackbox.config.aliases import Alias


class SettingsError(Exception):
    """The configuration cannot be used; the text names each variable, its value and what is wanted."""


def explained(
    error: ValidationError, fields: Mapping[str, FieldInfo], found: Mapping[str, Alias]
) -> SettingsError:
    """The errors of pydantic, in terms of variables. `found` are the settings whose variable is an alias."""
    lines = []
    for fault in error.errors():
        name = str(fault["loc"][0])
        variable = found[name].variable if name in found else f"BLACKBOX_{name.upper()}"
        lines.append(_explain(dict(fault), variable, fields[name]))
    return SettingsError("\n".join(lines))


def _explain(fault: dict[str, Any], variable: str, field: FieldInfo) -> str:
    if fault["type"] == "missing":
        return f"{variable} is not set; wanted: {field.description}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    is_secret = SecretStr in (field.annotation, *get_args(field.annotation))
    value = "(hidden)" if is_secret else repr(os.environ.get(variable, fault.get("input")))
    return f"{variable}={value}: {message}"
