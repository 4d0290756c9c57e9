from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import typer
from rich.text import Text

import blackbox.jobs.promote.promote
from blackbox.cli.audit import print_verdict
from blackbox.cli.error_exit import error_exit
from blackbox.cli.ledger import ledger
from blackbox.cli.promote import promote
from blackbox.cli.status import ShardStatus, status
from blackbox.cli.terminal import print_whole, table
from blackbox.config.settings import load
from blackbox.core.promotion import Promoted
from blackbox.jobs.audit.audit import AuditVerdict
from blackbox.jobs.audit.positions import PositionFinding
from blackbox.jobs.ledger.ledger import Ledger, LedgerVerdict
from blackbox.jobs.promote.tasks import Outcome
from blackbox.records.request import Shard


def test_a_table_that_is_not_on_a_terminal_has_one_complete_line_per_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = table(("due", "caller", "id"))
    row = ["2026-11-25T03:18:10.123Z", "a caller " * 30, "6ba7b810-9dad-11d1-80b4-00c04fd430c8"]
    listed.add_row(*row)

    print_whole(listed)

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if all(part.strip() in line for part in row)]


def test_an_audit_that_is_not_on_a_terminal_has_one_complete_line_per_exception(
    capsys: pytest.CaptureFixture[str],
) -> None:
    detail = "delivered to a topic, a partition and an offset " * 8
    found = PositionFinding("lost", "a-long-topic-name", 12, 1_234_567_890, "id", "billing", detail)
    verdict = AuditVerdict(
        seen_ms=0, took_s=1.0, topics=["TB"], shards=1, states={"delivered": 1}, callers={},
        targets={}, hours={}, cancels=0, cold=0, unknown=0, by_kind={"lost": 1}, exceptions=[found],
        lateness=None, due=None, asked=None, delivered=None,
    )  # fmt: skip

    print_verdict(verdict)

    lines = capsys.readouterr().out.splitlines()
    parts = ["lost", "a-long-topic-name/12@1234567890", "billing", detail.strip()]
    assert [line for line in lines if all(part in line for part in parts)]


HOSTILE = "allkeys-lru\x1b]0;owned\x9b2J[red]"
ESCAPED = r"allkeys-lru\x1b]0;owned\x9b2J[red]"


def test_no_table_sends_control_characters_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = table(("plain", "styled"))
    listed.add_row(HOSTILE, Text(HOSTILE, style="bold"))
    print_whole(listed)
    [row] = [line for line in capsys.readouterr().out.splitlines() if "owned" in line]
    assert row.split() == [ESCAPED, ESCAPED]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces functions that a command uses; it gets settings, and neither Spark nor Kafka."""
    given: dict[str, object] = {
        "load_silenced": lambda: load(kafka_bootstrap_servers="127.0.0.1:1"),
        "spark": lambda *_: nullcontext(),
        "kafka": lambda *_: None,
    }

    def replace(command: str, **more: object) -> None:
        for name, function in (given | more).items():
            monkeypatch.setattr(sys.modules[f"blackbox.cli.{command}"], name, function, False)

    return replace


def test_a_verification_sends_no_control_characters_to_the_terminal(
    replaced: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replaced("ledger")
    monkeypatch.setattr(Ledger, "verify", lambda *_: LedgerVerdict(1, 1, [f"{HOSTILE} is strange"]))
    with pytest.raises(typer.Exit):
        ledger(path="/ledger", verify=True)
    assert capsys.readouterr().out == f"{ESCAPED} is strange\n"


def test_a_promotion_sends_no_control_characters_to_the_terminal(
    replaced: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replaced("promote")
    outcomes = [Outcome(Promoted(Shard("TB", 0)), f"TB-0: {HOSTILE}")]
    monkeypatch.setattr(blackbox.jobs.promote.promote, "promote", lambda *_: outcomes)
    with pytest.raises(typer.Exit):
        promote()
    assert capsys.readouterr().err == f"TB-0: {ESCAPED}\n"


def test_the_status_sends_no_control_characters_to_the_terminal(
    replaced: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    one = ShardStatus("TB-0", 0, 0, 0, 0, None, 0, 0, 0, 0, 0)
    replaced("status", _statuses=lambda _: [one], _paused=lambda *_: {HOSTILE: 0})
    status()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"paused since 1970-01-01T00:00:00.000Z: {ESCAPED}"


@pytest.mark.parametrize(("said", "is_red"), [("1", False), ("", True)])
def test_errors_are_red_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, said: str, is_red: bool
) -> None:
    printed = list[str]()
    monkeypatch.setenv("NO_COLOR", said)
    monkeypatch.setattr("typer.echo", lambda text, err: printed.append(text))

    error_exit("what went wrong", 1)

    assert ["\x1b[31m" in line for line in printed] == [is_red]
