"""Configuration: one environment variable `BLACKBOX_<NAME>` per field, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import javaproperties
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from blackbox.config.aliases import Alias, aliases
from blackbox.config.fields import (
    Delivery,
    Oscillator,
    OutputTopic,
    RedisUrl,
    RequestTopics,
    SparkMaster,
    TimerOutput,
    Token,
    Topic,
    expired_topic,
    parse_request_topics,
)
from blackbox.formats import FORMATS
from blackbox.journal.topics import is_own_topic

Half = Literal["intake", "dispatch"]

TEN_YEARS_S = 315_360_000


class SettingsError(Exception):
    """The configuration cannot be used; the text names each variable, its value and what is wanted."""


class Settings(BaseSettings):
    """All settings of the operator. Secrets are not printed."""

    model_config = SettingsConfigDict(env_prefix="BLACKBOX_", extra="ignore", frozen=True)

    kafka_bootstrap_servers: str = Field(min_length=1, description="brokers, host:port,…")
    kafka_config: Path | None = Field(
        None,
        description=".properties file with librdkafka settings (TLS, SASL); wins over defaults",
    )
    redis_url: RedisUrl = Field(
        SecretStr("redis://localhost:6379/0"),
        description="redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://",
    )
    request_topics: RequestTopics = Field("TB:countdown", description="comma list of topic:format")
    dead_letter_topic: Topic = Field(
        "blackbox.dead-letters",
        description="topic for requests that cannot be delivered, with the reason",
    )
    history_topic: OutputTopic = Field(
        "history",
        description="topic for copies of the messages that the format scheduler delivered",
    )
    scheduler_grace_s: int = Field(
        -1, ge=-1, le=TEN_YEARS_S,
        description="a schedule that is later than this is not delivered; -1: no limit",
    )  # fmt: skip
    timer_output_topic: TimerOutput = Field(
        None, validate_default=True,
        description="topic for the answers to expired timers; default: <request topic>.expired",
    )  # fmt: skip
    oscillator_topic: Oscillator = Field(
        None, description="topic for a record for each second; default: none"
    )
    group_id: str = Field(
        "blackbox", pattern=r"^[A-Za-z0-9._-]{1,200}$",
        description="consumer group; prefix of transactional ids",
    )  # fmt: skip
    instance_id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._-]{0,200}$",
        description="name of this process in the group; if it is the same after a restart, the "
                    "process gets its shards back at once",
    )  # fmt: skip
    engine: Literal["spark", "process"] = Field(
        "spark", description="the engine: spark, or process for small deployments"
    )
    delivery: Delivery = Field(
        "exactly-once", description="with or without a Kafka transaction per batch"
    )
    poll_interval_ms: int = Field(
        1000, ge=10, le=60_000, description="longest time between two checks of the index"
    )
    wake_up: bool = Field(
        True, description="also check at each next due time, not only every poll interval"
    )
    batch_limit: int = Field(
        1000, ge=1, le=10_000, description="maximum messages per batch of a shard"
    )
    retries: int = Field(
        5, ge=0, le=1000, description="retries if the target is missing, after 1, 2, 4 … 60 s"
    )
    grace_s: int = Field(
        604_800, ge=3600, le=31_536_000,
        description="how long Redis keeps a payload after its due time",
    )  # fmt: skip
    max_countdown_s: int = Field(
        34_560_000, ge=1, le=TEN_YEARS_S, description="longer countdowns are refused"
    )
    retention_s: int = Field(
        604_800, ge=1, le=TEN_YEARS_S,
        description="how long journals keep requests that have ended, at least, for look-ups, "
                    "ledger and audit",
    )  # fmt: skip
    trim_interval_s: int = Field(
        900, ge=1, le=86_400,
        description="how often to determine the low-water mark and trim the journals",
    )  # fmt: skip
    renew_after_s: int | None = Field(
        None, ge=1, le=TEN_YEARS_S,
        description="age at which a request beyond the horizon is renewed; default: a day, or the "
                    "horizon if that is longer",
    )  # fmt: skip
    hot_horizon_s: int = Field(
        86_400, ge=0, le=TEN_YEARS_S,
        description="requests due further ahead stay out of Redis until they are promoted; 0: all "
                    "are in Redis",
    )  # fmt: skip
    spark_master: SparkMaster = Field(
        "local[*]", description="local[*], local[N], spark://host:port or k8s://address"
    )
    spark_config: Path | None = Field(
        None, description=".properties file with Spark settings; wins over defaults"
    )
    ledger: str | None = Field(
        None, description="where the ledger is: a folder, or a Hadoop path such as s3a://bucket/x"
    )
    callers_file: Path | None = Field(
        None, description="TOML file with the callers' rules; read again when it changes"
    )
    http_host: str = Field("127.0.0.1", description="address of health, metrics and API")
    http_port: int = Field(8000, ge=0, le=65535, description="0: any free port")
    api_token: Token = Field(
        None, min_length=16, description="bearer token that allows changes over HTTP"
    )
    api_read_token: Token = Field(
        None, min_length=16, description="bearer token that allows reads over HTTP"
    )
    metrics_addr: str | None = Field(
        None, pattern=r"^[^\s:]*:\d{1,5}$",
        description="host:port of a second listener with the same paths",
    )  # fmt: skip

    @property
    def topics(self) -> Mapping[str, str]:
        """Format by request topic."""
        return parse_request_topics(self.request_topics)

    @property
    def schedule_topics(self) -> list[str]:
        """The request topics with schedules, which are usually compacted."""
        return [topic for topic, name in self.topics.items() if FORMATS[name].is_schedule]

    @property
    def hosts(self) -> list[str]:
        """The addresses that the HTTP server listens on."""
        also = [] if self.metrics_addr is None else [self.metrics_addr.rpartition(":")[0]]
        return [self.http_host, *(host or "0.0.0.0" for host in also)]

    @property
    def api_tokens(self) -> tuple[str | None, str | None]:
        """The token for changes over HTTP, and the token for reading."""
        given = self.api_token, self.api_read_token
        change, read = (None if token is None else token.get_secret_value() for token in given)
        return change, read

    def timer_output(self, topic: str) -> str:
        """The topic for the messages of a request topic whose requests name no target."""
        return self.timer_output_topic or expired_topic(topic)

    @property
    def output_topics(self) -> list[str]:
        """The topics to which messages go although no request names them."""
        timers = (t for t, name in self.topics.items() if FORMATS[name].has_output_topic)
        history = {self.history_topic} if self.schedule_topics else set()
        return sorted({self.timer_output(topic) for topic in timers} | history)

    def is_own_topic(self, name: str) -> bool:
        """Whether a topic belongs to blackbox, so that no request may be delivered to it."""
        return name == self.oscillator_topic or is_own_topic(
            name, self.topics, self.dead_letter_topic
        )

    @property
    def renew_after_ms(self) -> int:
        """The age at which a request of the cold tier is written again."""
        return 1000 * (self.renew_after_s or max(86_400, self.hot_horizon_s))

    @property
    def horizon_ms(self) -> int | None:
        """How far ahead requests enter the index; None: without limit."""
        return self.hot_horizon_s * 1000 or None

    def horizon_ms_of(self, topic: str) -> int | None:
        """The horizon of one request topic; None for topics of schedules, which have no cold tier."""
        return None if topic in self.schedule_topics else self.horizon_ms

    def needed_retention_ms(self, topic: str) -> int:
        """How long Kafka must keep a request topic at least, if it removes records by age.

        Twice the horizon, as requests due later are written again before that. Without a horizon, as long
        as a request can be pending.
        """
        if horizon_ms := self.horizon_ms_of(topic):
            return 2 * horizon_ms
        return (self.max_countdown_s + self.grace_s) * 1000

    def kafka_settings(self) -> dict[str, str]:
        """The operator's librdkafka settings. Raises SettingsError when the file cannot be read."""
        return _properties("BLACKBOX_KAFKA_CONFIG", self.kafka_config)

    def spark_settings(self) -> dict[str, str]:
        """The operator's Spark settings. Raises SettingsError for a file that cannot be used."""
        found = _properties("BLACKBOX_SPARK_CONFIG", self.spark_config)
        for name in found:
            if name == "spark.master" or not name.startswith("spark."):
                raise SettingsError(
                    f"BLACKBOX_SPARK_CONFIG={self.spark_config}: sets {name}; wanted: names that "
                    "start with 'spark.'; the master is BLACKBOX_SPARK_MASTER"
                )
        return found


