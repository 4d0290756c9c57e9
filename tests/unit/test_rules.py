"""Callers' rules: the contents of a file, and what they allow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from blackbox.records.refusal_causes import BROKEN_RULES, rule_of
from blackbox.records.request import Reason, Record, Request, Second, Shard
from blackbox.rules import file
from blackbox.rules.admission import CallerAdmission
from blackbox.rules.file import RulesFile
from blackbox.rules.rules import OTHERS, CallerRule, QuotaRequest, RulesError, parse
from tests.support.world import until

PAGE = (Path(__file__).parents[2] / "docs" / "callers.md").read_text()
EXAMPLE = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
SHARD = Shard("TB", 0)
NOW_MS = 1_800_000_000_500


def request(caller: str | None = "shop", **other: Any) -> Request:
    usual = Request("orders", b"m", NOW_MS + 1000, None, [], caller, None, None)
    return usual._replace(**other)


def asked(offset: int, caller: str = "shop", at_ms: int = NOW_MS) -> QuotaRequest:
    record = Record(offset, at_ms, None, b"{}", [])
    return QuotaRequest(offset, caller, record, request(caller), at_ms)


class Counted:
    """Counts as Redis keeps them, in memory."""

    def __init__(self) -> None:
        self.counts: dict[Second, int] = {}
        self.waiting = 0

    def count(self, more: Mapping[Second, int]) -> dict[Second, int]:
        before = {second: self.counts.get(second, 0) for second in more}
        for second, added in more.items():
            self.counts[second] = before[second] + added
        return before

    def pending(self, caller: str, shards: object) -> int:
        return self.waiting


@pytest.fixture
def counted() -> Counted:
    return Counted()


def admission(tmp_path: Path, counted: Counted, text: str) -> CallerAdmission:
    path = tmp_path / "callers.toml"
    path.write_text(text)
    return CallerAdmission(RulesFile(path), counted, lambda: [SHARD])


def test_the_example_of_the_page_can_be_used() -> None:
    rules = parse(EXAMPLE)

    assert rules.broken_by(request(target="mail.eu"), NOW_MS) is None
    assert rules.of("nobody") == (OTHERS, rules.others)
    assert rules.counted == ["shop"]


ALLOWED = [
    {"target": "mail.eu"},
    {"due_ms": NOW_MS + 86_400_000},
    {"message": b"x" * 65536},
    {"message": b"x" * 65530, "key": b"k", "headers": [("é", b"v"), ("h", None), ("i", b"")]},
    {"message": None},
]
REFUSED = [
    ({"target": "mail"}, "'shop' may not send to 'mail'; allowed: orders, mail.*"),
    (
        {"due_ms": NOW_MS + 86_400_001},
        "'shop' asks for a countdown of 86400.001 s; allowed: 86400",
    ),
    *(
        (parts, "'shop' sends a message of 65537 bytes with its key and headers; allowed: 65536")
        for parts in (
            {"message": b"x" * 65537},
            {"message": None, "key": b"k" * 65537},
            {
                "message": b"x" * 65530,
                "key": b"kk",
                "headers": [("é", b"v"), ("h", None), ("i", b"")],
            },
        )
    ),
    ({"caller": "old-shop"}, "'old-shop' is not admitted"),
    ({"caller": "x"}, "'x', which the rules do not name, is not admitted"),
    ({"caller": None}, "None, which the rules do not name, is not admitted"),
]


@pytest.mark.parametrize("other", ALLOWED)
def test_a_request_within_the_rules_is_admitted(other: dict[str, Any]) -> None:
    assert parse(EXAMPLE).broken_by(request(**other), NOW_MS) is None


@pytest.mark.parametrize(("other", "told"), REFUSED)
def test_a_refusal_names_the_value_and_the_rule(other: dict[str, Any], told: str) -> None:
    broken = parse(EXAMPLE).broken_by(request(**other), NOW_MS)
    assert broken is not None
    assert broken.refusal == (Reason.FORBIDDEN, f"CALLER_SERVICE {told}")
    assert broken.in_general.reason == Reason.FORBIDDEN


def test_redis_knows_each_rule_by_which_a_large_request_is_refused() -> None:
    assert BROKEN_RULES.keys() == CallerRule.model_fields.keys()
    assert [rule_of(refusal.detail) for refusal in BROKEN_RULES.values()] == [*BROKEN_RULES]


def test_an_empty_file_allows_everything() -> None:
    assert parse("").broken_by(request(None), NOW_MS) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[callers.shop", "not valid TOML"),
        ("[callers.shop]\nrate = 5", "callers.shop.rate: unknown rule"),
        ("[caller.shop]", "caller: unknown rule"),
        ("[callers.shop]\nmost_pending = 0", "callers.shop.most_pending = 0: "),
        ("[targets.'a b']\nmessages_per_second = 1", "targets.'a b': not a valid topic name"),
        ("[targets.a]", "targets.a.messages_per_second"),
    ],
)
def test_an_error_in_a_rules_file_is_reported_with_its_position(text: str, told: str) -> None:
    with pytest.raises(RulesError, match=re.escape(told)):
        parse(text)


def test_a_missing_rules_file_is_reported_with_its_variable(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match=r"BLACKBOX_CALLERS_FILE=.*nothing\.toml: No such file"):
        RulesFile(tmp_path / "nothing.toml")


def test_a_rules_file_with_the_same_size_and_time_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `chmod`, or a copy that keeps the time."""
    monkeypatch.setattr(file, "LOOK_S", 0.0)
    path = tmp_path / "callers.toml"
    path.write_text("[callers.shop]\nmost_pending = 5")
    rules, written = RulesFile(path), path.stat()
    assert rules.rules().callers["shop"].most_pending == 5

    def is_read_again() -> bool:  # a file written in the same tick of the clock looks unchanged
        path.write_text("[callers.shop]\nmost_pending = 7")
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
        return rules.rules().callers["shop"].most_pending == 7

    until("it is read again", is_read_again, 5)


