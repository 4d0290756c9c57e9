"""Replay or discard dead letters."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import closing
from dataclasses import dataclass

from blackbox.journal.access import KafkaAccess
from blackbox.journal.letterbox import Again, Letter, Letterbox
from blackbox.journal.shard_journal import ShardJournal
from blackbox.records.cancel import replaces
from blackbox.records.request import Headers, Reason, placed


@dataclass(frozen=True, slots=True)
class PutAway:
    """`done`: the places of the letters replayed or discarded; `left`: why others were not, by place."""

    done: list[str]
    left: dict[str, str]


def put_away(
    access: KafkaAccess,
    topic: str,
    places: Sequence[str],
    *,
    request_topics: Container[str],
    again: bool,
) -> PutAway:
    """Discard these letters, or write their requests `again`; each letter once, also in concurrent runs.

    A replay writes the request's original record to its original partition: a countdown starts
    again, and a past instant is due at once.
    """
    box = Letterbox(access, topic, request_topics)
    asked = frozenset(places)
    found = box.newest(
        lambda letter: letter if letter.place in asked else None,
        keep=lambda letter: letter if again and letter.place in asked else letter.about(),
    )
    known = {letter.place: letter for letter in found}
    left: dict[str, str] = {}
    wanted: dict[str, Again | None] = {}
    for place in dict.fromkeys(places):
        letter = known.get(place)
        if letter is None:
            left[place] = (
                f"no such letter of a configured request topic among the latest of {topic}"
            )
        elif letter.became is not None:
            left[place] = f"already {letter.became}"
        elif not again:
            wanted[place] = None
        else:
            try:
                wanted[place] = _again(access, letter)
            except ValueError as why:
                left[place] = str(why)
    done = box.put_away(wanted) if wanted else []
    left |= {
        place: "just replayed or discarded by another caller"
        for place in wanted
        if place not in done
    }
    return PutAway(done, left)


def _again(access: KafkaAccess, letter: Letter) -> Again:
    """The record to write again. Raises ValueError for a letter that cannot be replayed."""
    if letter.reason == Reason.TOO_LATE:
        raise ValueError(
            "the request it should replace was delivered or has ended, so replaying it could "
            "deliver twice; send a new request if you want that"
        )
    place = placed(letter.source)
    assert place is not None
    shard, offset = place
    is_shortened = "left out" in letter.detail or letter.detail.startswith("shortened")
    if letter.value is not None or not is_shortened:
        return Again(shard, letter.key, letter.value, _without_condition(letter.headers))
    with closing(ShardJournal(shard, access)) as journal:
        record = journal.records([offset]).get(offset)
    if record is None:
        raise ValueError(f"its value was left out, and {letter.source} is no longer in Kafka")
    return Again(shard, record.key, record.value, _without_condition(record.headers))


def _without_condition(headers: Headers) -> Headers:
    """The headers without the condition of a replacement: the request it was to replace has ended."""
    return headers[:-1] if replaces(headers) else headers
