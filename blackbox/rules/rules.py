"""The rules in the file `BLACKBOX_CALLERS_FILE`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blackbox.records.entry import Entry
from blackbox.records.refusal_causes import BrokenRule
from blackbox.records.request import Record, Request, Second, Shard, is_topic_name

# All callers that the file does not name, counted together: more names do not get them more.
OTHERS = "(others)"


class CallerCounts(Protocol):
    """Counters that all shards share."""

    def count(self, more: Mapping[Second, int]) -> dict[Second, int]: ...
    def pending(self, caller: str, shards: Iterable[Shard]) -> int: ...


class RulesError(ValueError):
    """The file cannot be used; the text has one line for each thing that is wrong."""


class CallerRule(BaseModel):
    """The limits of a caller. A limit that is not given does not apply.

    `targets` are topic names, with the wildcards `*`, `?` and `[ab]`. `requests_per_second` counts in
    each second of the records' timestamps, `most_pending` the requests in Redis.
    """

    # a rule with a typing error in its name would limit nothing
    model_config = ConfigDict(extra="forbid", frozen=True)

    admitted: bool = True
    targets: Sequence[str] | None = None
    requests_per_second: int | None = Field(None, ge=1)
    most_pending: int | None = Field(None, ge=1)
    longest_countdown_s: float | None = Field(None, ge=0)
    largest_message_bytes: int | None = Field(None, ge=0)

    @property
    def has_quota(self) -> bool:
        return self.requests_per_second is not None or self.most_pending is not None


class QuotaRequest(NamedTuple):
    """A request that counts against its caller's quotas, by its place in a batch; written at `start_ms`."""

    place: int
    caller: str
    record: Record
    request: Request
    start_ms: int


class Target(BaseModel):
    """The rate limit of a target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages_per_second: int = Field(ge=1)


class Rules(BaseModel):
    """A whole file: callers by the name in CALLER_SERVICE, all other callers, targets by topic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    callers: Mapping[str, CallerRule] = {}
    others: CallerRule = CallerRule()
    targets: Mapping[str, Target] = {}

    @cached_property
    def counted(self) -> list[str]:
        named = {**self.callers, OTHERS: self.others}
        return [name for name, rule in named.items() if rule.most_pending is not None]

    def counted_of(
        self, requests: Mapping[int, Request | Entry]
    ) -> dict[str, list[tuple[int, int]]]:
        """(due time, offset) of these requests, by the names whose pending requests are counted."""
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in self.counted}
        for offset, one in requests.items():
            name, _ = self.of(one.caller)
            # dead letters do not count against the quota
            if name in found and not (isinstance(one, Entry) and one.reason):
                found[name].append((one.due_ms, offset))
        return found

    def of(self, caller: str | None) -> tuple[str, CallerRule]:
        """A caller's rules, and the name that it is counted under."""
        found = self.callers.get(caller or "")
        return (OTHERS, self.others) if found is None else (caller or "", found)

    def broken_by(self, request: Request, start_ms: int) -> BrokenRule | None:
        """The rule that this request, written at `start_ms`, breaks, whatever else was asked for."""
        name, limits = self.of(request.caller)
        broken = _broken(request, start_ms, limits)
        if broken is None:
            return None
        who = f"{request.caller!r}, which the rules do not name," if name == OTHERS else repr(name)
        rule, wrong = broken
        return BrokenRule(rule, f"CALLER_SERVICE {who} {wrong}")


def parse(text: str) -> Rules:
    """Read a file. Raises RulesError with what is wrong and where."""
    try:
        found = Rules.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise RulesError(f"not valid TOML: {error}") from None
    except ValidationError as error:
        raise RulesError("\n".join(_explained(dict(fault)) for fault in error.errors())) from None
    for topic in found.targets:
        if not is_topic_name(topic):
            raise RulesError(f"targets.{topic!r}: not a valid topic name")
    return found


def _broken(request: Request, start_ms: int, limits: CallerRule) -> tuple[str, str] | None:
    """The name of a rule that a request breaks, and what its caller did."""
    target = request.target
    asked_s = (request.due_ms - start_ms) / 1000
    targets, longest_s = limits.targets, limits.longest_countdown_s
    most_bytes = limits.largest_message_bytes
    if not limits.admitted:
        return "admitted", "is not admitted"
    if targets is not None and not any(fnmatchcase(target, one) for one in targets):
        allowed = ", ".join(targets) or "none"
        return "targets", f"may not send to {target!r}; allowed: {allowed}"
    if longest_s is not None and asked_s > longest_s:
        what = f"asks for a countdown of {asked_s} s; allowed: {longest_s:g}"
        return "longest_countdown_s", what
    if most_bytes is not None and (size := _message_bytes(request)) > most_bytes:
        what = f"sends a message of {size} bytes with its key and headers; allowed: {most_bytes}"
        return "largest_message_bytes", what
    return None


def _message_bytes(request: Request) -> int:
    """The size of the message with its key, and the names and values of its headers."""
    names = sum(len(name.encode()) for name, _ in request.headers)
    values = (request.message, request.key, *(value for _, value in request.headers))
    return names + sum(len(value) for value in values if value is not None)


def _explained(fault: Mapping[str, object]) -> str:
    location = fault["loc"]
    assert isinstance(location, tuple)
    where, given = ".".join(map(str, location)), fault.get("input")
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown rule"
    return f"{where} = {given!r}: {fault['msg']}"
