"""The list of Kafka's ACLs in `deploy/kafka-acls.csv`: enough for each command, and none unnecessary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition
from confluent_kafka.admin import NewTopic, OffsetSpec
from redis import Redis

from blackbox import Client, LookupFailed
from blackbox.config.settings import load
from blackbox.config.wiring import kafka
from blackbox.core.plan import Binding, Positions
from blackbox.embedded import EmbeddedStack
from blackbox.index.connection import pool
from blackbox.index.shard_index import ShardIndex
from blackbox.journal.kafka_access import KafkaAccess
from blackbox.journal.piece_writer import PieceProgressReader, PieceWriter, piece_name
from blackbox.journal.ranges import Range, read_ranges
from blackbox.journal.topics import Topics, TopicSettings
from blackbox.records.entry import Entry
from blackbox.records.errors import RecoveryRequired
from blackbox.records.receipt import Receipt, encode
from blackbox.records.request import Reason, Shard, request_id
from tests.contract.held import entry, store
from tests.security.guarded import GuardedKafka
from tests.security.rights import Right, kafka_rights
from tests.service.test_cli import Answer, blackbox
from tests.support.world import ForkedService, ServiceProcess, until

pytestmark = pytest.mark.service


WRITERS_OF_RECEIPTS = "run", "rebind that decides"


class Deployment:
    """Topics, a group and ids with the names of the list and a prefix, and a user for them."""

    def __init__(self, kafka: GuardedKafka, redis_url: str, folder: Path) -> None:
        self.prefix = f"t{uuid4().hex[:8]}."
        self.kafka = kafka
        self.redis_url = redis_url
        self.folder = folder
        self.services: list[ServiceProcess] = []
        self.requests, self.receipts = self.prefix + "TB", self.prefix + "TB.receipts"
        self.letters, self.target = self.prefix + "blackbox.dead-letters", self.prefix + "orders"

    def own(self, right: Right) -> Right:
        return right._replace(name=self.prefix + right.name)

    def allow(self, rights: Iterable[Right]) -> None:
        self.kafka.allow(map(self.own, rights))

    def create(self, topic: str, partitions: int = 1, **more: str) -> None:
        config = {"message.timestamp.type": "LogAppendTime"}
        config |= {name.replace("_", "."): value for name, value in more.items()}
        new = NewTopic(topic, partitions, config=config)
        self.kafka.admin.create_topics([new])[topic].result()

    def create_all(self) -> None:
        for topic in (self.requests, self.receipts, self.letters, self.target):
            self.create(topic)

    def first_kept(self, topic: str) -> int:
        at = TopicPartition(topic, 0)
        asked = self.kafka.admin.list_offsets({at: OffsetSpec.earliest()})  # type: ignore[no-untyped-call]
        return int(asked[at].result().offset)

    def environment(self, **more: object) -> dict[str, str]:
        config = self.folder / "kafka.properties"
        settings = self.kafka.login() | {
            "session.timeout.ms": "1500",
            "heartbeat.interval.ms": "300",
        }
        config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        variables = {
            "kafka_bootstrap_servers": self.kafka.kafka.bootstrap_servers,
            "kafka_config": config,
            "redis_url": self.redis_url,
            "request_topics": f"{self.requests}:countdown",
            "dead_letter_topic": self.letters,
            "group_id": f"{self.prefix}blackbox",
            "engine": "process",
            "retries": 0,
        }
        return {f"BLACKBOX_{k.upper()}": str(v) for k, v in (variables | more).items()}

    def access(self) -> KafkaAccess:
        names = {
            name.removeprefix("BLACKBOX_").lower(): v for name, v in self.environment().items()
        }
        return kafka(load(**names))

    def start(self, **more: object) -> ServiceProcess:
        log = self.folder / f"service-{len(self.services)}.log"
        self.services.append(ForkedService(self.environment(**more), log))
        return self.services[-1]

    def run(self, *arguments: str) -> Answer:
        return blackbox(self.environment(), *arguments)

    def ask(self, countdown: float = 0, message: str = "x") -> None:
        asked = {"topic": self.target, "message": message, "countdown": countdown}
        self.kafka.send(self.requests, json.dumps(asked))

    def send_invalid(self) -> None:
        self.kafka.send(self.requests, "no request")

    def logged(self) -> str:
        """What the services log, and the details of their dead letters."""
        letters = self.kafka.read(self.letters)
        details = [dict(letter.headers() or [])["blackbox-detail"] for letter in letters]
        return "\n".join(
            [*(service.log.read_text() for service in self.services), *map(str, details)]
        )

    def until_delivered(self, count: int) -> None:
        until("they are delivered", lambda: len(self.kafka.read(self.target)) == count)

    def until_dead_letters(self, count: int) -> None:
        until("they are dead letters", lambda: len(self.kafka.read(self.letters)) == count)

    def close(self) -> None:
        for service in self.services:
            service.close()


@pytest.fixture
def deployment(
    guarded_kafka: GuardedKafka, stack: EmbeddedStack, tmp_path: Path
) -> Iterator[Deployment]:
    deployment = Deployment(guarded_kafka, stack.redis_url, tmp_path)
    yield deployment
    deployment.close()


def each(*commands: str) -> pytest.MarkDecorator:
    """Once for each permission of these commands, which is then missing."""
    return pytest.mark.parametrize("missing", kafka_rights(*commands), ids=str)


def without(missing: Right, *commands: str) -> list[Right]:
    return [right for right in kafka_rights(*commands) if right != missing]


def grants(right: Right) -> Callable[[str], object]:
    """Whether a text says to grant this permission."""
    what = rf"grant (\w+ and )?{right.operation}( and \w+)? on {right.resource} {right.name}"
    return re.compile(what.replace(".", r"\.")).search


def test_with_its_permissions_the_service_does_all_its_work(deployment: Deployment) -> None:
    deployment.create_all()
    deployment.allow(kafka_rights("run", "check"))
    service = deployment.start().wait_ready()
    deployment.ask()
    deployment.until_delivered(1)
    deployment.send_invalid()
    deployment.until_dead_letters(1)
    assert service.stop() == 0
    deployment.start().wait_ready()
    deployment.ask()
    deployment.until_delivered(2)
    assert "authorization" not in deployment.logged()


def leave_a_dead_letter(deployment: Deployment) -> None:
    deployment.start().wait_ready()
    deployment.send_invalid()
    deployment.until_dead_letters(1)
    deployment.services[-1].stop()


MEANWHILE = {"orders": Deployment.ask, "blackbox.dead-letters": Deployment.send_invalid}


@pytest.mark.proof
@each("run")
def test_without_one_of_its_permissions_the_service_names_it(
    deployment: Deployment, missing: Right
) -> None:
    deployment.create_all()
    deployment.allow(without(missing, "run"))
    deployment.start()
    if missing.name in MEANWHILE:
        MEANWHILE[missing.name](deployment)
    until(f"it says: {missing}", lambda: grants(deployment.own(missing))(deployment.logged()))


def forget(deployment: Deployment) -> None:
    """Delete the index, so that the last receipt is checked as after a crash."""
    with Redis.from_url(deployment.redis_url) as client:
        client.delete(*client.scan_iter(f"blackbox:{{{deployment.requests}-0}}:*"))


@pytest.mark.proof
@pytest.mark.parametrize("letters", [False, True])
def test_without_permission_to_read_targets_unchecked_requests_are_in_doubt(
    deployment: Deployment, letters: bool
) -> None:
    deployment.create_all()
    deployment.allow(kafka_rights("run"))
    deployment.start().wait_ready()
    (Deployment.send_invalid if letters else Deployment.ask)(deployment)
    (Deployment.until_dead_letters if letters else Deployment.until_delivered)(deployment, 1)
    deployment.services[-1].stop()
    forget(deployment)
    [taken] = [
        right
        for right in kafka_rights("run")
        if right.operation == "Read"
        and deployment.own(right).name == (deployment.letters if letters else deployment.target)
    ]
    deployment.allow(without(taken, "run"))
    service = deployment.start().wait_ready()
    until("it reports it", lambda: grants(deployment.own(taken))(service.log.read_text()))
    until("it is doubtful", lambda: service.metric("blackbox_in_doubt") == 1)

    deployment.allow(kafka_rights("run"))
    until("it is no longer doubtful", lambda: service.metric("blackbox_in_doubt") == 0)
    service.stop()
    assert len(deployment.kafka.read(deployment.letters if letters else deployment.target)) == 1


@pytest.mark.proof
def test_a_message_without_permission_to_write_does_not_delay_others(
    deployment: Deployment,
) -> None:
    deployment.create_all()
    refused = f"{deployment.prefix}seen"
    deployment.create(refused)
    seen = Right("", "topic", "seen", "literal", "Describe", "")
    deployment.allow([*kafka_rights("run"), seen])
    for topic in (refused, deployment.target) * 3:
        deployment.kafka.send(
            deployment.requests, json.dumps({"topic": topic, "message": "x", "countdown": 0})
        )
    deployment.start()
    deployment.until_delivered(3)
    deployment.until_dead_letters(3)
    assert grants(Right("", "topic", refused, "literal", "Write", ""))(deployment.logged())


CREATES = "run to create its topics"


@pytest.mark.proof
def test_a_service_may_be_allowed_to_create_its_topics(deployment: Deployment) -> None:
    deployment.create(deployment.target)
    deployment.allow(kafka_rights("run", CREATES))
    deployment.start().wait_ready()
    deployment.ask()
    deployment.until_delivered(1)


@pytest.mark.proof
@each(CREATES)
def test_without_permission_to_create_a_topic_the_service_names_it(
    deployment: Deployment, missing: Right
) -> None:
    deployment.create(deployment.target)
    deployment.allow(without(missing, "run", CREATES))
    deployment.start()
    log = deployment.services[0].log
    until(f"it says: {missing}", lambda: grants(deployment.own(missing))(log.read_text()))


@pytest.mark.proof
@pytest.mark.parametrize("is_allowed", [True, False])
def test_refused_messages_are_found_with_and_without_describe_configs(
    deployment: Deployment, is_allowed: bool
) -> None:
    deployment.create_all()
    compacted = NewTopic(deployment.prefix + "compacted", 1, config={"cleanup.policy": "compact"})
    deployment.kafka.admin.create_topics([compacted])[compacted.topic].result()
    rights = kafka_rights("run", *([KNOWS] if is_allowed else []))
    there = [right._replace(name="compacted") for right in rights if right.name == "orders"]
    deployment.allow([*rights, *there])
    deployment.kafka.send(
        deployment.requests, json.dumps({"topic": compacted.topic, "message": "x", "countdown": 0})
    )
    deployment.ask()
    deployment.start().wait_ready()
    deployment.until_dead_letters(1)
    deployment.until_delivered(1)
    [letter] = deployment.kafka.read(deployment.letters)
    assert dict(letter.headers() or [])["blackbox-reason"] == b"refused"
    assert ("recovering" in deployment.logged()) is not is_allowed


@pytest.mark.proof
@pytest.mark.parametrize("is_allowed", [True, False])
def test_receipts_get_partitions_only_with_the_permission_to_alter_them(
    deployment: Deployment, is_allowed: bool
) -> None:
    [right] = kafka_rights("run when TB grows")
    deployment.create_all()
    deployment.kafka.admin.delete_topics([deployment.requests])[deployment.requests].result()
    until(
        "it is gone", lambda: deployment.requests not in deployment.kafka.admin.list_topics().topics
    )
    deployment.create(deployment.requests, 2)
    deployment.allow([*kafka_rights("run"), *([right] if is_allowed else [])])
    service = deployment.start()
    if is_allowed:
        service.wait_ready()
        assert Topics(deployment.kafka.admin).partitions([deployment.receipts]) == {
            deployment.receipts: 2
        }
    else:
        until("it reports it", lambda: grants(deployment.own(right))(deployment.logged()))


WRITES = "API and cancel and reschedule"
LOOKS_AT_SHARDS: dict[str, list[tuple[str, ...]]] = {
    "pending": [("pending",)],
    "pause and resume": [("pause", "orders"), ("resume", "orders")],
}
REASONS = "get with reasons"
KNOWS = "run that knows its targets"
COLD = "run with a cold tier"


@pytest.mark.proof
def test_with_its_permissions_the_cold_tier_delivers(deployment: Deployment) -> None:
    deployment.create_all()
    deployment.allow(kafka_rights("run", COLD))
    deployment.start(hot_horizon_s=1).wait_ready()
    deployment.ask(2.5)
    deployment.until_delivered(1)


@pytest.mark.proof
@each(COLD)
def test_without_one_of_its_permissions_the_cold_tier_names_it(
    deployment: Deployment, missing: Right
) -> None:
    deployment.create_all()
    deployment.allow(without(missing, "run", COLD))
    deployment.start(hot_horizon_s=1).wait_ready()
    deployment.ask(2.5)
    until(f"it says: {missing}", lambda: grants(deployment.own(missing))(deployment.logged()))


@pytest.mark.proof
def test_the_cold_tier_delivers_without_permission_to_read_the_retention(
    deployment: Deployment,
) -> None:
    deployment.create_all()
    [config] = [right for right in kafka_rights(COLD) if right.operation == "DescribeConfigs"]
    deployment.allow(without(config, "run", COLD))
    service = deployment.start(hot_horizon_s=1).wait_ready()
    for _ in range(3):
        deployment.ask(2.5)
    deployment.until_delivered(3)
    assert service.log.read_text().count("cannot read its retention") == 1


TRIMS = "run that trims"


def start_trimming(deployment: Deployment) -> ServiceProcess:
    """A service that trims every second."""
    for topic in (deployment.letters, deployment.target):
        deployment.create(topic)
    for topic in (deployment.requests, deployment.receipts):
        deployment.create(topic, retention_ms="-1")
    return deployment.start(retention_s=1, trim_interval_s=1).wait_ready()


@pytest.mark.proof
def test_with_its_permissions_the_service_trims_both_journals(deployment: Deployment) -> None:
    deployment.allow(kafka_rights("run", TRIMS))
    start_trimming(deployment)

    def are_trimmed() -> bool:
        deployment.ask()
        return (
            deployment.first_kept(deployment.requests) > 0
            and deployment.first_kept(deployment.receipts) > 0
        )

    until("both are trimmed", are_trimmed, every_s=0.5)


@pytest.mark.proof
@each(TRIMS)
def test_without_a_permission_to_trim_the_service_names_it_and_delivers(
    deployment: Deployment, missing: Right
) -> None:
    deployment.allow(without(missing, "run", TRIMS))
    service = start_trimming(deployment)

    def names_it() -> object:
        deployment.ask()
        return grants(deployment.own(missing))(service.log.read_text())

    until(f"it says: {missing}", names_it, every_s=0.5)
    assert deployment.first_kept(deployment.own(missing).name) == 0
    until("it delivers", lambda: deployment.kafka.read(deployment.target))


SCHEDULES = "run with schedules"


def start_schedules(deployment: Deployment) -> None:
    deployment.create_all()
    deployment.create(deployment.prefix + "history")
    deployment.start(
        request_topics=f"{deployment.requests}:scheduler",
        history_topic=deployment.prefix + "history",
    )
    terms = {"scheduler-epoch": "1", "scheduler-target-topic": deployment.target}
    deployment.kafka.send(deployment.requests, "x", key="s-1", headers=list(terms.items()))


@pytest.mark.proof
def test_with_their_permissions_schedules_are_delivered_and_ended(deployment: Deployment) -> None:
    deployment.allow(kafka_rights("run", SCHEDULES))
    start_schedules(deployment)
    deployment.until_delivered(1)
    assert len(deployment.kafka.read(deployment.prefix + "history")) == 1
    assert [record.value() for record in deployment.kafka.read(deployment.requests)] == [b"x", None]


@pytest.mark.proof
@each(SCHEDULES)
def test_without_one_of_the_permissions_for_schedules_the_service_names_it(
    deployment: Deployment, missing: Right
) -> None:
    deployment.allow(without(missing, "run", SCHEDULES))
    start_schedules(deployment)
    until(f"it says: {missing}", lambda: grants(deployment.own(missing))(deployment.logged()))
    assert deployment.kafka.read(deployment.target) == []


OSCILLATOR = "run with an oscillator"
OSCILLATOR_CREATES = "run with an oscillator to create its topic"


@pytest.mark.proof
def test_with_its_permissions_the_oscillator_writes(deployment: Deployment) -> None:
    deployment.create_all()
    deployment.allow(kafka_rights("run", OSCILLATOR, OSCILLATOR_CREATES))
    deployment.start(oscillator_topic=deployment.prefix + "oscillator").wait_ready()
    until("it writes", lambda: len(deployment.kafka.read(deployment.prefix + "oscillator")) > 1)


@pytest.mark.proof
@each(OSCILLATOR, OSCILLATOR_CREATES)
def test_without_one_of_its_permissions_the_oscillator_names_it(
    deployment: Deployment, missing: Right
) -> None:
    deployment.create_all()
    if missing.command == OSCILLATOR:
        deployment.create(deployment.prefix + "oscillator")
        deployment.kafka.send(deployment.prefix + "oscillator", "1", key="1")
    deployment.allow(without(missing, "run", OSCILLATOR, OSCILLATOR_CREATES))
    deployment.start(oscillator_topic=deployment.prefix + "oscillator")
    until(f"it says: {missing}", lambda: grants(deployment.own(missing))(deployment.logged()))


@pytest.mark.proof
def test_an_oscillator_without_permission_to_write_lags(deployment: Deployment) -> None:
    deployment.create_all()
    deployment.create(deployment.prefix + "oscillator")
    rights = kafka_rights("run", OSCILLATOR)
    deployment.allow(
        right for right in rights if (right.name, right.operation) != ("oscillator", "Write")
    )
    service = deployment.start(oscillator_topic=deployment.prefix + "oscillator").wait_ready()
    until("it lags", lambda: service.metric("blackbox_oscillator_lag_seconds") > 2)


RECURRING = "run with recurring requests"


@pytest.mark.proof
@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_recurring_request_needs_the_permission_to_write_requests(
    deployment: Deployment, is_allowed: bool
) -> None:
    [right] = kafka_rights(RECURRING)
    deployment.create_all()
    deployment.allow([*kafka_rights("run"), *([right] if is_allowed else [])])
    deployment.start()
    asked = {"topic": deployment.target, "message": "x", "id": "r", "every": 1}
    deployment.kafka.send(deployment.requests, json.dumps(asked))
    deployment.ask(message="others")
    if is_allowed:
        until("it recurs", lambda: len(deployment.kafka.read(deployment.target)) >= 3)
    else:
        until("it reports it", lambda: grants(deployment.own(right))(deployment.logged()))
        deployment.until_delivered(1)


@pytest.mark.proof
def test_with_its_permissions_each_command_does_its_work(deployment: Deployment) -> None:
    deployment.create_all()
    deployment.allow(kafka_rights("run"))
    deployment.start().wait_ready()
    deployment.ask()
    deployment.until_delivered(1)
    deployment.allow(kafka_rights("run", "check"))
    assert "not checked" not in deployment.run("check").out
    deployment.allow(kafka_rights("send"))
    sent = deployment.run("send", "--topic", "no.such", "--message", "x", "--countdown", "0")
    assert sent.code == 0, sent
    deployment.allow(kafka_rights("run"))
    deployment.until_dead_letters(1)
    deployment.allow(kafka_rights("status"))
    assert deployment.run("status").code == 0
    deployment.allow(kafka_rights("show"))
    shown = deployment.run("show", "--json", sent.out.strip())
    assert (shown.code, shown.json["reason"]) == (0, "not-authorized"), shown
    deployment.allow(kafka_rights("show", "letters"))
    place = deployment.run("letters", "--json").json["place"]
    assert deployment.run("letters", "--replay", str(place)).code == 0
    deployment.allow(kafka_rights("send"))
    pending = deployment.run("send", "--topic", "no.such", "--message", "x", "--countdown", "60")
    deployment.allow(kafka_rights("show", WRITES))
    assert deployment.run("cancel", "--json", pending.out.strip()).json["outcome"] == "asked"
    moved = deployment.run("reschedule", "--json", pending.out.strip(), "--countdown", "90")
    assert moved.json["outcome"] == "asked"
    for command, lines in LOOKS_AT_SHARDS.items():
        deployment.allow(kafka_rights(command))
        assert [deployment.run(*line).code for line in lines] == [0] * len(lines)
    deployment.allow(kafka_rights("load"))
    load_a_piece(deployment)
    for command, does in READ_BY_SPARK.items():
        deployment.allow(kafka_rights(command, *ON_TOP_OF.get(command, ())))
        does(deployment)


@each("check")
def test_check_names_its_missing_permissions(deployment: Deployment, missing: Right) -> None:
    deployment.create_all()
    deployment.allow(without(missing, "run", "check"))
    assert grants(deployment.own(missing))(deployment.run("check", "--json").out)


def test_check_finds_that_promotion_and_dead_letters_are_not_permitted(
    deployment: Deployment,
) -> None:
    deployment.create_all()
    deployment.allow(kafka_rights("run", "check", COLD))
    assert deployment.run("check").out.count("no permission to write") == 0

    letters = ("blackbox.dead-letters", "Write")
    [missing] = [one for one in kafka_rights("run") if (one.name, one.operation) == letters]
    deployment.allow(without(missing, "run", "check"))
    found = [one["text"] for one in json.loads(deployment.run("check", "--json").out)]

    for topic in (deployment.requests, deployment.letters):
        assert any(text.startswith(f"{topic}: this user has no permission") for text in found)


@each("rebind")
def test_rebind_names_its_missing_permissions(deployment: Deployment, missing: Right) -> None:
    deployment.create_all()
    write_receipt(deployment, Receipt(at_ms=1, barrier=True))
    deployment.allow(without(missing, "rebind"))
    answer = deployment.run("rebind", deployment.requests, "--pending", "drop")
    assert answer.code == 1
    assert grants(deployment.own(missing))(answer.errors[0]), answer


def leave_pending(deployment: Deployment, pending: Entry | None = None) -> None:
    """A request in an index of another topic."""
    connections = pool(deployment.redis_url)
    index = ShardIndex(Shard(deployment.requests, 0), connections, grace_s=3600)
    index.load()
    index.begin(Positions(0, 0), binding=Binding("c", "another", "another", "g"))
    store(index, 0, 1, {0: pending or entry()})
    index.close()
    connections.disconnect()


DECIDES = "rebind that decides"
CREATED_AGAIN = "rebind of a topic that was created again"
DELIVERS = "rebind that delivers"


def leave_receipts_of_another_group(deployment: Deployment) -> None:
    deployment.create_all()
    for receipt in (
        Receipt(at_ms=1, barrier=True, group="another"),
        Receipt(
            2, {f"{deployment.target}/0": [(0, 0)]}, letters={f"{deployment.letters}/0": [(1, 0)]}
        ),
    ):
        write_receipt(deployment, receipt)


def write_receipt(deployment: Deployment, receipt: Receipt) -> None:
    deployment.kafka.send(deployment.receipts, encode(receipt), key=f"{deployment.requests}-0")


def test_with_its_permissions_rebind_decides_between_groups(deployment: Deployment) -> None:
    leave_receipts_of_another_group(deployment)
    deployment.allow(kafka_rights("rebind", DECIDES))
    answer = deployment.run("rebind", deployment.requests, "--pending", "deliver")
    assert "another group" in answer.out, answer


@pytest.mark.parametrize(
    "missing", [r for r in kafka_rights(DECIDES) if r.operation == "Write"], ids=str
)
def test_rebind_names_missing_permissions_to_decide_between_groups(
    deployment: Deployment, missing: Right
) -> None:
    leave_receipts_of_another_group(deployment)
    deployment.allow(without(missing, "rebind", DECIDES))
    answer = deployment.run("rebind", deployment.requests, "--pending", "deliver")
    assert answer.code == 1
    assert grants(deployment.own(missing))(answer.errors[0]), answer


@pytest.mark.proof
def test_with_its_permissions_rebind_writes_pending_requests_again(deployment: Deployment) -> None:
    deployment.create_all()
    leave_pending(deployment)
    deployment.allow(kafka_rights("rebind", DECIDES, CREATED_AGAIN, DELIVERS))
    answer = deployment.run("rebind", deployment.requests, "--pending", "deliver")
    assert "1 written again" in answer.out, answer
    assert len(deployment.kafka.read(deployment.requests)) == 1


@pytest.mark.proof
@pytest.mark.parametrize("missing", [r for r in kafka_rights(DELIVERS) if r.name == "TB"], ids=str)
def test_rebind_names_missing_permissions_to_write_requests_again(
    deployment: Deployment, missing: Right
) -> None:
    deployment.create_all()
    deployment.ask(60)
    leave_pending(deployment)
    deployment.allow(without(missing, "rebind", DECIDES, CREATED_AGAIN, DELIVERS))
    answer = deployment.run("rebind", deployment.requests, "--pending", "deliver")
    assert answer.code == 1
    assert grants(deployment.own(missing))(answer.errors[0]), answer


@pytest.mark.parametrize("is_allowed", [True, False])
def test_rebind_needs_permission_to_write_dead_letters(
    deployment: Deployment, is_allowed: bool
) -> None:
    [right] = [right for right in kafka_rights(DELIVERS) if right.name != "TB"]
    deployment.create_all()
    unknown = entry()._replace(reason=Reason.OUTCOME_UNKNOWN)
    leave_pending(deployment, pending=unknown)
    rights = kafka_rights("rebind", DECIDES, CREATED_AGAIN, DELIVERS)
    deployment.allow([one for one in rights if is_allowed or one != right])
    answer = deployment.run("rebind", deployment.requests, "--pending", "deliver")
    if is_allowed:
        assert "1 became dead letters" in answer.out, answer
        assert len(deployment.kafka.read(deployment.letters)) == 1
    else:
        assert answer.code == 1
        assert grants(deployment.own(right))(answer.errors[0]), answer


@pytest.mark.parametrize("missing", kafka_rights(DECIDES, CREATED_AGAIN), ids=str)
def test_rebind_names_missing_permissions_for_a_recreated_topic(
    deployment: Deployment, missing: Right
) -> None:
    deployment.create_all()
    write_receipt(deployment, Receipt(at_ms=1, barrier=True, topic_id="another"))
    leave_pending(deployment)
    deployment.allow(without(missing, "rebind", DECIDES, CREATED_AGAIN))
    answer = deployment.run("rebind", deployment.requests, "--pending", "drop")
    if missing.operation == "Write":
        assert answer.code == 1
        assert grants(deployment.own(missing))(answer.errors[0]), answer
    else:
        assert "another topic; 0 written again, 1 dropped" in answer.out, answer
        assert (
            len(deployment.kafka.read(deployment.receipts)) == 3
        )  # the receipts end with both of the former topic


@each("send")
def test_send_names_its_missing_permissions(deployment: Deployment, missing: Right) -> None:
    deployment.create_all()
    deployment.allow([])
    answer = deployment.run("send", "--topic", "orders", "--message", "x", "--countdown", "0")
    assert answer.code == 1
    assert grants(deployment.own(missing))(answer.errors[0])


def test_only_the_user_of_a_service_can_write_receipts(deployment: Deployment) -> None:
    def try_to_write() -> list[KafkaError | None]:
        errors: list[KafkaError | None] = []
        producer = Producer(deployment.kafka.client())
        producer.produce(
            deployment.receipts,
            encode(Receipt(1)),
            on_delivery=lambda error, _: errors.append(error),
        )
        assert producer.flush(20) == 0
        return errors

    deployment.create_all()
    others = [right for right in kafka_rights() if right.command not in WRITERS_OF_RECEIPTS]

    deployment.allow(others)
    [refused] = try_to_write()

    assert refused is not None
    assert refused.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    deployment.allow(kafka_rights("run"))
    assert try_to_write() == [None]


def client_of(deployment: Deployment) -> Client:
    settings = deployment.kafka.login() | {"group.id": f"{deployment.prefix}blackbox-client"}
    servers = deployment.kafka.kafka.bootstrap_servers
    return Client(servers, request_topic=deployment.requests, kafka_settings=settings)


@pytest.mark.proof
@pytest.mark.parametrize(("more", "reason"), [((), None), ((REASONS,), "not-authorized")])
def test_with_its_permissions_a_client_looks_up_a_request(
    deployment: Deployment, more: tuple[str, ...], reason: str | None
) -> None:
    deployment.create_all()
    deployment.allow(kafka_rights("run"))
    deployment.start().wait_ready()
    asked = {"topic": "no.such", "message": "x", "countdown": 0}
    deployment.kafka.send(deployment.requests, json.dumps(asked))
    deployment.until_dead_letters(1)
    deployment.allow(kafka_rights("get", *more))
    with client_of(deployment) as client:
        told = client.get(request_id(Shard(deployment.requests, 0), 0))
    assert (told.state, told.reason) == ("dead", reason)
    assert str(told.dead_letter) == f"{deployment.letters}/0@0"


@each("get")
def test_a_client_names_its_missing_permissions(deployment: Deployment, missing: Right) -> None:
    deployment.create_all()
    deployment.ask()
    deployment.allow(without(missing, "get"))
    with client_of(deployment) as client, pytest.raises(LookupFailed) as refused:
        client.get(request_id(Shard(deployment.requests, 0), 0))
    assert grants(deployment.own(missing))(str(refused.value))


@pytest.mark.proof
@each("status", "show")
def test_show_and_status_name_their_missing_permissions(
    deployment: Deployment, missing: Right
) -> None:
    deployment.create_all()
    deployment.allow(kafka_rights("run"))
    leave_a_dead_letter(deployment)
    deployment.allow(without(missing, missing.command))
    arguments = ("show", f"{deployment.requests}/0@0") if missing.command == "show" else ("status",)
    answer = deployment.run(*arguments)
    assert answer.code == 1
    assert grants(deployment.own(missing))(answer.errors[0])


@each(*LOOKS_AT_SHARDS)
def test_commands_name_missing_permissions_to_describe_shards(
    deployment: Deployment, missing: Right
) -> None:
    deployment.create_all()
    deployment.allow(without(missing, missing.command))
    told = grants(deployment.own(missing._replace(operation="Read")))  # which includes Describe
    for line in LOOKS_AT_SHARDS[missing.command]:
        answer = deployment.run(*line)
        assert answer.code == 1
        assert told(answer.errors[0])


def load_a_piece(deployment: Deployment) -> None:
    """The work of the tasks of `blackbox load`."""
    access = deployment.access()
    name = piece_name(access, "0123abcd", 0)
    PieceProgressReader(access, deployment.requests).of([name])
    writer = PieceWriter(access, deployment.requests, name, 1)
    try:
        assert writer.open() == 0
        writer.send([(None, b"{}", [])], 1)
    finally:
        writer.close()
    assert (
        PieceProgressReader(access, deployment.requests)
        .of([name], wait_for_commits=True)[name]
        .rows
        == 1
    )


@each("load")
def test_load_names_its_missing_permissions(deployment: Deployment, missing: Right) -> None:
    deployment.create_all()
    deployment.allow(without(missing, "load"))
    with pytest.raises(RecoveryRequired, match="grant") as refused:
        load_a_piece(deployment)
    assert grants(deployment.own(missing))(str(refused.value))


def read_journals(deployment: Deployment) -> None:
    for topic in (deployment.requests, deployment.receipts):
        read_topic(deployment, topic)


def read_topic(deployment: Deployment, topic: str) -> None:
    access = deployment.access()
    assert Topics(access.admin()).partitions([topic], to="Read") == {topic: 1}
    for _ in read_ranges(access, [Range(topic, 0, 0, 1)]):
        pass


ON_TOP_OF = {"audit --targets": ("audit",)}
READ_BY_SPARK: dict[str, Callable[[Deployment], None]] = {
    "ledger": read_journals,
    "audit": read_journals,
    "audit --targets": lambda deployment: read_topic(deployment, deployment.target),
}


@each(*READ_BY_SPARK)
def test_jobs_name_their_missing_permissions(deployment: Deployment, missing: Right) -> None:
    deployment.create_all()
    deployment.allow(without(missing, missing.command, *ON_TOP_OF.get(missing.command, ())))
    for topic in (deployment.requests, deployment.receipts, deployment.target):
        deployment.kafka.send(topic, "x")
    with pytest.raises(RecoveryRequired, match="grant") as refused:
        READ_BY_SPARK[missing.command](deployment)
    assert grants(deployment.own(missing))(str(refused.value))


KNOWS_COMPACTED = "audit that knows its targets"


@pytest.mark.parametrize("is_allowed", [True, False])
def test_only_with_the_permission_the_audit_knows_that_a_target_is_compacted(
    deployment: Deployment, is_allowed: bool
) -> None:
    deployment.create(deployment.target, cleanup_policy="compact")
    deployment.allow(kafka_rights("audit --targets", *([KNOWS_COMPACTED] if is_allowed else [])))
    [found] = Topics(deployment.access().admin()).describe([deployment.target]).values()
    policy = found.settings.cleanup_policy if isinstance(found.settings, TopicSettings) else None
    assert (found.partitions, policy) == (1, "compact" if is_allowed else None)


def test_the_tests_know_each_command_of_the_list() -> None:
    known = {
        "get", REASONS, "run", CREATES, "run when TB grows", KNOWS, COLD, "check", "send", "status", "show", "load",
        TRIMS, "rebind", DECIDES, CREATED_AGAIN, DELIVERS, OSCILLATOR, OSCILLATOR_CREATES, SCHEDULES, "run with schedules to create its topics", RECURRING, WRITES, "letters", KNOWS_COMPACTED, *LOOKS_AT_SHARDS,
    }  # fmt: skip
    assert {right.command for right in kafka_rights()} == known | READ_BY_SPARK.keys()
