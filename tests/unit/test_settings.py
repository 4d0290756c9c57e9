"""The environment variables: valid values, invalid values, and the page that lists them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from pydantic import SecretStr

from blackbox.config.settings import Settings, load
from blackbox.config.settings_error import SettingsError

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()

SERVERS = "BLACKBOX_KAFKA_BOOTSTRAP_SERVERS"
PASSWORD = "hunter2"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which only the brokers are set."""
    for name in list(os.environ):
        if name.upper().startswith("BLACKBOX_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv(SERVERS, "broker:9092")
    return monkeypatch


GOOD = [
    ("BLACKBOX_KAFKA_BOOTSTRAP_SERVERS", "a:9092,b:9092", "a:9092,b:9092"),
    ("BLACKBOX_KAFKA_CONFIG", "/etc/kafka.properties", Path("/etc/kafka.properties")),
    ("BLACKBOX_REDIS_URL", "rediss://redis:6380/1", SecretStr("rediss://redis:6380/1")),
    ("BLACKBOX_REDIS_URL", "unix:///run/redis.sock", SecretStr("unix:///run/redis.sock")),
    ("BLACKBOX_REQUEST_TOPICS", "TB:countdown, other:countdown", "TB:countdown, other:countdown"),
    ("BLACKBOX_REQUEST_TOPICS", "a:future,b:timer", "a:future,b:timer"),
    ("BLACKBOX_DEAD_LETTER_TOPIC", "dead.letters", "dead.letters"),
    ("BLACKBOX_API_TOKEN", "0123456789abcdef", SecretStr("0123456789abcdef")),
    ("BLACKBOX_METRICS_ADDR", ":8001", ":8001"),
    ("BLACKBOX_HISTORY_TOPIC", "schedules.history", "schedules.history"),
    ("BLACKBOX_SCHEDULER_GRACE_S", "0", 0),
    ("BLACKBOX_TIMER_OUTPUT_TOPIC", "timer.expired", "timer.expired"),
    ("BLACKBOX_OSCILLATOR_TOPIC", "oscillator", "oscillator"),
    ("BLACKBOX_OSCILLATOR_TOPIC", "", None),
    ("BLACKBOX_GROUP_ID", "team-a.blackbox_1", "team-a.blackbox_1"),
    ("BLACKBOX_INSTANCE_ID", "blackbox-0", "blackbox-0"),
    ("BLACKBOX_ENGINE", "process", "process"),
    ("BLACKBOX_ENGINE", "spark", "spark"),
    ("BLACKBOX_DELIVERY", "at-least-once", "at-least-once"),
    ("BLACKBOX_POLL_INTERVAL_MS", "10", 10),
    ("BLACKBOX_POLL_INTERVAL_MS", "60000", 60_000),
    ("BLACKBOX_WAKE_UP", "false", False),
    ("BLACKBOX_BATCH_LIMIT", "1", 1),
    ("BLACKBOX_BATCH_LIMIT", "10000", 10_000),
    ("BLACKBOX_LINGER_MS", "0", 0),
    ("BLACKBOX_LINGER_MS", "1000", 1_000),
    ("BLACKBOX_RETRIES", "0", 0),
    ("BLACKBOX_GRACE_S", "3600", 3600),
    ("BLACKBOX_MAX_COUNTDOWN_S", "1", 1),
    ("BLACKBOX_SPARK_MASTER", "local", "local"),
    ("BLACKBOX_SPARK_MASTER", "local[*]", "local[*]"),
    ("BLACKBOX_SPARK_MASTER", "local[8,2]", "local[8,2]"),
    ("BLACKBOX_SPARK_MASTER", "spark://a:7077,b:7077", "spark://a:7077,b:7077"),
    ("BLACKBOX_SPARK_MASTER", "k8s://https://10.0.0.1:443", "k8s://https://10.0.0.1:443"),
    ("BLACKBOX_SPARK_CONFIG", "/etc/spark.properties", Path("/etc/spark.properties")),
    ("BLACKBOX_HOT_HORIZON_S", "3600", 3600),
    ("BLACKBOX_HOT_HORIZON_S", "0", 0),
    ("BLACKBOX_RETENTION_S", "1", 1),
    ("BLACKBOX_TRIM_INTERVAL_S", "86400", 86_400),
    ("BLACKBOX_RENEW_AFTER_S", "3600", 3600),
    ("BLACKBOX_LEDGER", "s3a://bucket/ledger", "s3a://bucket/ledger"),
    ("BLACKBOX_HTTP_HOST", "::1", "::1"),
    ("BLACKBOX_HTTP_PORT", "0", 0),
]


@pytest.mark.parametrize(("variable", "text", "value"), GOOD)
def test_a_valid_setting_is_accepted(
    environment: pytest.MonkeyPatch, variable: str, text: str, value: object
) -> None:
    environment.setenv(variable, text)
    assert getattr(load(), variable.removeprefix("BLACKBOX_").lower()) == value


BAD = [
    ("BLACKBOX_KAFKA_BOOTSTRAP_SERVERS", "", "at least 1 character"),
    ("BLACKBOX_REQUEST_TOPICS", "", "wanted: a comma list of topic:format, like TB:countdown"),
    ("BLACKBOX_REQUEST_TOPICS", "TB", "wanted: a comma list of topic:format, like TB:countdown"),
    ("BLACKBOX_REQUEST_TOPICS", "TB:", "wanted: a comma list of topic:format, like TB:countdown"),
    ("BLACKBOX_REQUEST_TOPICS", "TB:countdown,", "wanted: a comma list of topic:format"),
    (
        "BLACKBOX_REQUEST_TOPICS",
        "TB:cron",
        "unknown format 'cron'; wanted: countdown, scheduler, future, timer",
    ),
    ("BLACKBOX_REQUEST_TOPICS", "T B:countdown", "wanted: a topic name of 1 to 249"),
    ("BLACKBOX_REQUEST_TOPICS", "TB:countdown,TB:countdown", "the topic 'TB' is given twice"),
    ("BLACKBOX_REQUEST_TOPICS", "TB.receipts:countdown", "ends with '.receipts'"),
    ("BLACKBOX_DEAD_LETTER_TOPIC", "dead letters", "wanted: a topic name of 1 to 249"),
    (
        "BLACKBOX_DEAD_LETTER_TOPIC",
        "TB",
        "'TB' is a request topic, or one of receipts; use another one",
    ),
    ("BLACKBOX_DEAD_LETTER_TOPIC", "TB.receipts", "is a request topic, or one of receipts"),
    ("BLACKBOX_TIMER_OUTPUT_TOPIC", "TB", "'TB' is one of blackbox's own topics; use another one"),
    ("BLACKBOX_TIMER_OUTPUT_TOPIC", "TB.receipts", "is one of blackbox's own topics"),
    ("BLACKBOX_TIMER_OUTPUT_TOPIC", "blackbox.dead-letters", "is one of blackbox's own topics"),
    ("BLACKBOX_TIMER_OUTPUT_TOPIC", "a b", "wanted: a topic name of 1 to 249"),
    ("BLACKBOX_OSCILLATOR_TOPIC", "TB", "'TB' is one of blackbox's own topics; use another one"),
    ("BLACKBOX_OSCILLATOR_TOPIC", "TB.receipts", "is one of blackbox's own topics"),
    ("BLACKBOX_OSCILLATOR_TOPIC", "blackbox.dead-letters", "is one of blackbox's own topics"),
    ("BLACKBOX_OSCILLATOR_TOPIC", "history", "is one of blackbox's own topics"),
    ("BLACKBOX_OSCILLATOR_TOPIC", "a b", "wanted: a topic name of 1 to 249"),
    ("BLACKBOX_DEAD_LETTER_TOPIC", "..", "wanted: a topic name of 1 to 249"),
    ("BLACKBOX_DEAD_LETTER_TOPIC", "x" * 250, "wanted: a topic name of 1 to 249"),
    ("BLACKBOX_GROUP_ID", "team a", "should match pattern"),
    ("BLACKBOX_INSTANCE_ID", "pod 1", "should match pattern"),
    ("BLACKBOX_GROUP_ID", "", "should match pattern"),
    ("BLACKBOX_ENGINE", "flink", "should be 'spark' or 'process'"),
    ("BLACKBOX_DELIVERY", "at-most-once", "should be 'exactly-once' or 'at-least-once'"),
    ("BLACKBOX_POLL_INTERVAL_MS", "1s", "valid integer"),
    ("BLACKBOX_POLL_INTERVAL_MS", "0.5", "valid integer"),
    ("BLACKBOX_POLL_INTERVAL_MS", "", "valid integer"),
    ("BLACKBOX_POLL_INTERVAL_MS", "9", "greater than or equal to 10"),
    ("BLACKBOX_POLL_INTERVAL_MS", "60001", "less than or equal to 60000"),
    ("BLACKBOX_WAKE_UP", "sometimes", "valid boolean"),
    ("BLACKBOX_BATCH_LIMIT", "0", "greater than or equal to 1"),
    ("BLACKBOX_BATCH_LIMIT", "10001", "less than or equal to 10000"),
    ("BLACKBOX_LINGER_MS", "-1", "greater than or equal to 0"),
    ("BLACKBOX_LINGER_MS", "1001", "less than or equal to 1000"),
    ("BLACKBOX_RETRIES", "-1", "greater than or equal to 0"),
    ("BLACKBOX_RETRIES", "1001", "less than or equal to 1000"),
    ("BLACKBOX_GRACE_S", "3599", "greater than or equal to 3600"),
    ("BLACKBOX_GRACE_S", "31536001", "less than or equal to 31536000"),
    ("BLACKBOX_MAX_COUNTDOWN_S", "0", "greater than or equal to 1"),
    ("BLACKBOX_MAX_COUNTDOWN_S", "315360001", "less than or equal to 315360000"),
    ("BLACKBOX_RETENTION_S", "0", "greater than or equal to 1"),
    ("BLACKBOX_RETENTION_S", "315360001", "less than or equal to 315360000"),
    ("BLACKBOX_RETENTION_S", "7d", "valid integer"),
    ("BLACKBOX_TRIM_INTERVAL_S", "0", "greater than or equal to 1"),
    ("BLACKBOX_TRIM_INTERVAL_S", "86401", "less than or equal to 86400"),
    ("BLACKBOX_RENEW_AFTER_S", "0", "greater than or equal to 1"),
    ("BLACKBOX_RENEW_AFTER_S", "315360001", "less than or equal to 315360000"),
    ("BLACKBOX_RENEW_AFTER_S", "", "valid integer"),
    ("BLACKBOX_HOT_HORIZON_S", "-1", "greater than or equal to 0"),
    ("BLACKBOX_HOT_HORIZON_S", "315360001", "less than or equal to 315360000"),
    *(
        ("BLACKBOX_SPARK_MASTER", master, "wanted: local[*], local[N], spark://host:port or k8s://")
        for master in (
            "",
            "yarn",
            "local[",
            "local[0]",
            "local[-1]",
            "local[two]",
            "spark://",
            "spark://host",
            "spark://host:port",
            "spark://a:7077,",
            "k8s://",
            "k8s:// host",
            "https://10.0.0.1:443",
        )
    ),
    ("BLACKBOX_HTTP_PORT", "http", "valid integer"),
    ("BLACKBOX_HTTP_PORT", "-1", "greater than or equal to 0"),
    ("BLACKBOX_HTTP_PORT", "65536", "less than or equal to 65535"),
]


@pytest.mark.parametrize(("variable", "text", "wanted"), BAD)
def test_an_invalid_setting_is_refused_with_its_variable_and_what_is_expected(
    environment: pytest.MonkeyPatch, variable: str, text: str, wanted: str
) -> None:
    environment.setenv(variable, text)
    with pytest.raises(SettingsError) as refused:
        load()
    said = str(refused.value)
    assert said.startswith(f"{variable}={text!r}: ")
    assert wanted in said
    assert "\n" not in said


def test_the_bootstrap_servers_must_be_set(environment: pytest.MonkeyPatch) -> None:
    environment.delenv(SERVERS)
    with pytest.raises(SettingsError, match=f"{SERVERS} is not set; wanted: brokers"):
        load()


def test_schedules_need_exactly_once(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("BLACKBOX_REQUEST_TOPICS", "TB:countdown,s:scheduler")
    environment.setenv("BLACKBOX_DELIVERY", "at-least-once")
    with pytest.raises(SettingsError, match="BLACKBOX_DELIVERY='at-least-once': the format sched"):
        load()


def test_the_history_topic_must_not_be_a_topic_of_blackbox(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("BLACKBOX_REQUEST_TOPICS", "s:scheduler")
    environment.setenv("BLACKBOX_HISTORY_TOPIC", "s.receipts")
    with pytest.raises(SettingsError, match=r"BLACKBOX_HISTORY_TOPIC='s\.receipts'"):
        load()


def test_the_environment_of_kafka_message_scheduler_is_read(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.delenv(SERVERS)
    environment.setenv("BOOTSTRAP_SERVERS", "theirs:9092")
    assert (load().request_topics, load().group_id) == ("schedules:scheduler", "scheduler-cg")
    theirs = {
        "SCHEDULES_TOPICS": "a, b",
        "HISTORY_TOPIC": "audit",
        "GROUP_ID": "g",
        "SERVER_ADDR": ":9000",
        "METRICS_ADDR": ":9001",
        "SCHEDULE_GRACE_INTERVAL": "3",
    }
    for name, value in theirs.items():
        environment.setenv(name, value)
    found = load()
    assert found.kafka_bootstrap_servers == "theirs:9092"
    assert found.topics == {"a": "scheduler", "b": "scheduler"}
    assert (found.history_topic, found.group_id) == ("audit", "g")
    assert (found.http_host, found.http_port, found.metrics_addr) == ("0.0.0.0", 9000, ":9001")
    assert found.scheduler_grace_s == 3

    environment.setenv("BLACKBOX_HISTORY_TOPIC", "ours")
    assert load().history_topic == "ours"
    environment.setenv("SCHEDULE_GRACE_INTERVAL", "3s")
    with pytest.raises(SettingsError, match="SCHEDULE_GRACE_INTERVAL='3s'"):
        load()

    environment.setenv(SERVERS, "ours:9092")
    assert (load().request_topics, load().group_id) == ("TB:countdown", "blackbox")


def test_the_timer_output_topic_must_not_be_a_request_topic(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("BLACKBOX_REQUEST_TOPICS", "TB:timer,TB.expired:countdown")
    with pytest.raises(
        SettingsError, match=r"TIMER_OUTPUT_TOPIC=None: 'TB\.expired' is one of blackbox's"
    ):
        load()


def test_topics_of_blackbox_are_not_targets() -> None:
    found = load(request_topics="a:countdown,b:timer", oscillator_topic="seconds")
    own = ["a", "b", "a.receipts", "theirs.receipts", "blackbox.dead-letters", "seconds"]
    assert [name for name in [*own, "b.expired", "orders"] if found.is_own_topic(name)] == own
    assert not load().is_own_topic("seconds")


@pytest.mark.parametrize("output", [None, "answers"])
def test_the_oscillator_topic_must_not_be_the_timer_output_topic(output: str | None) -> None:
    with pytest.raises(SettingsError, match="is one of blackbox's own topics; use another one"):
        load(
            request_topics="TB:timer",
            timer_output_topic=output,
            oscillator_topic=output or "TB.expired",
        )


def test_all_invalid_settings_are_named_together(environment: pytest.MonkeyPatch) -> None:
    bad = {variable: text for variable, text, _ in BAD}
    for variable, text in bad.items():
        environment.setenv(variable, text)
    with pytest.raises(SettingsError) as refused:
        load()
    named = [line.partition("=")[0] for line in str(refused.value).splitlines()]
    assert sorted(named) == sorted(bad)


@pytest.mark.parametrize(
    "url",
    [
        f"http://:{PASSWORD}@redis:6379",
        f"redis+sentinel://:{PASSWORD}@redis:26379",
        f"redis+sentinel://:{PASSWORD}@redis:26379/mymaster/one",
        f"redis+sentinel://:a/{PASSWORD}@redis:26379/mymaster",
        f"redis+sentinel://user:12/{PASSWORD}@redis:26379/mymaster",
        f"redis+sentinel://redis/mymaster?sentinel_passwort={PASSWORD}",
        f"redis+cluster://:{PASSWORD}@redis:6379/3",
        f"redis+cluster://:{PASSWORD}@redis:6379?db=3",
        f"redis+cluster://:{PASSWORD}@",
        f"redis+cluster://:{PASSWORD}@redis:6379,redis:port",
        f"redis+cluster://:{PASSWORD}@[redis",
        f"redis+elsewhere://:{PASSWORD}@redis:6379",
        f"unix+cluster://:{PASSWORD}@redis:6379",
        f"redis://redis:6379?{PASSWORD}={PASSWORD}",
        f":{PASSWORD}@redis:6379",
        f"redis://:{PASSWORD}@[redis",
    ],
)
def test_a_bad_redis_url_is_refused_without_its_password(
    environment: pytest.MonkeyPatch, url: str
) -> None:
    environment.setenv("BLACKBOX_REDIS_URL", url)
    with pytest.raises(SettingsError, match=r"^BLACKBOX_REDIS_URL=\(hidden\): ") as refused:
        load()
    assert PASSWORD not in str(refused.value)
    assert PASSWORD not in repr(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


def test_the_redis_password_does_not_print(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("BLACKBOX_REDIS_URL", f"redis://:{PASSWORD}@redis:6379/0")
    settings = load()
    assert settings.redis_url.get_secret_value() == f"redis://:{PASSWORD}@redis:6379/0"
    for printed in (
        repr(settings),
        str(settings),
        settings.model_dump_json(),
        str(settings.__dict__),
    ):
        assert PASSWORD not in printed


def test_an_argument_wins_over_the_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("BLACKBOX_HTTP_PORT", "9000")
    assert load(http_port=9001).http_port == 9001


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().http_port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "kept_s"),
    [
        ({}, 2 * 86_400),
        ({"hot_horizon_s": 3600}, 7200),
        ({"hot_horizon_s": 0, "max_countdown_s": 100, "grace_s": 3600}, 3700),
        ({"request_topics": "TB:scheduler", "max_countdown_s": 100, "grace_s": 3600}, 3700),
    ],
)
def test_the_needed_retention_is_two_horizons_or_the_longest_pending_time(
    settings: dict[str, object], kept_s: int
) -> None:
    assert load(**settings).needed_retention_ms("TB") == kept_s * 1000


@pytest.mark.parametrize(
    ("settings", "age_s"),
    [({}, 86_400), ({"hot_horizon_s": 90_000}, 90_000), ({"renew_after_s": 60}, 60)],
)
def test_cold_requests_are_renewed_when_they_are_a_day_old_or_the_horizon(
    settings: dict[str, object], age_s: int
) -> None:
    assert load(**settings).renew_after_ms == age_s * 1000


def test_spark_is_the_default_engine() -> None:
    assert load().engine == "spark"


FILES = {"kafka_config": Settings.kafka_settings, "spark_config": Settings.spark_settings}
PROPERTIES = {
    "kafka_config": ("security.protocol = SSL\nssl.ca.location=/etc/ca.pem", "SSL"),
    "spark_config": ("spark.driver.memory = 2g\nspark.driver.host=${env:HOST}", "2g"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_settings_of_a_file_are_read(tmp_path: Path, name: str) -> None:
    text, first = PROPERTIES[name]
    file = tmp_path / "some.properties"
    file.write_text(f"# a remark\n{text}\n\n")
    found = FILES[name](load(**{name: file}))
    assert list(found.values()) == [first, text.rpartition("=")[2]]


@pytest.mark.parametrize("name", FILES)
def test_without_a_file_there_are_no_further_settings(name: str) -> None:
    assert FILES[name](load()) == {}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_settings_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"^BLACKBOX_{name.upper()}=.*/gone\.properties: .*readable"
    ):
        FILES[name](load(**{name: tmp_path / "gone.properties"}))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"spark.x=hunter2\nspark.y=\\u12", b"spark.x=hunter2\xff"])
def test_a_file_that_cannot_be_read_is_named_without_its_content(
    tmp_path: Path, name: str, content: bytes
) -> None:
    file = tmp_path / "some.properties"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=rf"^BLACKBOX_{name.upper()}=.*\.properties") as refused:
        FILES[name](load(**{name: file}))
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("line", ["spark.master=yarn", "executor.memory=hunter2"])
def test_a_spark_setting_that_has_no_effect_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "spark.properties"
    file.write_text(line)
    said = rf"^BLACKBOX_SPARK_CONFIG=.*: sets {re.escape(line.partition('=')[0])}; wanted: "
    with pytest.raises(SettingsError, match=said) as refused:
        load(spark_config=file).spark_settings()
    assert PASSWORD not in str(refused.value)


def test_a_secret_of_spark_is_refused_where_the_process_list_would_show_it(tmp_path: Path) -> None:
    file = tmp_path / "spark.properties"
    file.write_text(f"spark.authenticate.secret={PASSWORD}")
    with pytest.raises(SettingsError, match=r"in spark-defaults\.conf") as refused:
        load(spark_config=file).spark_settings()
    assert PASSWORD not in str(refused.value)


EXAMPLES = [
    (f"BLACKBOX_{name.upper()}", example)
    for name, field in Settings.model_fields.items()
    for example in field.examples or ()
]


@pytest.mark.parametrize(("variable", "example"), EXAMPLES)
def test_an_example_of_a_setting_is_accepted(
    environment: pytest.MonkeyPatch, variable: str, example: str
) -> None:
    environment.setenv(variable, example)
    assert load()


def block(language: str, containing: str) -> str:
    for found in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL):
        if containing in found:
            return str(found)
    raise AssertionError(f"no {language} block with {containing!r} in the page")


def test_the_error_on_the_page_is_what_blackbox_prints(environment: pytest.MonkeyPatch) -> None:
    for line in block("sh", "export BLACKBOX_POLL_INTERVAL_MS").splitlines():
        variable, _, text = line.removeprefix("export ").partition("=")
        environment.setenv(variable, text)
    environment.delenv(SERVERS)
    with pytest.raises(SettingsError) as refused:
        load()
    assert f"{refused.value}\n" == block("text", "BLACKBOX_POLL_INTERVAL_MS")


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "ssl.key.location"])
def test_the_kafka_settings_on_the_page_are_known_to_the_client(
    tmp_path: Path, mechanism: str
) -> None:
    file = tmp_path / "kafka.properties"
    file.write_text(block("properties", mechanism))
    settings = load(kafka_config=file).kafka_settings()
    assert settings["security.protocol"] in ("SASL_SSL", "SSL")
    files = {name for name in settings if name.endswith(".location")}
    AdminClient({name: value for name, value in settings.items() if name not in files})
    for name in files:
        with pytest.raises(KafkaException, match=rf"{re.escape(name)} failed"):
            AdminClient({"security.protocol": "SSL", name: str(tmp_path / "gone.pem")})
