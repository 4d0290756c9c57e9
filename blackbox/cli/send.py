"""`blackbox send`: write a request from the command line."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from blackbox.admin.request_topics_writer import WRITE_FORMAT
from blackbox.cli.error_exit import BadUsage
from blackbox.cli.terminal import At, Countdown, RequestTopic, chosen_topic, typed_instant
from blackbox.client.request_value import request_value
from blackbox.client.request_writer import RequestWriter
from blackbox.config.settings import Settings, load
from blackbox.config.wiring import kafka
from blackbox.formats import Options, make_format
from blackbox.records.request import Invalid, Record
from blackbox.support import logs

Target = Annotated[str, typer.Option(help="The topic that the message is delivered to.")]
Message = Annotated[
    str, typer.Option(help="The message; with -, it is read from stdin, unchanged.")
]
Key = Annotated[str | None, typer.Option(help="Key of the delivered record.")]
Header = Annotated[
    list[str] | None, typer.Option(help="Header of the delivered record, name=value; repeatable.")
]
OwnId = Annotated[
    str | None, typer.Option(help="Your own id for the request, to replace or cancel it.")
]
Every = Annotated[
    float | None,
    typer.Option(help="Repeat every N seconds until the request is cancelled; requires --id."),
]
Cron = Annotated[
    str | None,
    typer.Option(help="Repeat at the times of this cron expression (five fields); requires --id."),
]
Timezone = Annotated[
    str | None, typer.Option(help="Time zone of --cron, such as Europe/Berlin; default: UTC.")
]
Caller = Annotated[str | None, typer.Option(help="The caller, sent as the header CALLER_SERVICE.")]


def send(
    topic: Target,
    message: Message,
    countdown: Countdown = None,
    at: At = None,
    key: Key = None,
    header: Header = None,
    id: OwnId = None,
    every: Every = None,
    cron: Cron = None,
    timezone: Timezone = None,
    caller: Caller = None,
    request_topic: RequestTopic = None,
) -> None:
    """Request a message for later delivery; prints the request's id once Kafka has acknowledged it."""
    settings = load()
    recurs = every is not None or cron is not None
    if (countdown is not None and at is not None) or not (recurs or countdown is not None or at):
        raise BadUsage("the due time must be given once: --countdown SECONDS or --at INSTANT")
    try:
        value = request_value(
            topic, _from_stdin() if message == "-" else message,
            countdown_s=countdown, at=typed_instant(at), key=key, id=id,
            headers=dict(map(_header, header or ())), every_s=every, cron=cron, timezone=timezone,
        )  # fmt: skip
    # Python keeps bytes of an argument that are not UTF-8 as surrogates, which orjson refuses.
    except TypeError as error:
        raise BadUsage(f"an argument cannot be sent as JSON: {error}; use UTF-8") from None
    except ValueError as error:
        raise BadUsage(str(error)) from None
    # Otherwise the command would succeed, and intake would make the request a dead letter.
    _refuse_invalid(value, settings)
    with _client(settings, caller, request_topic) as client:
        typer.echo(client.write(value, key=id).id)


def _from_stdin() -> str:
    # For messages that `ps` must not show, as it shows arguments.
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise BadUsage(
            f"stdin is not valid UTF-8: {error}; send such a message with the Python client"
        ) from None


def _client(settings: Settings, caller: str | None, request_topic: str | None) -> RequestWriter:
    logs.disable()
    access = kafka(settings, logs.NO_CLIENT_LOG)
    client = RequestWriter(
        access.bootstrap_servers,
        caller=caller,
        request_topic=chosen_topic(request_topic, settings),
        kafka_settings=access.settings,
    )
    # Reports a missing topic at once; librdkafka first waits for it to appear.
    client.check_topic()
    return client


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise BadUsage(f"--header {text!r}: give name=value")
    return name, value


def _refuse_invalid(value: bytes, settings: Settings) -> None:
    format = make_format(WRITE_FORMAT, Options(settings.max_countdown_s, settings.is_own_topic))
    now_ms = time.time_ns() // 1_000_000
    parsed = format.parse(Record(0, now_ms, None, value, []), now_ms)
    if isinstance(parsed, Invalid):
        raise BadUsage(f"not sent, {parsed.reason}: {parsed.detail}")
