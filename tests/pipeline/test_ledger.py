"""The ledger compared with the journals, on a real broker: equal, exactly once, or a clear error."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner, Result

from blackbox.cli import app
from blackbox.config.settings import load
from blackbox.config.wiring import kafka
from blackbox.embedded import EmbeddedStack
from blackbox.jobs.ledger import manifest as manifests
from blackbox.jobs.ledger.extend import Done, extend
from blackbox.jobs.ledger.files import Files
from blackbox.jobs.ledger.ledger import Ledger
from blackbox.jobs.ledger.manifest import newest
from blackbox.jobs.ledger.mismatches import ids_in_kafka
from blackbox.jobs.ledger.upkeep import UpkeepLimits
from blackbox.records.receipt import Mark, Receipt, encode
from blackbox.records.request import Shard
from blackbox.spark.job_failures import LedgerError
from blackbox.spark.journals import JournalKey, JournalTables, Span, of_table
from blackbox.support import logs
from tests.servers.spark_cluster import kill_tree
from tests.support.raw_record import write_with_header
from tests.support.world import World, read_all, until

pytestmark = pytest.mark.service

KILLS = int(os.environ.get("BLACKBOX_TEST_LEDGER_KILLS", "1"))
NOON_MS = 1_767_268_800_000
"""2026-01-01T12:00Z."""
DAY_MS = 86_400_000
FOR_EVER = {"retention.ms": "-1"}
AT_ONCE = UpkeepLimits(step=1_000_000)


class Books:
    """A request topic whose records have timestamps that the test chooses."""

    def __init__(self, world: World, spark: SparkSession, name: str = "books") -> None:
        self.spark = spark
        self.servers = world.kafka.bootstrap_servers
        self.topic = f"{world.name}.{name}"
        self.receipts_topic = f"{self.topic}.receipts"
        self.environment = world.environment(request_topics=f"{self.topic}:countdown")
        self.settings = load(
            kafka_bootstrap_servers=self.servers,
            request_topics=f"{self.topic}:countdown",
            dead_letter_topic=world.dead_letters,
            group_id=world.name,
        )
        self.access = kafka(self.settings, logs.NO_CLIENT_LOG)
        self._admin = AdminClient({"bootstrap.servers": self.servers})
        self._producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "linger.ms": 1,
                "enable.idempotence": True,
                "max.in.flight": 1,
            }
        )

    def create(self, partitions: int = 2) -> Books:
        new = [
            NewTopic(name, partitions, config=FOR_EVER)
            for name in (self.topic, self.receipts_topic)
        ]
        for future in self._admin.create_topics(new).values():
            future.result(30)
        self._wait_for(partitions)
        return self

    def delete(self) -> None:
        for future in self._admin.delete_topics([self.topic, self.receipts_topic]).values():
            future.result(30)

        def are_gone() -> bool:
            known = self._admin.list_topics(timeout=10).topics
            return self.topic not in known and self.receipts_topic not in known

        until("the topics are deleted", are_gone)

    def add_partition(self, count: int) -> None:
        wanted = [NewPartitions(name, count) for name in (self.topic, self.receipts_topic)]
        for future in self._admin.create_partitions(wanted).values():
            future.result(30)
        self._wait_for(count)

    def _wait_for(self, partitions: int) -> None:
        for name in (self.topic, self.receipts_topic):

            def are_there(name: str = name) -> bool:
                known = self._producer.list_topics(name, timeout=10).topics[name]
                return len(known.partitions) == partitions

            until("the broker reports the partitions", are_there)

    def cut(self, topic: str, partition: int, offset: int) -> None:
        """Remove everything below `offset`, as retention does."""
        deleted = self._admin.delete_records([TopicPartition(topic, partition, offset)])
        for future in deleted.values():
            future.result(30)

    def ask(self, count: int, partition: int = 0, at_ms: int = NOON_MS) -> None:
        """Write requests, a second apart."""
        for number in range(count):
            self.write(body(f"m{number}"), partition, at_ms + number * 1000)
        self.flush()

    def write(self, value: bytes | None, partition: int = 0, at_ms: int = NOON_MS) -> None:
        headers: list[tuple[str, str | bytes | None]] = [("CALLER_SERVICE", b"tests"), ("n", None)]
        self._producer.produce(
            self.topic, value, b"\x00k", partition, timestamp=at_ms, headers=headers
        )

    def write_receipt(self, receipt: Receipt, partition: int = 0) -> None:
        key = str(Shard(self.topic, partition))
        self._producer.produce(self.receipts_topic, encode(receipt), key, partition)
        self.flush()

    def in_transaction(self, count: int, partition: int = 0, *, is_committed: bool) -> None:
        """Write requests in a transaction; a marker, which is not a record, follows them."""
        producer = self.access.producer(f"{self.topic}.{os.urandom(4).hex()}")
        producer.init_transactions(30)
        producer.begin_transaction()
        for number in range(count):
            producer.produce(self.topic, body(f"t{number}"), partition=partition, timestamp=NOON_MS)
        producer.flush(30)
        if is_committed:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)

    def flush(self) -> None:
        assert self._producer.flush(30) == 0

    def extend(self, path: Path | str, limits: UpkeepLimits = AT_ONCE, **more: Any) -> Done:
        return extend(self.spark, self.settings, self.access, str(path), limits=limits, **more)

    def open(self, path: Path | str) -> Ledger:
        return Ledger.open(self.spark, str(path))

    def requests_in_kafka(self) -> list[tuple[Any, ...]]:
        """(partition, offset, timestamp, key, value, headers), read without code of the product."""
        return sorted(
            (m.partition(), m.offset(), m.timestamp()[1], m.key(), m.value(), headers_of(m))
            for m in read_all(self.servers, self.topic)
        )

    def outcomes_in_kafka(self) -> list[tuple[Any, ...]]:
        """(partition, receipt, outcome, offset, to partition, to offset) as the receipts' JSON says."""
        found: list[tuple[Any, ...]] = []
        for message in read_all(self.servers, self.receipts_topic):
            told = json.loads(message.value() or b"")
            at = (message.partition(), message.offset())
            for place, pairs in told.get("delivered", {}).items():
                found += [(*at, "delivered", o, int(place.split("/")[1]), to) for o, to in pairs]
            letters = {
                offset: (int(place.split("/")[1]), to)
                for place, pairs in told.get("letters", {}).items()
                for offset, to in pairs
            }
            for word in ("dead", "expired", "invalid"):
                found += [(*at, word, o, *letters.get(o, (-1, -1))) for o in told.get(word, [])]
            found += [(*at, "void", offset, -1, -1) for offset in told.get("void", [])]
            for word in ("ignored", "cut"):
                found += [(*at, word, offset, -1, -1) for offset in told.get(word, [])]
            if unknown_ms := told.get("unknown_ms"):
                found.append((*at, "unknown", told.get("read", 0), -1, unknown_ms))
            for word in {"gone", "mark"} & told.keys():
                found.append((*at, word, told[word][0], -1, told[word][1]))
        return sorted(found)

    def assert_equal(self, path: Path | str) -> None:
        """The ledger equals the topics, row by row."""
        with ThreadPoolExecutor(2) as readers:
            asked = readers.submit(self.requests_in_kafka)
            told = readers.submit(self.outcomes_in_kafka)
            ledger = self.open(path)
            assert requests_in(ledger.requests()) == asked.result()
            assert outcomes_in(ledger.outcomes()) == told.result()


