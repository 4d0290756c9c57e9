"""The records in Kafka: an example of each kind, made by the code that writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from blackbox.client.rescheduling import replacement_of
from blackbox.core.follow_ups import FollowUps, UncommittedRequests
from blackbox.formats import Format, Options, make_format
from blackbox.journal import dead_letter_topic, oscillator_topic
from blackbox.journal.topics import receipts_topic
from blackbox.records import cancel
from blackbox.records.carried import carry_on
from blackbox.records.entry import Entry, decode, encode
from blackbox.records.outgoing import Outgoing, dead_letters, deliveries, rewritten_request
from blackbox.records.receipt import VERSION, Receipt
from blackbox.records.receipt import encode as encode_receipt
from blackbox.records.request import Invalid, Record, Request, Shard, request_id
from tests.docs.docstrings import items_in
from tests.docs.example import DUE_MS, OFFSET, RECORD, REQUEST, SHARD, WRITTEN_MS
from tests.docs.markdown import code, table

LETTERS = "blackbox.dead-letters"
LETTER_AT = f"{LETTERS}/0@17"
CRON = b'{"topic": "reports", "message": "daily", "id": "daily", "cron": "0 8 * * MON-FRI", "timezone": "Europe/Berlin"}'

Headers = Sequence[tuple[str, bytes | str | None]]


def table_of_receipt() -> str:
    parts = {"v": f"the version of this format: {VERSION}"} | items_in(Receipt.__doc__ or "")
    return table(("part", "content"), ((code(name), text) for name, text in parts.items()))


def message() -> str:
    [found] = deliveries(SHARD, {OFFSET: _entry(REQUEST)})
    return _shown_outgoing(found)


def letter() -> str:
    invalid = RECORD._replace(offset=OFFSET + 1, value=b'{"topic": "my reminders", "message": 7}')
    why = _format().parse(invalid, WRITTEN_MS)
    assert isinstance(why, Invalid)
    whole, *_ = dead_letters(SHARD, LETTERS, invalid, why.reason, why.detail)
    return _shown_outgoing(whole)


def letter_mark() -> str:
    return _shown(LETTERS, None, [(dead_letter_topic.HEADER, f"replayed {LETTER_AT}")], None)


def receipt() -> str:
    one = Receipt(
        at_ms=DUE_MS + 4,
        delivered={"reminders/0": [(OFFSET, 88)]},
        invalid=[OFFSET + 1],
        letters={f"{LETTERS}/0": [(OFFSET + 1, 17)]},
        topics={"reminders": "ismYM8zD", LETTERS: "q3ZkV0a2"},
        read=OFFSET + 2,
    )
    return _shown(receipts_topic(SHARD.topic), str(SHARD), [], encode_receipt(one))


def follow_up() -> str:
    asked = _format().parse(RECORD._replace(value=CRON), WRITTEN_MS)
    [found] = _follow_ups(SHARD, _format()).requests({OFFSET: _entry(asked)}, WRITTEN_MS)
    return _shown_outgoing(found)


def carried() -> str:
    return _shown(SHARD.topic, RECORD.key, carry_on(RECORD, is_cold=False), RECORD.value)


def cancel_by_id() -> str:
    return _shown(SHARD.topic, None, [(cancel.HEADER, request_id(SHARD, OFFSET))], None)


def replacement() -> str:
    found = replacement_of(SHARD, RECORD, _format(), countdown_s=60)
    return _shown(SHARD.topic, found.key, found.headers, found.value)


def written_again() -> str:
    return _shown_outgoing(rewritten_request(SHARD, OFFSET, _entry(REQUEST), SHARD.partition))


def tombstone() -> str:
    [found] = _schedules().requests(_schedule(), DUE_MS)
    return _shown_outgoing(found)


def history() -> str:
    [found] = _schedules().copies(_schedule())
    return _shown_outgoing(found)


def second() -> str:
    return _shown("oscillator", str(DUE_MS // 1000), [], oscillator_topic.VALUE)


EXAMPLES: Mapping[str, Callable[[], str]] = {
    "record-message": message,
    "record-letter": letter,
    "record-letter-mark": letter_mark,
    "record-receipt": receipt,
    "record-follow-up": follow_up,
    "record-carried": carried,
    "record-cancel": cancel_by_id,
    "record-replacement": replacement,
    "record-again": written_again,
    "record-tombstone": tombstone,
    "record-history": history,
    "record-second": second,
}


def _format(name: str = "countdown", topic: str = SHARD.topic) -> Format:
    return make_format(name, Options(34_560_000, lambda name: False, topic))


def _entry(asked: object) -> Entry:
    """A request as it comes out of Redis."""
    assert isinstance(asked, Request)
    return decode(encode(asked))


def _follow_ups(shard: Shard, format: Format, history_topic: str | None = None) -> FollowUps:
    return FollowUps(shard, format, cast(UncommittedRequests, None), history_topic)


def _schedules() -> FollowUps:
    return _follow_ups(Shard("schedules", 0), _format("scheduler", "schedules"), "history")


def _schedule() -> dict[int, Entry]:
    terms: list[tuple[str, bytes | None]] = [
        ("scheduler-epoch", str(DUE_MS // 1000).encode()),
        ("scheduler-target-topic", b"reminders"),
    ]
    record = Record(41, WRITTEN_MS, b"invoice-7", b"Pay the invoice", terms)
    return {41: _entry(_format("scheduler", "schedules").parse(record, WRITTEN_MS))}


def _shown_outgoing(one: Outgoing) -> str:
    return _shown(one.topic, one.key, one.headers, one.value)


def _shown(topic: str, key: bytes | str | None, headers: Headers, value: bytes | None) -> str:
    """A record as in the README."""
    named = [f"{name}: {_text(held)}" for name, held in headers] or ["none"]
    lines = [f"topic    {topic}", f"key      {_text(key)}", f"headers  {named[0]}"]
    lines += [f"         {one}" for one in named[1:]]
    return "\n".join(f"    {line}" for line in [*lines, f"value    {_text(value)}"])


def _text(held: bytes | str | None) -> str:
    return "none" if held is None else held if isinstance(held, str) else held.decode()
