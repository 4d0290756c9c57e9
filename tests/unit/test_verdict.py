from __future__ import annotations

import orjson
import pytest

from blackbox.demo.script import CALLERS, TARGETS, ExpectedOutcome, ScriptedRecord, write_script
from blackbox.demo.verdict import DemoVerdict, Seen, Tally, percentile
from blackbox.formats import Options, make_format
from blackbox.records.request import Cancel, Headers, Invalid, Record, Request, Shard, request_id

ASKED_MS = 1_767_225_600_000
LATE_MS = 7
SCRIPT = write_script(500, 10)
SHARD = Shard("TB", 3)


def requests() -> list[Seen]:
    return [
        Seen("TB", 3, offset, ASKED_MS, None, line.value, list(line.headers))
        for offset, line in enumerate(SCRIPT)
    ]


def message(offset: int, late_ms: int = LATE_MS) -> Seen:
    line = SCRIPT[offset]
    due_ms = ASKED_MS + line.countdown_ms
    headers: Headers = [*line.headers, *line.more_headers]
    own = {
        "blackbox-id": request_id(SHARD, offset),
        "blackbox-due-ms": str(due_ms),
        "blackbox-source": SHARD.source(offset),
    }
    headers += [(name, text.encode()) for name, text in own.items()]
    return Seen(line.topic, 0, offset, due_ms + late_ms, line.key, line.message, headers)


def letter(offset: int) -> Seen:
    line = SCRIPT[offset]
    about = {"blackbox-reason": line.reason or "", "blackbox-detail": "", "blackbox-source": ""}
    headers: Headers = [*line.headers, *((name, text.encode()) for name, text in about.items())]
    return Seen("blackbox.dead-letters", 0, offset, ASKED_MS, None, line.value, headers)


def outcomes() -> list[Seen]:
    return [
        message(offset) if line.expected is ExpectedOutcome.DELIVERED else letter(offset)
        for offset, line in enumerate(SCRIPT)
        if line.expected in (ExpectedOutcome.DELIVERED, ExpectedOutcome.DEAD)
    ]


def judge(seen: list[Seen]) -> DemoVerdict:
    tally = Tally(SCRIPT, "TB")
    for one in seen:
        tally.take(one)
    return tally.verdict()


def place_of(fate: ExpectedOutcome) -> int:
    return next(offset for offset, line in enumerate(SCRIPT) if line.expected is fate)


def without(fate: ExpectedOutcome) -> list[Seen]:
    """Everything except the outcome of the first line with this expected outcome."""
    return [
        one
        for one in [*requests(), *outcomes()]
        if one.topic == "TB" or one.offset != place_of(fate)
    ]


def test_a_flawless_run_is_good() -> None:
    verdict = judge([*requests(), *outcomes()])
    assert verdict.is_good
    assert (verdict.requests, verdict.cancelled, verdict.replaced) == (500, 1, 1)
    assert verdict.delivered == 500 - 1 - 1 - verdict.letters.total()
    assert set(verdict.late_ms) == {LATE_MS}
    assert verdict.first_ms == ASKED_MS + LATE_MS


def test_the_order_in_which_topics_are_read_does_not_matter() -> None:
    assert judge([*reversed(outcomes()), *requests()]) == judge([*requests(), *outcomes()])


def test_a_message_that_was_not_delivered_is_lost() -> None:
    verdict = judge(without(ExpectedOutcome.DELIVERED))
    assert list(verdict.faults) == ["lost"]
    assert verdict.faults["lost"] == [SCRIPT[place_of(ExpectedOutcome.DELIVERED)].message.decode()]


def test_a_message_that_was_delivered_twice_is_duplicated() -> None:
    again = message(place_of(ExpectedOutcome.DELIVERED))._replace(offset=9999)
    verdict = judge([*requests(), *outcomes(), again])
    assert list(verdict.faults) == ["duplicated"]
    assert len(verdict.faults["duplicated"]) == 1


def test_a_message_stamped_a_millisecond_before_it_is_due_is_early() -> None:
    verdict = judge(
        [
            *without(ExpectedOutcome.DELIVERED),
            message(place_of(ExpectedOutcome.DELIVERED), late_ms=-1),
        ]
    )
    assert list(verdict.faults) == ["early"]


def test_a_message_stamped_when_it_is_due_is_not_early() -> None:
    assert judge(
        [
            *without(ExpectedOutcome.DELIVERED),
            message(place_of(ExpectedOutcome.DELIVERED), late_ms=0),
        ]
    ).is_good


def test_due_times_are_not_taken_from_the_header_of_the_service() -> None:
    first = message(place_of(ExpectedOutcome.DELIVERED), late_ms=-5)
    claimed = ("blackbox-due-ms", str(first.timestamp_ms).encode())
    headers = [claimed if name == "blackbox-due-ms" else (name, v) for name, v in first.headers]
    verdict = judge([*without(ExpectedOutcome.DELIVERED), first._replace(headers=headers)])
    assert list(verdict.faults) == ["early", "damaged"]


@pytest.mark.parametrize("fate", [ExpectedOutcome.CANCELLED, ExpectedOutcome.REPLACED])
def test_a_delivered_cancelled_or_replaced_request_is_a_stray(fate: ExpectedOutcome) -> None:
    verdict = judge([*requests(), *outcomes(), message(place_of(fate))])
    assert list(verdict.faults) == ["strays"]


