"""The types of the settings: each with its check, and the text that says what is wanted."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, SecretStr, ValidationInfo

from blackbox.formats import FORMATS
from blackbox.index import connection
from blackbox.journal.topics import RECEIPTS_SUFFIX, is_own_topic
from blackbox.records.request import is_topic_name

_PLACE = r"[^\s:/,]+:\d+"
_MASTER = re.compile(
    rf"local(\[(\*|[1-9]\d*)(,[1-9]\d*)?\])?|spark://{_PLACE}(,{_PLACE})*|k8s://\S+", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a value, for `docs/configuration.md`, if the type and its limits do not say it."""

    text: str


def parse_request_topics(text: str) -> dict[str, str]:
    """`TB:countdown,other:countdown` -> format by topic. Raises ValueError for any other text."""
    topics: dict[str, str] = {}
    for part in text.split(","):
        topic, _, format_name = part.strip().partition(":")
        if not topic or not format_name:
            raise ValueError("wanted: a comma list of topic:format, like TB:countdown")
        if topic in topics:
            raise ValueError(f"the topic {topic!r} is given twice")
        topics[topic] = format_name
    return topics


def expired_topic(request_topic: str) -> str:
    """The topic where timers are answered, unless the operator names one."""
    return f"{request_topic}.expired"


def _topic(name: str) -> str:
    if not is_topic_name(name):
        raise ValueError("wanted: a topic name of 1 to 249 letters, digits, '.', '_' or '-'")
    return name


def _request_topics(text: str) -> str:
    for topic, format_name in parse_request_topics(text).items():
        _topic(topic)
        if format_name not in FORMATS:
            raise ValueError(f"unknown format {format_name!r}; wanted: {', '.join(FORMATS)}")
        if topic.endswith(RECEIPTS_SUFFIX):
            raise ValueError(
                f"{topic!r} ends with {RECEIPTS_SUFFIX!r}, which is reserved for receipts"
            )
    return text


def _topics_so_far(info: ValidationInfo) -> dict[str, str]:
    # pydantic validates in the order of declaration, and leaves out a field that it has refused.
    # The default avoids a second error for the same mistake.
    return parse_request_topics(info.data.get("request_topics", "TB:countdown"))


def _expired_topics(info: ValidationInfo) -> set[str]:
    topics = _topics_so_far(info).items()
    return {expired_topic(topic) for topic, name in topics if FORMATS[name].has_output_topic}


def _not_our_own(name: str, info: ValidationInfo, others: Collection[str | None] = ()) -> str:
    own = _topics_so_far(info), info.data.get("dead_letter_topic", "")
    if name in others or is_own_topic(name, *own):
        raise ValueError(f"{name!r} is one of blackbox's own topics; use another one")
    return name


def _dead_letter_topic(name: str, info: ValidationInfo) -> str:
    # A letter in a request topic would be read as a request, and would become another letter, without end.
    if is_own_topic(name, _topics_so_far(info), ""):
        raise ValueError(f"{name!r} is a request topic, or one of receipts; use another one")
    return name


def _timer_output(name: str | None, info: ValidationInfo) -> str | None:
    # The default depends on the request topics, so it is checked as well.
    for output in _expired_topics(info) if name is None else {_topic(name)}:
        _not_our_own(output, info)
    return name


def _oscillator(name: str | None, info: ValidationInfo) -> str | None:
    if not name:
        return None
    # The oscillator's state is its topic, so no other messages may go there.
    others = {info.data.get("history_topic"), info.data.get("timer_output_topic")}
    return _not_our_own(_topic(name), info, others | _expired_topics(info))


def _delivery(promise: str, info: ValidationInfo) -> str:
    schedules = [name for name in _topics_so_far(info).values() if FORMATS[name].is_schedule]
    if promise != "exactly-once" and schedules:
        raise ValueError(
            f"the format {schedules[0]} needs exactly-once: a message and the tombstone of its "
            "schedule must be written atomically"
        )
    return promise


def _redis_url(secret: SecretStr) -> SecretStr:
    connection.check(secret.get_secret_value())
    return secret


def _spark_master(master: str) -> str:
    if not _MASTER.fullmatch(master):
        raise ValueError("wanted: local[*], local[N], spark://host:port or k8s://address")
    return master


def _without_blanks(value: object) -> object:
    # Files of secrets usually end with a newline, which a header cannot contain.
    return value.strip() if isinstance(value, str) else value


def _token(secret: SecretStr | None) -> SecretStr | None:
    text = "" if secret is None else secret.get_secret_value()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("wanted: printable ASCII characters, as allowed in a header")
    return secret


_NAME = "`A-Z a-z 0-9 . _ -`"
_TOPIC = f"1 to 249 of {_NAME}"

Brokers = Annotated[str, Form("`host:port`, separated by commas")]
Topic = Annotated[str, AfterValidator(_topic), Form(_TOPIC)]
DeadLetterTopic = Annotated[Topic, AfterValidator(_dead_letter_topic)]
OutputTopic = Annotated[Topic, AfterValidator(_not_our_own)]
RequestTopics = Annotated[
    str,
    AfterValidator(_request_topics),
    Form(
        f"`topic:format`, separated by commas; formats: {', '.join(f'`{name}`' for name in FORMATS)}"
    ),
]
TimerOutput = Annotated[str | None, AfterValidator(_timer_output), Form(_TOPIC)]
Oscillator = Annotated[str | None, AfterValidator(_oscillator), Form(f"{_TOPIC}, or empty")]
Group = Annotated[str, Form(f"1 to 200 of {_NAME}")]
Instance = Annotated[str | None, Form(f"up to 200 of {_NAME}")]
Delivery = Annotated[Literal["exactly-once", "at-least-once"], AfterValidator(_delivery)]
RedisUrl = Annotated[
    SecretStr,
    AfterValidator(_redis_url),
    Form("`redis://`, `rediss://` (TLS), `unix://`, "
         "[`redis+sentinel://`, `redis+cluster://`](#redis-with-sentinel-or-as-a-cluster)"),
]  # fmt: skip
SparkMaster = Annotated[
    str,
    AfterValidator(_spark_master),
    Form("`local[*]`, `local[N]`, `spark://host:port`, `k8s://address`"),
]
Folder = Annotated[str | None, Form("a folder, or a Hadoop path")]
Host = Annotated[str, Form("an address or a name of this host")]
Address = Annotated[str | None, Form("`host:port`, or `:port` for all addresses")]
Token = Annotated[SecretStr | None, BeforeValidator(_without_blanks), AfterValidator(_token)]
