from __future__ import annotations

from blackbox.records.entry import Entry
from blackbox.records.outgoing import MAX_DETAIL, Outgoing, dead_letters, deliveries
from blackbox.records.request import Record, Shard, request_id

SHARD = Shard("TB", 3)


def letters(original: Record, detail: str = "why") -> list[Outgoing]:
    return list(dead_letters(SHARD, "dead", original, "too-large", detail))


def test_a_message_is_sent_as_requested_with_headers_of_its_source() -> None:
    entry = Entry("orders", b"\xffbody", 90, b"k", [("CALLER_SERVICE", "shop"), ("h", None)])

    assert list(deliveries(SHARD, {1234: entry})) == [
        Outgoing(
            1234,
            "orders",
            b"k",
            b"\xffbody",
            [
                ("CALLER_SERVICE", "shop"),
                ("h", None),
                ("blackbox-id", request_id(SHARD, 1234)),
                ("blackbox-due-ms", "90"),
                ("blackbox-source", "TB/3@1234"),
            ],
        )
    ]


def test_a_tombstone_is_sent_as_a_tombstone() -> None:
    [tombstone] = deliveries(SHARD, {1: Entry("orders", None, 90, b"k")})

    assert tombstone.value is None


def test_messages_are_sent_in_the_given_order() -> None:
    entries = {offset: Entry("orders", b"", 90) for offset in (5, 2, 9)}

    assert [outgoing.offset for outgoing in deliveries(SHARD, entries)] == [5, 2, 9]


def test_a_dead_letter_is_the_record_with_the_reason() -> None:
    original = Record(17, 5, b"k", b"value", [("h", b"\xff")])

    whole = letters(original)[0]

    assert whole == Outgoing(
        17,
        "dead",
        b"k",
        b"value",
        [
            ("h", b"\xff"),
            ("blackbox-reason", "too-large"),
            ("blackbox-detail", "why"),
            ("blackbox-source", "TB/3@17"),
        ],
    )


def test_a_dead_letter_that_is_too_large_loses_its_value_then_the_rest() -> None:
    original = Record(17, 5, b"k", b"x" * 2000, [("h", b"v")])

    _, without_value, bare = letters(original)

    assert (without_value.key, without_value.value) == (b"k", None)
    assert without_value.headers[0] == ("h", b"v")
    assert (bare.key, bare.value) == (None, None)
    for form in (without_value, bare):
        told = dict(form.headers)
        assert told["blackbox-reason"] == "too-large"
        assert told["blackbox-source"] == "TB/3@17"
        assert "value of 2000 bytes" in str(told["blackbox-detail"])
    assert [name for name, _ in bare.headers] == [
        "blackbox-reason", "blackbox-detail", "blackbox-source",
    ]  # fmt: skip


def test_a_long_detail_is_cut() -> None:
    for form in letters(Record(17, 5, None, None, []), "d" * 10_000):
        assert len(str(dict(form.headers)["blackbox-detail"])) < 2 * MAX_DETAIL
