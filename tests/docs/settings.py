"""The settings: the fields of `Settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from blackbox.config.fields import Form
from blackbox.config.settings import Settings
from tests.docs.markdown import code, codes, limits, table

UNITS = {"s": "seconds", "ms": "milliseconds"}
SIZES_S = {"day": 86_400, "hour": 3600, "minute": 60, "second": 1}


def table_of_settings() -> str:
    """Every variable: its default, its values, its meaning."""
    rows = (
        (code(variable(name)), _default(name, field), _values(name, field), field.description or "")
        for name, field in Settings.model_fields.items()
    )
    return table(("variable", "default", "values", "meaning"), rows)


def variable(name: str) -> str:
    return f"BLACKBOX_{name.upper()}"


def _default(name: str, field: FieldInfo) -> str:
    default = field.default
    if field.is_required():
        return "none, required"
    if default is None:
        return "none"
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    text = code(str(default).lower() if isinstance(default, bool) else default)
    return f"{text} ({_duration(default)})" if name.endswith("_s") and default > 0 else text


def _duration(count_s: int) -> str:
    unit, size = next(one for one in SIZES_S.items() if count_s % one[1] == 0)
    count = count_s // size
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def _values(name: str, field: FieldInfo) -> str:
    forms = [one.text for one in field.metadata if isinstance(one, Form)]
    examples = f"; example: {codes(field.examples)}" if field.examples else ""
    return (forms[-1] if forms else _by_type(name, field)) + examples


def _by_type(name: str, field: FieldInfo) -> str:
    kind = _without_none(field.annotation)
    if get_origin(kind) is Literal:
        return codes(get_args(kind))
    if kind is bool:
        return "`true`, `false`"
    if kind is Path:
        return "path of a readable file"
    if kind is int:
        unit = UNITS.get(name.rpartition("_")[2], "integer")
        return f"{unit}, {limits(_limit(field, 'ge'), _limit(field, 'le'))}"
    if (least := _limit(field, "min_length")) is not None:
        return f"at least {least} characters"
    raise ValueError(f"{name}: give it a Form")


def _without_none(kind: Any) -> Any:
    known = [one for one in get_args(kind) if one is not type(None)]
    return known[0] if type(None) in get_args(kind) else kind


def _limit(field: FieldInfo, name: str) -> int | None:
    found = [getattr(one, name) for one in field.metadata if hasattr(one, name)]
    return found[0] if found else None