def _properties(variable: str, path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        with path.open() as file:
            return dict(javaproperties.load(file))
    except OSError as error:
        why = error.strerror
    except ValueError:
        # the cause may quote a piece of a password
        why = r"not UTF-8, or a \u without four hex digits"
    raise SettingsError(f"{variable}={path}: {why}; wanted: a readable .properties file")


SECRET = ("redis_url", "api_token", "api_read_token")


def load(**overrides: object) -> Settings:
    """Read the environment; `overrides` win. Raises SettingsError with one line per bad variable."""
    found = {} if "kafka_bootstrap_servers" in overrides else aliases(os.environ)
    read: dict[str, object] = {name: alias.value for name, alias in found.items()}
    try:
        return Settings(**read | overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        lines = [_explain(dict(fault), found) for fault in error.errors()]
        raise SettingsError("\n".join(lines)) from None


def _explain(fault: dict[str, object], found: Mapping[str, Alias]) -> str:
    location = fault["loc"]
    assert isinstance(location, tuple)
    name = str(location[0])
    variable = found[name].variable if name in found else f"BLACKBOX_{name.upper()}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "missing":
        return f"{variable} is not set; wanted: {Settings.model_fields[name].description}"
    value = "(hidden)" if name in SECRET else repr(os.environ.get(variable, fault.get("input")))
    return f"{variable}={value}: {message}"
