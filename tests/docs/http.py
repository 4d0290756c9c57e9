"""The HTTP API: the operations and objects of its OpenAPI description, and the tokens of `access.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, cast

from blackbox.admin.admin import Admin
from blackbox.api.access import OPEN_PATHS, READING_METHODS
from blackbox.api.app import make_app
from blackbox.api.health import Health
from blackbox.config.settings import load
from blackbox.engine.metrics import Metrics
from tests.docs.markdown import code, codes, limits, paragraphs, table

Schema = dict[str, Any]


def table_of_requests() -> str:
    rows = (
        (f"[`{one}`]({one.anchor})", one.token, paragraphs(one.about)[0]) for one in _operations()
    )
    return table(("request", "token", "what it does"), rows)


def table_of_open_paths() -> str:
    """The paths that need no token."""
    return codes(OPEN_PATHS)


def table_of_statuses() -> str:
    """The statuses of failures, and the requests that return them."""
    every = list(_operations())
    statuses = sorted({status for one in every for status in one.failures()})
    rows = []
    for status in statuses:
        theirs = [one for one in every if status in one.failures()]
        meaning = theirs[0].answers[status]["description"]
        whose = "any" if len(theirs) == len(every) else ", ".join(f"`{one}`" for one in theirs)
        rows.append((status, meaning, whose))
    return table(("status", "meaning", "requests"), rows)


def operations() -> str:
    """A section for each operation."""
    return "\n\n".join(map(_section, _operations()))


def objects() -> str:
    """A section for each object of the answers."""
    schemas: Schema = _described()["components"]["schemas"]
    return "\n\n".join(
        f"### {name}\n\n{schema['description']}\n\n{_fields(schema)}"
        for name, schema in sorted(schemas.items())
    )


class _Operation(NamedTuple):
    method: str
    path: str
    about: str
    parameters: list[Schema]
    body: Schema
    answers: dict[str, Schema]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def anchor(self) -> str:
        """As GitHub makes it from the heading."""
        return "#" + str(self).lower().translate({ord(c): None for c in "/{}"}).replace(" ", "-")

    @property
    def token(self) -> str:
        if self.method not in READING_METHODS:
            return "change"
        return "none" if self.path in OPEN_PATHS else "read"

    def failures(self) -> list[str]:
        return [status for status in self.answers if status >= "300"]


@cache
def _described() -> Schema:
    """The description, made without any request to a service."""
    settings = load(kafka_bootstrap_servers="localhost:9092")
    return make_app(cast(Health, None), Metrics(), cast(Admin, None), settings).openapi()


def _operations() -> Iterator[_Operation]:
    for path, methods in _described()["paths"].items():
        for method, one in methods.items():
            yield _Operation(
                method.upper(),
                path,
                one["description"],
                one.get("parameters", []),
                one.get("requestBody", {}),
                one["responses"],
            )


def _section(one: _Operation) -> str:
    parts = [f"### {one}", *paragraphs(one.about)]
    if one.parameters:
        rows = (_parameter(parameter) for parameter in one.parameters)
        parts.append(table(("parameter", "in", "values", "meaning"), rows))
    for kind, held in one.body.get("content", {}).items():
        parts.append(f"Body, {code(kind)}: {one.body['description']}.")
        if "properties" in held["schema"]:
            parts.append(_fields(held["schema"]))
    good = [
        f"{status}: {_kind_of(answer)}" for status, answer in one.answers.items() if status < "300"
    ]
    parts.append(f"Answer, {', '.join(good)}.")
    return "\n\n".join(parts)


def _kind_of(answer: Schema) -> str:
    return _kind(answer["content"]["application/json"]["schema"])


def _parameter(one: Schema) -> list[str]:
    return [code(one["name"]), one["in"], _values(one["schema"]), one.get("description", "")]


def _fields(schema: Schema) -> str:
    needed = schema.get("required", ())
    rows = (
        (
            code(name),
            _values(field) + ("" if name in needed else ", optional"),
            field.get("description", ""),
        )
        for name, field in schema["properties"].items()
    )
    return table(("field", "values", "meaning"), rows)


def _values(schema: Schema) -> str:
    """The type, limits and default of a value."""
    every = {**schema, **{k: v for one in schema.get("anyOf", ()) for k, v in one.items()}}
    length = limits(every.get("minLength"), every.get("maxLength"))
    count = limits(every.get("minItems"), every.get("maxItems"))
    default = every.get("default")
    words = [
        _kind(schema),
        limits(every.get("minimum"), every.get("maximum")),
        f"{length} characters" if length else "",
        f"{count} of them" if count else "",
        code(every["pattern"]) if "pattern" in every else "",
        f"default {code(str(default).lower())}" if default not in (None, []) else "",
    ]
    return ", ".join(filter(None, words))


def _kind(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema and "type" not in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "items" in schema:
        return f"list of {_kind(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object: {_kind(schema['additionalProperties'])} by name"
    if "const" in schema:
        return code(f'"{schema["const"]}"')
    kind = schema.get("type", "any JSON")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