def headers_of(message: Message) -> list[Any]:
    asked: Any = message.headers
    try:
        return [(name, value) for name, value in asked() or []]
    except (UnicodeDecodeError, SystemError):
        return []  # a name that is not text: the ledger says so in `detail`


def requests_in(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(
        (
            row["partition"], row["offset"], row["timestamp_ms"], bytes_of(row["key"]),
            bytes_of(row["value"]), [(h["key"], bytes_of(h["value"])) for h in row["headers"]],
        )
        for row in frame.collect()
    )  # fmt: skip


def outcomes_in(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(
        (
            row["partition"], row["receipt"], row["outcome"], row["offset"],
            -1 if row["to_partition"] is None else row["to_partition"],
            -1 if row["to_offset"] is None else row["to_offset"],
        )
        for row in frame.collect()
    )  # fmt: skip


def bytes_of(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


def body(message: str) -> bytes:
    return json.dumps({"topic": "orders", "message": message, "countdown": 60}).encode()


def data_files(path: Path) -> set[Path]:
    return set(path.glob("[ro]*/**/*.parquet"))


def copied(ledger: Path, to: Path) -> Path:
    shutil.copytree(ledger, to)
    return to


@pytest.fixture
def books(world: World, spark: SparkSession) -> Books:
    return Books(world, spark).create()


@pytest.fixture(scope="module")
def shelf(
    stack: EmbeddedStack, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Books, Path]]:
    """A ledger of three days that is made once; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("shelf")
    with World(stack.kafka, stack.redis, folder) as world:
        books = Books(world, spark).create()
        for day in range(3):
            books.ask(4, at_ms=NOON_MS + day * DAY_MS)
        books.write_receipt(Receipt(NOON_MS, delivered={"orders/1": [(0, 10), (1, 11)]}))
        books.extend(folder / "ledger")
        yield books, folder / "ledger"


@pytest.fixture
def damaged(shelf: tuple[Books, Path], tmp_path: Path) -> tuple[Books, Path]:
    """A copy of a sound ledger, to be damaged."""
    books, ledger = shelf
    return books, copied(ledger, tmp_path / "ledger")


@pytest.mark.proof
def test_a_ledger_contains_both_journals_and_later_runs_add_only_new_rows(
    books: Books, tmp_path: Path
) -> None:
    path = tmp_path / "a ledger [1]"
    books.in_transaction(3, is_committed=False)
    books.in_transaction(2, is_committed=True)
    books.ask(12)
    for value in (None, b"", b"no request", b'{"cancel": true, "id": "a"}'):
        books.write(value, partition=1)
    books.write(body("long ago"), at_ms=1)
    books.flush()
    write_with_header(books.servers, books.topic, b"\xff\xfe", b"odd")
    books.in_transaction(2, is_committed=False)
    first = Receipt(NOON_MS, delivered={"orders/1": [(4, 7)], "bills/0": [(5, 0)]}, dead=[7])
    books.write_receipt(replace(first, letters={"dead/0": [(7, 3)]}))
    books.write_receipt(
        Receipt(
            NOON_MS + DAY_MS,
            void=[5],
            barrier=True,
            gone=(8, 10),
            ignored=[8],
            cut=[9],
            mark=Mark(4, 1),
        )
    )
    books.write_receipt(Receipt(NOON_MS, expired=[1], invalid=[2]), partition=1)

    done = books.extend(path, UpkeepLimits(step=16))

    assert done.steps > 1
    assert {name: one.rows_added for name, one in done.tables.items()} == {
        "requests": len(books.requests_in_kafka()),
        "outcomes": 10,
    }
    books.assert_equal(path)
    assert {file.day for file in done.manifest.of("requests")} >= {"1970-01-01", "2026-01-01"}
    assert {file.day for file in done.manifest.of("outcomes")} == {"2026-01-01", "2026-01-02"}
    before = data_files(path)

    again = books.extend(path)

    assert (again.steps, again.manifest.number) == (0, done.manifest.number)
    assert data_files(path) == before

    books.add_partition(3)
    books.ask(2)
    books.ask(3, partition=2)
    books.write_receipt(Receipt(NOON_MS, delivered={"orders/0": [(0, 0)]}), partition=2)

    third = books.extend(path)

    assert (third.tables["requests"].rows_added, third.tables["outcomes"].rows_added) == (5, 1)
    assert before < data_files(path)
    books.assert_equal(path)
    kept = books.open(path)
    assert kept.reach[JournalKey("requests", Shard(books.topic, 2))] == Span(0, 3)
    verdict = Ledger.verify(books.spark, str(path))
    assert (verdict.problems, verdict.leftovers) == ([], 0)
    assert verdict.rows == sum(one.rows for one in third.tables.values())


def test_an_empty_journal_makes_a_ledger_without_files(books: Books, tmp_path: Path) -> None:
    done = books.extend(tmp_path / "ledger")

    assert (done.manifest.number, done.manifest.files) == (1, ())
    ledger = books.open(tmp_path / "ledger")
    assert ledger.requests().collect() == ledger.outcomes().collect() == []
    outcomes = of_table(ledger.reach, "outcomes")
    assert outcomes == {Shard(books.topic, p): Span(0, 0) for p in range(2)}


def test_the_ledger_with_kafka_covers_records_that_kafka_removed(
    books: Books, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    books.ask(6)
    delivered = {"orders/0": [(0, 0)]}
    books.write_receipt(Receipt(NOON_MS, delivered=delivered, read=1, unknown_ms=NOON_MS))
    books.write_receipt(Receipt(NOON_MS, delivered={"orders/0": [(1, 1)]}, mark=Mark(1, 0)))
    books.extend(path)
    asked, told = books.requests_in_kafka(), books.outcomes_in_kafka()
    books.cut(books.topic, 0, 6)
    books.cut(books.receipts_topic, 0, 2)
    books.ask(3)
    books.write_receipt(Receipt(NOON_MS, dead=[2]))

    both = JournalTables(books.spark, books.settings, books.access, books.open(path))

    assert requests_in(both.requests(whole=True)) == asked + books.requests_in_kafka()
    assert outcomes_in(both.outcomes()) == told + books.outcomes_in_kafka()
    assert both.gaps == {}


@pytest.mark.proof
def test_files_of_a_killed_run_are_never_read_and_removed_by_a_later_run(
    damaged: tuple[Books, Path], tmp_path: Path
) -> None:
    books, path = damaged
    [some, *_] = sorted(path.glob("requests/*/day=*"))
    unpublished = path / "requests" / f"{2:020d}-aaaaaaaaaaaa"
    shutil.copytree(some, unpublished / some.name)
    (unpublished / "_temporary" / "0").mkdir(parents=True)
    lost_race = copied(unpublished, path / "outcomes" / f"{1:020d}-bbbbbbbbbbbb")
    half = path / "manifest" / f".{2:020d}.json.cccc"
    half.write_bytes(b'{"format": 1, "num')

    books.assert_equal(path)
    assert Ledger.verify(books.spark, str(path)).leftovers == 2
    books.extend(path)
    assert unpublished.exists(), "a running one may still publish it"

    books.ask(1)
    books.extend(path)
    assert not unpublished.exists()
    assert not lost_race.exists()
    assert not half.exists()
    books.assert_equal(copied(path, tmp_path / "elsewhere"))


def test_one_of_two_concurrent_runs_fails_and_changes_nothing(books: Books, tmp_path: Path) -> None:
    books.ask(20)
    books.write_receipt(Receipt(NOON_MS, delivered={"orders/0": [(0, 0)]}))

    def run(_: int) -> str:
        try:
            return f"manifest {books.extend(tmp_path / 'ledger').manifest.number}"
        except LedgerError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        answers = sorted(threads.map(run, range(2)))

    assert answers[1] == "manifest 1"
    assert "another run published manifest 1 of file:" in answers[0]
    books.assert_equal(tmp_path / "ledger")


@pytest.mark.parametrize("scheme", ["file://", "viewfs://shelf/all"])
def test_a_file_is_published_once_by_concurrent_writers(
    spark: SparkSession, tmp_path: Path, scheme: str
) -> None:
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    hadoop.set("fs.viewfs.mounttable.shelf.link./all", "file:///")
    files = Files(spark, f"{scheme}{tmp_path}/a folder")

    def publish(writer: int) -> bool:
        return files.publish("manifest/1.json", b"written by %d" % writer)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(publish, range(8) if scheme == "file://" else [0]))

    assert answers.count(True) == 1
    assert not files.publish("manifest/1.json", b"late")
    assert files.read("manifest/1.json") == b"written by %d" % answers.index(True)
    assert [found.path for found in files.listed("manifest")] == ["manifest/1.json"]


@pytest.mark.proof
def test_many_small_files_are_compacted_with_the_same_rows(books: Books, tmp_path: Path) -> None:
    hadoop = books.spark.sparkContext._jsc.hadoopConfiguration()
    hadoop.set("fs.viewfs.mounttable.shelf.link./all", "file:///")
    folder = tmp_path / "ledger"
    path = f"viewfs://shelf/all{folder}"
    for number in range(12):
        day = number % 2
        message = f"m{number}" if day else os.urandom(2000).hex()
        books.write(body(message), at_ms=NOON_MS + day * DAY_MS)
    books.flush()
    books.write_receipt(Receipt(NOON_MS, delivered={"orders/0": [(0, 0)]}))
    many = books.extend(path, UpkeepLimits(step=4, compact_from_files=1000))
    reader = books.open(path)
    of_first_day = [file for file in many.manifest.of("requests") if file.day == "2026-01-01"]
    large = sum(file.bytes for file in of_first_day) * 2 // 3

    few = books.extend(path, replace(AT_ONCE, compact_from_files=3, file_bytes=large))

    done = few.tables["requests"]
    assert (done.rows_added, done.compacted, done.compacted_into) == (0, 6, 3)
    days = [file.day for file in few.manifest.of("requests")]
    assert sorted(days) == ["2026-01-01", "2026-01-01", "2026-01-02"]
    assert few.tables["outcomes"].compacted == 0
    books.assert_equal(path)
    assert requests_in(reader.requests()) == books.requests_in_kafka(), "it was opened before"

    books.ask(1)
    books.extend(path, replace(AT_ONCE, manifests=2, keep_replaced_s=-1))

    books.assert_equal(path)
    named = {folder / file.path for file in newest(Files(books.spark, path)).files}
    assert data_files(folder) == named
    assert len(list(folder.glob("manifest/*.json"))) == 2


@pytest.mark.proof
def test_offsets_removed_before_they_were_read_need_accept_gap(
    books: Books, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    books.ask(3)
    books.write_receipt(Receipt(NOON_MS, dead=[0]))
    before = books.extend(path)
    books.ask(5)
    for _ in range(3):
        books.write_receipt(Receipt(NOON_MS, dead=[1]))
    books.cut(books.topic, 0, 6)
    books.cut(books.receipts_topic, 0, 2)

    with pytest.raises(LedgerError) as told:
        books.extend(path)

    assert str(told.value).splitlines() == [
        f"{topic}/0: offsets {first} to {last} are neither in the ledger nor in Kafka, whose "
        f"retention removed them before a run read them. Run more often, or raise retention.ms of "
        f"{topic}; `blackbox ledger --accept-gap` continues at {last + 1} and records the gap"
        for topic, first, last in ((books.topic, 3, 5), (books.receipts_topic, 1, 1))
    ]
    assert newest(Files(books.spark, str(path))) == before.manifest

    books.extend(path, accept_gap=True)

    ledger = books.open(path)
    shard = Shard(books.topic, 0)
    assert ledger.gaps == {
        JournalKey("requests", shard): (Span(3, 6),),
        JournalKey("outcomes", shard): (Span(1, 2),),
    }
    assert ledger.reach[JournalKey("requests", shard)] == Span(0, 8)
    assert [one[1] for one in requests_in(ledger.requests())] == [0, 1, 2, 6, 7]
    assert [one[1] for one in outcomes_in(ledger.outcomes())] == [0, 2, 3]
    assert books.extend(path).steps == 0, "an accepted gap does not count the next time"


def test_a_recreated_topic_is_distinguished_from_the_one_in_the_ledger(
    books: Books, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    books.ask(3)
    books.write_receipt(Receipt(NOON_MS, dead=[0]))
    before = books.extend(path).manifest

    def error() -> str:
        with pytest.raises(LedgerError) as told:
            books.extend(path, accept_gap=True)
        assert newest(Files(books.spark, str(path))) == before
        return str(told.value)

    books.delete()
    assert f"{books.topic}/0: the ledger holds offsets up to 2, but Kafka has no such" in error()

    books.create()
    books.ask(2)
    books.write_receipt(Receipt(NOON_MS, dead=[0]))
    assert (
        f"{books.topic}/0: the ledger holds offsets up to 2, but in Kafka it ends at 1: it was "
        "truncated, or deleted and created again. One ledger cannot hold both: start a new one at "
        "another path (BLACKBOX_LEDGER or --path), and keep this one for the earlier records"
    ) in error()

    books.ask(5, at_ms=NOON_MS + DAY_MS)
    ids = ids_in_kafka(books.settings.topics, books.access)
    assert (
        f"{books.topic}/0: the ledger holds offsets up to 2 of the topic with the id "
        f"{before.topic_ids[books.topic]}, but in Kafka its id is {ids[books.topic]}: it was deleted "
        "and created again. One ledger cannot hold both: "
    ) in error()
    with pytest.raises(LedgerError, match="it was deleted and created again"):
        JournalTables(books.spark, books.settings, books.access, books.open(path))


def test_a_ledger_of_an_earlier_version_learns_the_ids_of_its_topics(
    books: Books, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    books.ask(3)
    ids = books.extend(path).manifest.topic_ids
    assert set(ids) == {books.topic, books.receipts_topic}

    def forget_ids(found: dict[str, Any]) -> None:
        del found["topic_ids"], found["sha256"]
        found["sha256"] = manifests._digest(found)

    change(path, forget_ids)
    assert newest(Files(books.spark, str(path))).topic_ids == {}

    done = books.extend(path)

    assert (done.steps, done.manifest.topic_ids) == (0, ids)
    assert newest(Files(books.spark, str(path))) == done.manifest
    assert len(requests_in(books.open(path).requests())) == 3


def test_a_receipt_of_a_later_version_is_named(books: Books, tmp_path: Path) -> None:
    key = str(Shard(books.topic, 1))
    books._producer.produce(books.receipts_topic, b'{"v":2,"at_ms":5}', key, 1)
    books.flush()

    with pytest.raises(
        LedgerError, match=rf"{books.receipts_topic}/1@0: the receipt has version 2"
    ):
        books.extend(tmp_path / "ledger")


def newest_manifest(path: Path) -> Path:
    return max((path / "manifest").glob("*.json"))


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the newest manifest by hand."""
    file = newest_manifest(path)
    found = json.loads(file.read_bytes())
    edit(found)
    file.write_text(json.dumps(found))


def one_file(path: Path) -> Path:
    return min(data_files(path / "."))


def without_checksum(file: Path) -> Path:
    """Hadoop writes a checksum beside local files; other storage has none."""
    file.with_name(f".{file.name}.crc").unlink()
    return file


def swap_bytes(file: Path) -> None:
    content = bytearray(without_checksum(file).read_bytes())
    footer = int.from_bytes(content[-8:-4], "little")
    middle = (len(content) - footer) // 2
    content[middle : middle + 8] = bytes(byte ^ 0x5A for byte in content[middle : middle + 8])
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (shutil.rmtree, "{path} does not contain a ledger; `blackbox ledger` creates one"),
        (
            lambda path: change(path, lambda found: found.update(format=2)),
            "{manifest} has the format 2, but this version of blackbox reads 1; use the version that "
            "wrote it, or a newer one",
        ),
        (lambda path: newest_manifest(path).write_bytes(b""), "{manifest} is damaged: restore"),
        (
            lambda path: newest_manifest(path).write_bytes(newest_manifest(path).read_bytes()[:99]),
            "{manifest} is damaged: restore it from a copy, or delete it to return to the previous "
            "manifest; the next run then reads the missing records from Kafka again",
        ),
        (
            lambda path: change(path, lambda found: found["files"].pop()),
            "{manifest} is damaged: restore",
        ),
        (lambda path: one_file(path).unlink(), "{path}/{file} is missing; restore it from a copy"),
        (
            lambda path: without_checksum(one_file(path)).write_bytes(b"PAR1"),
            "{path}/{file} was changed: it has 4 bytes, not",
        ),
    ],
)
def test_an_unusable_ledger_raises_an_error_with_the_cause(
    damaged: tuple[Books, Path], damage: Callable[[Path], object], text: str
) -> None:
    books, path = damaged
    file = one_file(path).relative_to(path)
    manifest = newest_manifest(path)

    damage(path)

    with pytest.raises(LedgerError) as told:
        books.open(path)
    assert str(told.value).startswith(
        text.format(path=f"file:{path}", file=file, manifest=f"file:{manifest}")
    )


