"""Why a large request was refused, as far as Redis keeps it: one bit for each request and cause.

So a cause has a constant text. What else the dead letter says is made from the record in Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from blackbox.records.request import Invalid, Reason

INVALID, TOO_LATE = "invalid", "too-late"

BROKEN_RULES: Mapping[str, Invalid] = {
    "admitted": Invalid(Reason.FORBIDDEN, "its CALLER_SERVICE is not admitted"),
    "targets": Invalid(Reason.FORBIDDEN, "its CALLER_SERVICE may not send to this target"),
    "longest_countdown_s": Invalid(
        Reason.FORBIDDEN, "its countdown exceeds the longest_countdown_s of its CALLER_SERVICE"
    ),
    "largest_message_bytes": Invalid(
        Reason.FORBIDDEN,
        "its message, with key and headers, exceeds the largest_message_bytes of its CALLER_SERVICE",
    ),
    "requests_per_second": Invalid(
        Reason.QUOTA,
        "its CALLER_SERVICE had already sent requests_per_second requests in that second; send it again",
    ),
    "most_pending": Invalid(
        Reason.QUOTA, "its CALLER_SERVICE had most_pending requests pending; send it again"
    ),
}
"""The refusal of a request by a rule of its caller, in general words, by the name of the rule."""

CAUSES = (INVALID, TOO_LATE, *BROKEN_RULES)

_RULES = {refusal.detail: rule for rule, refusal in BROKEN_RULES.items()}


class BrokenRule(NamedTuple):
    """A rule, by its name in the file, that a request breaks."""

    rule: str
    detail: str

    @property
    def in_general(self) -> Invalid:
        return BROKEN_RULES[self.rule]

    @property
    def refusal(self) -> Invalid:
        return Invalid(self.in_general.reason, self.detail)


def rule_of(detail: str | None) -> str | None:
    """The rule whose general refusal has this detail."""
    return _RULES.get(detail or "")
