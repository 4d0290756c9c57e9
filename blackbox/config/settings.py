"""Configuration: one environment variable `BLACKBOX_<NAME>` per field, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from blackbox.config.aliases import aliases
from blackbox.config.fields import (
    Address,
    Brokers,
    DeadLetterTopic,
    Delivery,
    Folder,
    Group,
    Host,
    Instance,
    Oscillator,
    OutputTopic,
    RedisUrl,
    RequestTopics,
    SparkMaster,
    TimerOutput,
    Token,
    expired_topic,
    parse_request_topics,
)
from blackbox.config.properties import properties, spark_properties
from blackbox.config.settings_error import explained
from blackbox.formats import FORMATS
from blackbox.formats.format import LONGEST_COUNTDOWN_S
from blackbox.journal.topics import is_own_topic

Half = Literal["intake", "dispatch"]

TEN_YEARS_S = 315_360_000


class Settings(BaseSettings):
    """All settings of the operator. Secrets are not printed.

    `make docs` writes `docs/configuration.md` from them; the descriptions are Markdown.
    """

    model_config = SettingsConfigDict(env_prefix="BLACKBOX_", extra="ignore", frozen=True)

    kafka_bootstrap_servers: Brokers = Field(
        min_length=1, examples=["kafka-1:9092,kafka-2:9092"],
        description="brokers to connect to first, host:port,…",
    )  # fmt: skip
    kafka_config: Path | None = Field(
        None, examples=["/etc/blackbox/kafka.properties"],
        description="a `.properties` file with [librdkafka settings](#kafka-with-tls-and-sasl) for "
                    "every client; they override blackbox's own",
    )  # fmt: skip
    redis_url: RedisUrl = Field(
        SecretStr("redis://localhost:6379/0"), examples=["rediss://blackbox:s3cret@redis:6380/0"],
        description="Redis, at least 6.2. The URL contains user and password, and is never logged; "
                    "percent-encode their special characters",
    )  # fmt: skip
    request_topics: RequestTopics = Field(
        "TB:countdown", examples=["TB:countdown,schedules:scheduler"],
        description="the topics that requests are read from, each with its [format](formats.md). No "
                    "name may end with `.receipts`",
    )  # fmt: skip
    dead_letter_topic: DeadLetterTopic = Field(
        "blackbox.dead-letters", examples=["dead.letters"],
        description="the topic for [dead letters](records.md#dead-letter)",
    )  # fmt: skip
    history_topic: OutputTopic = Field(
        "history", examples=["schedules.history"],
        description="the topic for copies of the messages that the format "
                    "[`scheduler`](scheduler.md) delivered; created if it is missing",
    )  # fmt: skip
    scheduler_grace_s: int = Field(
        -1, ge=-1, le=TEN_YEARS_S,
        description="a schedule that is later than this becomes a dead letter and is not delivered; "
                    "-1: schedules are delivered however late they are",
    )  # fmt: skip
    timer_output_topic: TimerOutput = Field(
        None, validate_default=True, examples=["timer.expired"],
        description="the topic for the answers to expired [timers](timers.md#timer); created if it "
                    "is missing. None: the request topic + `.expired`",
    )  # fmt: skip
    oscillator_topic: Oscillator = Field(
        None, examples=["oscillator"],
        description="the topic for [a record for each second](timers.md#the-oscillator); created "
                    "with one partition if it is missing. None or empty: no such records",
    )  # fmt: skip
    group_id: Group = Field(
        "blackbox", pattern=r"^[A-Za-z0-9._-]{1,200}$", examples=["blackbox-eu"],
        description="the consumer group that assigns shards to processes, and the prefix of the "
                    "transactional ids. All processes with the same request topics need the same "
                    "group, and other request topics need another one",
    )  # fmt: skip
    instance_id: Instance = Field(
        None, pattern=r"^[A-Za-z0-9._-]{0,200}$", examples=["blackbox-0"],
        description="the name of this process in the group (`group.instance.id`). A process that is "
                    "restarted under the same name gets its shards back at once, not after the "
                    "session timeout of the group (6 s). Each process needs a name of its own: of two "
                    "with the same name, the first continues without it, and logs an error. The "
                    "chart sets the pod's name, `docker-compose.yml` the container's",
    )  # fmt: skip
    engine: Literal["spark", "process"] = Field(
        "spark",
        description="the [engine](engines.md) for intake and dispatch: Spark, or this process alone, "
                    "for small deployments",
    )  # fmt: skip
    delivery: Delivery = Field(
        "exactly-once",
        description="`exactly-once`: a Kafka transaction for each batch. `at-least-once`: no "
                    "transactions; a crash or a lost connection can deliver a batch twice, and readers "
                    "need not be `read_committed`. The format `scheduler` needs `exactly-once`",
    )  # fmt: skip
    poll_interval_ms: int = Field(
        1000, ge=10, le=60_000, description="the longest time between two checks of the index"
    )
    wake_up: bool = Field(
        True,
        description="check the index also when the next request is due; otherwise messages are late "
                    "by up to a poll interval",
    )  # fmt: skip
    linger_ms: int = Field(
        100, ge=0, le=1_000,
        description="the longest time, from the start of a transaction, for which a shard gathers due "
                    "messages for the next one; at most the poll interval, and at least 12 ms. A process that "
                    "does little waits less: with a hundredth of a core, a sixth of it. [What each value "
                    "costs](performance.md#linger)",
    )  # fmt: skip
    batch_limit: int = Field(
        1000, ge=1, le=10_000,
        description="the maximum number of due messages in a batch, which is one transaction of one "
                    "shard. It may also hold as many parked messages. A batch also ends at about 16 MiB",
    )  # fmt: skip
    retries: int = Field(
        5, ge=0, le=1000,
        description="how often a message is retried if its target does not exist, or blackbox has no "
                    "permission to write to it: after 1, 2, 4 … 60 s. Then it becomes a dead letter",
    )  # fmt: skip
    grace_s: int = Field(
        604_800, ge=3600, le=31_536_000,
        description="how long Redis keeps a payload after its due time. Choose more than the longest "
                    "outage of Kafka",
    )  # fmt: skip
    max_countdown_s: int = Field(
        34_560_000, ge=1, le=LONGEST_COUNTDOWN_S,
        description="requests that are due further ahead are refused (`too-far`)",
    )  # fmt: skip
    retention_s: int = Field(
        604_800, ge=1, le=TEN_YEARS_S,
        description="the age up to which the journals keep every record, for `show`, the "
                    "[ledger](ledger.md) and the [audit](audit.md). Older records are [removed from "
                    "Kafka](recovery.md#trimming) once no pending request needs them",
    )  # fmt: skip
    trim_interval_s: int = Field(
        900, ge=1, le=86_400,
        description="how often each shard determines its [low-water "
                    "mark](recovery.md#the-low-water-mark) and trims its journals; with Spark, at "
                    "least once in each window of dispatch (ten minutes)",
    )  # fmt: skip
    renew_after_s: int | None = Field(
        None, ge=1, le=TEN_YEARS_S,
        description="the age at which a request of the [cold tier](cold-tier.md#renewal) is renewed, "
                    "so that the journal before it can be trimmed. None: a day, or the horizon if "
                    "that is longer",
    )  # fmt: skip
    hot_horizon_s: int = Field(
        86_400, ge=0, le=TEN_YEARS_S,
        description="requests that are due further ahead wait in Kafka and take almost no room in "
                    "Redis: the [cold tier](cold-tier.md). 0: every request is in Redis",
    )  # fmt: skip
    spark_master: SparkMaster = Field(
        "local[*]", examples=["spark://spark:7077"],
        description="where Spark [runs its tasks](deploying.md#where-spark-runs)",
    )  # fmt: skip
    spark_config: Path | None = Field(
        None, examples=["/etc/blackbox/spark.properties"],
        description="a `.properties` file with [Spark settings](#spark); they override "
                    "blackbox's own",
    )  # fmt: skip
    ledger: Folder = Field(
        None, examples=["s3a://bucket/ledger"],
        description="where the [ledger](ledger.md) keeps the journals as Parquet; the audit reads it, "
                    "too",
    )  # fmt: skip
    callers_file: Path | None = Field(
        None, examples=["/etc/blackbox/callers.toml"],
        description="a TOML file with [limits for callers](callers.md) and rates of targets; read "
                    "again when it changes. None: no limits",
    )  # fmt: skip
    http_host: Host = Field(
        "127.0.0.1", examples=["0.0.0.0"],
        description="the address of probes, metrics and the [API](api.md). Without a token, other "
                    "addresses than loopback serve only probes, metrics and the empty page. Nothing "
                    "is encrypted: use `0.0.0.0` only behind a network policy",
    )  # fmt: skip
    http_port: int = Field(8000, ge=0, le=65535, description="the port; 0: any free port")
    api_token: Token = Field(
        None, min_length=16,
        description="the bearer token that allows reads and changes over [HTTP](api.md#access), "
                    "such as the output of `openssl rand -hex 32`. Whitespace at its ends is ignored. "
                    "None: changes are allowed on loopback only",
    )  # fmt: skip
    api_read_token: Token = Field(
        None, min_length=16,
        description="the bearer token that allows reads only. If one of the two tokens is set, reads "
                    "need a token",
    )  # fmt: skip
    metrics_addr: Address = Field(
        None, pattern=r"^[^\s:]*:\d{1,5}$", examples=["127.0.0.1:8001"],
        description="a second address to listen on, with the same paths",
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
        """How long Kafka must keep a request topic at least, if it removes records by age."""
        # Requests that are due later are written again before that.
        if horizon_ms := self.horizon_ms_of(topic):
            return 2 * horizon_ms
        # Without a cold tier, as long as a request can be pending.
        return (self.max_countdown_s + self.grace_s) * 1000

    def kafka_settings(self) -> dict[str, str]:
        """The operator's librdkafka settings. Raises SettingsError when the file cannot be read."""
        return properties("BLACKBOX_KAFKA_CONFIG", self.kafka_config)

    def spark_settings(self) -> dict[str, str]:
        """The operator's Spark settings. Raises SettingsError for a file that cannot be used."""
        return spark_properties("BLACKBOX_SPARK_CONFIG", self.spark_config)


def load(**overrides: object) -> Settings:
    """Read the environment; `overrides` win. Raises SettingsError with one line per bad variable."""
    # With brokers given, as by --embedded, the environment is not that of kafka-message-scheduler.
    found = {} if "kafka_bootstrap_servers" in overrides else aliases(os.environ)
    read: dict[str, object] = {name: alias.value for name, alias in found.items()}
    try:
        return Settings(**read | overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        raise explained(error, Settings.model_fields, found) from None