def test_an_unusable_path_raises_an_error_with_the_cause(
    shelf: tuple[Books, Path], tmp_path: Path
) -> None:
    books, _ = shelf
    (tmp_path / "file").write_text("no folder")
    for path, text in (
        ("nosuch://bucket/ledger", 'No FileSystem for scheme "nosuch"'),
        (tmp_path / "file", "[Nn]ot a directory|[Mm]kdirs failed"),
    ):
        with pytest.raises(LedgerError, match=text):
            books.extend(path)


@pytest.mark.proof
def test_after_a_damaged_manifest_is_deleted_the_previous_one_is_used(
    damaged: tuple[Books, Path], tmp_path: Path
) -> None:
    books, path = damaged
    books.ask(2)
    books.extend(path)
    newest_manifest(path).write_bytes(b"{}")
    with pytest.raises(LedgerError, match="is damaged"):
        books.extend(path)

    newest_manifest(path).unlink()
    books.extend(path)

    books.assert_equal(path)
    assert Ledger.verify(books.spark, str(path)).problems == []


def test_verify_finds_each_file_that_is_missing_changed_or_there_twice(
    damaged: tuple[Books, Path],
) -> None:
    books, path = damaged
    missing, changed, copy_of, *_ = sorted(data_files(path))
    files = Files(books.spark, str(path))
    before = newest(files)
    missing.unlink()
    swap_bytes(changed)
    copy = copy_of.with_name("part-copy.parquet")
    shutil.copy(copy_of, copy)

    found = Ledger.verify(books.spark, str(path))

    assert (found.files, found.leftovers) == (len(before.files), 0)
    assert [problem.partition(",")[0].split(": ")[0] for problem in found.problems] == [
        f"file:{missing} is missing",
        f"file:{changed} was changed",
        f"file:{copy} is a copy of {copy_of.name}",
    ]