def test_each_second_of_the_records_has_its_own_quota(tmp_path: Path, counted: Counted) -> None:
    judge = admission(tmp_path, counted, "[callers.shop]\nrequests_per_second = 2")
    batch = [asked(0), asked(1), asked(2), asked(3, at_ms=NOW_MS + 1000)]

    assert list(judge.over_quota(SHARD, 4, batch)) == [2]
    assert list(judge.over_quota(Shard("TB", 1), 1, [asked(0)])) == [0]


def test_a_request_stored_again_is_not_counted_again(tmp_path: Path, counted: Counted) -> None:
    judge = admission(tmp_path, counted, "[callers.shop]\nrequests_per_second = 2")
    batch = [asked(0), asked(1)]

    assert judge.over_quota(SHARD, 2, batch) == {}
    assert judge.over_quota(SHARD, 2, batch) == {}
    assert list(judge.over_quota(SHARD, 3, [asked(2)])) == [2]


def test_a_batch_that_is_stored_again_in_pieces_is_not_counted_again(
    tmp_path: Path, counted: Counted
) -> None:
    judge = admission(tmp_path, counted, "[callers.shop]\nrequests_per_second = 2")
    assert list(judge.over_quota(SHARD, 3, [asked(0), asked(1), asked(2)], "id", (3, 4))) == [2]

    assert judge.over_quota(SHARD, 1, [asked(0)], "id", (3, 3)) == {}
    assert list(judge.over_quota(SHARD, 3, [asked(1), asked(2)], "id", (4, 4))) == [2]
    assert list(judge.over_quota(SHARD, 4, [asked(3)], "id", (5, 5))) == [3]


def test_quotas_apply_to_requests_that_took_the_offsets_of_lost_ones(
    tmp_path: Path, counted: Counted
) -> None:
    judge = admission(tmp_path, counted, "[callers.shop]\nrequests_per_second = 2")
    lost = [asked(7), asked(8), asked(9)]
    assert list(judge.over_quota(SHARD, 10, lost, "id", (3, 3))) == [9]

    later_ms = NOW_MS + 1000
    new = [asked(7, at_ms=later_ms), asked(9, at_ms=later_ms)]
    assert judge.over_quota(SHARD, 10, new, "id", (4, 4)) == {}
    new = [asked(10, at_ms=later_ms)]
    assert list(judge.over_quota(SHARD, 11, new, "id", (4, 4))) == [10]


def test_callers_without_rules_of_their_own_are_counted_together(
    tmp_path: Path, counted: Counted
) -> None:
    judge = admission(tmp_path, counted, "[others]\nrequests_per_second = 1")

    assert list(judge.over_quota(SHARD, 2, [asked(0, OTHERS), asked(1, OTHERS)])) == [1]


def test_the_limit_of_pending_requests_includes_those_just_admitted(
    tmp_path: Path, counted: Counted
) -> None:
    judge = admission(tmp_path, counted, "[callers.shop]\nmost_pending = 5")
    counted.waiting = 3

    assert list(judge.over_quota(SHARD, 3, [asked(0), asked(1), asked(2)])) == [2]
    assert list(judge.over_quota(SHARD, 4, [asked(3)])) == [3]