def test_a_message_on_another_topic_is_a_stray() -> None:
    first = message(place_of(ExpectedOutcome.DELIVERED))
    elsewhere = next(topic for topic in TARGETS if topic != first.topic)
    verdict = judge([*without(ExpectedOutcome.DELIVERED), first._replace(topic=elsewhere)])
    assert list(verdict.faults) == ["lost", "strays"]


FIRST = message(0)


@pytest.mark.parametrize(
    "damaged",
    [
        FIRST._replace(key=b"another"),
        FIRST._replace(headers=[]),
        FIRST._replace(headers=FIRST.headers[1:]),
        FIRST._replace(headers=[*FIRST.headers[:-3], ("more", b""), *FIRST.headers[-3:]]),
        FIRST._replace(headers=[*FIRST.headers[:-3], *message(3).headers[-3:]]),
    ],
)
def test_a_message_with_another_key_or_other_headers_is_damaged(damaged: Seen) -> None:
    assert place_of(ExpectedOutcome.DELIVERED) == 0
    assert list(judge([*without(ExpectedOutcome.DELIVERED), damaged]).faults) == ["damaged"]


def test_a_broken_request_without_a_dead_letter_is_misjudged() -> None:
    assert list(judge(without(ExpectedOutcome.DEAD)).faults) == ["misjudged"]


def test_a_dead_letter_for_another_reason_is_misjudged() -> None:
    first = letter(place_of(ExpectedOutcome.DEAD))
    headers = [(n, b"refused" if n == "blackbox-reason" else v) for n, v in first.headers]
    verdict = judge([*without(ExpectedOutcome.DEAD), first._replace(headers=headers)])
    assert "refused, expected" in verdict.faults["misjudged"][0]


def test_a_repeated_dead_letter_is_misjudged() -> None:
    again = letter(place_of(ExpectedOutcome.DEAD))
    assert list(judge([*requests(), *outcomes(), again]).faults) == ["misjudged"]


def test_a_dead_letter_of_a_good_request_is_a_stray() -> None:
    good = letter(place_of(ExpectedOutcome.DELIVERED))
    assert list(judge([*requests(), *outcomes(), good]).faults) == ["strays"]


def test_a_request_that_cannot_be_read_back_is_named() -> None:
    verdict = judge([*requests()[1:], *outcomes()])
    assert list(verdict.faults) == ["unread"]


def test_an_empty_run_is_not_good() -> None:
    verdict = judge([])
    assert len(verdict.faults["lost"]) == sum(
        line.expected is ExpectedOutcome.DELIVERED for line in SCRIPT
    )
    assert not verdict.is_good


def test_percentiles_are_values_that_occurred() -> None:
    ascending = list(range(1, 101))
    assert [percentile(ascending, share) for share in (0, 0.5, 0.99, 1)] == [1, 51, 100, 100]
    assert percentile([], 0.5) == 0


@pytest.mark.parametrize("count", [50, 999, 3000])
def test_a_script_has_the_given_number_of_different_requests(count: int) -> None:
    script = write_script(count, 2)
    assert sum(line.expected is not ExpectedOutcome.CANCEL for line in script) == count
    assert len({line.value for line in script}) == len(script)
    delivered = [line for line in script if line.expected is ExpectedOutcome.DELIVERED]
    assert len({line.message for line in delivered}) == len(delivered)
    assert {line.caller for line in delivered} == {caller.name for caller in CALLERS}
    assert max(line.countdown_ms for line in script) < 2000


@pytest.mark.parametrize(
    "line", SCRIPT[:40] + [one for one in SCRIPT if one.expected is not ExpectedOutcome.DELIVERED]
)
def test_blackbox_parses_every_line_as_the_script_expects(line: ScriptedRecord) -> None:
    format = make_format("countdown", Options(max_countdown_s=60, own_topics=lambda name: False))
    asked = format.parse(Record(0, ASKED_MS, None, line.value, list(line.headers)), ASKED_MS)
    if line.expected is ExpectedOutcome.CANCEL:
        assert asked == Cancel(line.caller_id or "")
    elif isinstance(asked, Invalid):
        assert (line.expected, line.reason) == (ExpectedOutcome.DEAD, asked.reason)
    elif line.expected is ExpectedOutcome.DEAD:
        assert isinstance(asked, Request)
        assert asked.target not in TARGETS
    else:
        assert isinstance(asked, Request)
        assert (asked.message, asked.key, asked.caller_id) == (
            line.message,
            line.key,
            line.caller_id,
        )
        assert asked.due_ms == ASKED_MS + line.countdown_ms
        assert asked.caller == line.caller


def test_a_cancel_follows_what_it_cancels_and_a_replacement_what_it_replaces() -> None:
    ended = [
        line
        for line in SCRIPT
        if line.expected in (ExpectedOutcome.CANCELLED, ExpectedOutcome.REPLACED)
    ]
    for line in ended:
        later = [
            other
            for other in SCRIPT[SCRIPT.index(line) + 1 :]
            if (other.caller, other.caller_id) == (line.caller, line.caller_id)
        ]
        assert [other.expected for other in later] == [
            ExpectedOutcome.CANCEL
            if line.expected is ExpectedOutcome.CANCELLED
            else ExpectedOutcome.DELIVERED
        ]


def test_the_same_arguments_give_the_same_script() -> None:
    assert write_script(200, 3) == write_script(200, 3)
    assert orjson.loads(SCRIPT[0].value)["countdown"] == 0