def test_verify_finds_duplicate_rows(damaged: tuple[Books, Path]) -> None:
    books, path = damaged
    files = Files(books.spark, str(path))
    before = newest(files)
    [original] = [file for file in before.of("requests") if file.day == "2026-01-01"]
    copy = original._replace(path=original.path.replace("part-", "copy-"))
    shutil.copy(path / original.path, path / copy.path)
    doubled = replace(before, number=before.number + 1, files=(*before.files, copy))
    manifests.publish(files, doubled)

    found = Ledger.verify(books.spark, str(path))

    place = Shard(books.topic, 0).source(0)
    assert found.problems == [f"file:{path}/requests: 4 rows are duplicated, the first of {place}"]


@pytest.mark.proof
@pytest.mark.timeout(150 + 30 * KILLS)
def test_a_run_killed_at_any_moment_adds_nothing_twice(books: Books, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    seed = random.randrange(1 << 30)
    choose = random.Random(seed)
    cut_off = 0
    for number in range(KILLS):
        books.ask(50, partition=number % 2)
        books.write_receipt(Receipt(NOON_MS, delivered={"orders/0": [(number, number)]}))
        before = len(list(path.glob("*/*")))
        process = ledger_process(books, path)
        try:
            until(
                "the run writes, or has ended",
                lambda: len(list(path.glob("*/*"))) > before or process.poll() is not None,  # noqa: B023
            )
            assert process.wait(choose.uniform(0, 3)) == 0, (tmp_path / "errors").read_text()
        except subprocess.TimeoutExpired:
            cut_off += 1
        finally:
            kill_tree(process)
        if list(path.glob("manifest/*.json")):
            books.open(path)

    done = books.extend(path)

    print(f"{cut_off} of {KILLS} runs were cut off; seed {seed}")
    books.assert_equal(path)
    assert done.tables["requests"].rows == 50 * KILLS, seed
    assert Ledger.verify(books.spark, str(path)).problems == [], seed


def ledger_process(books: Books, path: Path) -> subprocess.Popen[bytes]:
    with (path.parent / "errors").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "blackbox", "ledger"],
            env=os.environ | books.environment | {"BLACKBOX_LEDGER": str(path)},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


