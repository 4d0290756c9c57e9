from __future__ import annotations

import pytest

from blackbox.cli.audit import print_verdict
from blackbox.cli.error_exit import error_exit
from blackbox.cli.terminal import print_whole, table
from blackbox.jobs.audit.audit import AuditVerdict
from blackbox.jobs.audit.positions import PositionFinding


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


@pytest.mark.parametrize(("said", "is_red"), [("1", False), ("", True)])
def test_errors_are_red_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, said: str, is_red: bool
) -> None:
    printed = list[str]()
    monkeypatch.setenv("NO_COLOR", said)
    monkeypatch.setattr("typer.echo", lambda text, err: printed.append(text))

    error_exit("what went wrong", 1)

    assert ["\x1b[31m" in line for line in printed] == [is_red]