Typed = Callable[..., Result]


@pytest.fixture
def type_ledger(
    damaged: tuple[Books, Path], spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Typed:
    """Run the command in this process, on the shared session."""
    books, path = damaged
    command = import_module("blackbox.cli.ledger")
    monkeypatch.setattr(command, "spark", lambda *_: nullcontext(spark))
    environment = dict.fromkeys(name for name in os.environ if name.startswith("BLACKBOX_"))
    environment |= books.environment | {"BLACKBOX_LEDGER": str(path), "COLUMNS": "80"}
    return lambda *typed: CliRunner().invoke(app, ["ledger", *typed], env=environment)


@pytest.mark.proof
def test_the_command_reports_its_result_as_text_and_as_json(
    damaged: tuple[Books, Path], type_ledger: Typed
) -> None:
    books, path = damaged
    books.extend(path)
    books.ask(3, at_ms=NOON_MS + 5 * DAY_MS)

    added = json.loads(type_ledger("--json").stdout)
    requests = of_table(books.open(path).reach, "requests")
    ends = {str(shard): span.end for shard, span in requests.items()}
    table = type_ledger().stdout
    well = type_ledger("--verify")
    min(data_files(path)).unlink()
    ill = type_ledger("--verify", "--json")

    requests = added["tables"]["requests"]
    assert (requests["rows_added"], added["steps"]) == (3, 1)
    assert {j["shard"]: j["end"] for j in added["journals"] if j["table"] == "requests"} == ends
    assert [line.split()[:4] for line in table.splitlines() if line.startswith(" requests")] == [
        ["requests", "0", str(requests["rows"]), str(requests["days"])]
    ]
    assert (well.exit_code, well.stdout.startswith("Verified: ")) == (0, True)
    assert (ill.exit_code, len(json.loads(ill.stdout)["problems"])) == (1, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "error: no ledger is given; set BLACKBOX_LEDGER or --path to a folder"),
        (
            ["--path", "x", "--verify", "--accept-gap"],
            "error: --verify and --accept-gap are both given",
        ),
    ],
)
def test_wrong_options_exit_with_2_and_name_the_remedy(options: Sequence[str], text: str) -> None:
    environment = {"BLACKBOX_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", "BLACKBOX_LEDGER": None}

    answer = CliRunner().invoke(app, ["ledger", *options], env=environment)

    assert (answer.exit_code, answer.stdout) == (2, "")
    assert answer.stderr.startswith(text)
