"""Files into a request topic, on a real broker: every row is validated first, then each is sent once."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from blackbox.cli import app
from blackbox.config.settings import load as read_settings
from blackbox.config.wiring import kafka
from blackbox.jobs.load import load as loads
from blackbox.jobs.load.load import Load, LoadCheck, LoadFile, UnusableFile, find_files, read_files
from blackbox.jobs.load.tasks import SendRate
from blackbox.journal.piece_writer import (
    PieceProgress,
    PieceProgressReader,
    PieceWriter,
    commit_again,
    largest_record,
    piece_name,
)
from blackbox.journal.topics import Topics
from blackbox.records.errors import Fenced
from blackbox.records.request import Headers
from blackbox.support import logs
from tests.support.world import World, read_all, until

pytestmark = pytest.mark.service

KILLS = int(os.environ.get("BLACKBOX_TEST_LOAD_KILLS", "1"))
ROWS = int(os.environ.get("BLACKBOX_TEST_LOAD_ROWS", "2000"))
REFUSED = 3


class LoadRunner:
    """A world whose request topic files are loaded into, by tasks of the shared session."""

    def __init__(self, world: World, session: SparkSession) -> None:
        self.world = world
        self._session = session
        self.settings = read_settings(
            kafka_bootstrap_servers=world.kafka.bootstrap_servers,
            request_topics=f"{world.requests}:countdown",
            dead_letter_topic=world.dead_letters,
            group_id=world.name,
        )
        self.access = kafka(self.settings, logs.NO_CLIENT_LOG)

    def plan(self, *paths: Path, caller: str | None = None, again: str | None = None) -> Load:
        options = (self.world.requests, caller, again)
        files = self.read(*paths, options=options)
        return Load(self.settings, self.access, self.world.requests, caller, files)

    def read(self, *paths: Path, options: Sequence[str | None] = ()) -> list[LoadFile]:
        return read_files(find_files(map(str, paths)), options)

    def check(self, load: Load) -> LoadCheck:
        return load.validate(self._session, largest_record(self.access, 1_000_000))

    def send(self, load: Load, rate: int | None = None) -> int:
        """Validate and send; returns how many rows were added."""
        before = load.rows_in
        verdict = self.check(load)
        assert verdict.bad == 0, verdict
        load.send(self._session, verdict.rows, rate)
        return load.rows_in - before

    def records(self) -> list[Message]:
        return read_all(self.world.kafka.bootstrap_servers, self.world.requests)

    def bodies(self) -> Counter[str]:
        return Counter(json.loads(m.value() or b"")["message"] for m in self.records())


@pytest.fixture
def runner(world: World, spark: SparkSession) -> LoadRunner:
    return LoadRunner(world, spark)


def request(number: int, **more: object) -> dict[str, object]:
    return {"topic": "orders", "message": f"m-{number}", "countdown": 3600 + number, **more}


def write_lines(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()} for row in rows
        )
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)
    return path


WRITE: dict[str, Callable[[Path, Sequence[dict[str, Any]]], Path]] = {
    "jsonl": write_lines,
    "csv": write_csv,
    "parquet": write_parquet,
}


def test_each_format_gives_the_same_records(runner: LoadRunner, tmp_path: Path) -> None:
    rows = [
        request(n, id=f"r-{n}", headers={"trace": f"t{n}"}, key="k", caller="shop", expires_after=9)
        for n in range(20)
    ]
    for kind, write in WRITE.items():
        assert runner.send(runner.plan(write(tmp_path / f"a.{kind}", rows))) == 20

    seen: dict[tuple[object, ...], int] = Counter(
        (m.key(), json.dumps(json.loads(m.value() or b""), sort_keys=True), *(m.headers() or []))
        for m in runner.records()
    )

    expected = {
        (
            f"r-{n}".encode(),
            json.dumps({k: v for k, v in row.items() if k != "caller"}, sort_keys=True),
            ("CALLER_SERVICE", b"shop"),
        ): 3
        for n, row in enumerate(rows)
    }
    assert seen == expected


@pytest.mark.proof
def test_bad_rows_are_named_and_nothing_is_sent(runner: LoadRunner, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [request(n) for n in range(50)])
    with lines.open("a") as file:
        file.write('\n{"topic": "orders", "message": 1}\n')
        file.write('{"topic": "orders", "message": 1, "countdwon": 1}\n' * 30)
    table = tmp_path / "b.csv"
    table.write_text('topic,message,at\norders,"a\nb",soon\n')
    rows = write_parquet(tmp_path / "c.parquet", [request(0), request(1, topic="__mine")])
    columns = tmp_path / "d.csv"
    columns.write_text("topic,message,delay\norders,a,1\n")
    large = write_lines(tmp_path / "e.jsonl", [request(0), request(1, key="x" * 1_000_000)])

    load = runner.plan(lines, table, rows, columns, large)
    verdict = runner.check(load)
    others = [runner.check(runner.plan(path)) for path in (table, rows, columns, large)]

    assert verdict.bad == 1 + 30 + 4
    assert len(verdict.first) == 20
    first, second = verdict.first[:2]
    assert (first.path, first.number, first.reason) == (str(lines), 52, "bad-due-time")
    assert first.detail == "neither countdown nor at is given; give exactly one of them"
    assert (second.number, second.reason) == (53, "unknown-field")
    assert "did you mean countdown?" in second.detail
    assert [(v.bad, v.first[0].number, v.first[0].reason) for v in others] == [
        (1, 2, "bad-due-time"),
        (1, 2, "forbidden-topic"),
        (1, 1, "unknown-field"),
        (1, 2, "too-large"),
    ]
    assert runner.records() == []


def test_a_second_run_sends_nothing_and_the_option_again_sends_once_more(
    runner: LoadRunner, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [request(n) for n in range(30)])
    assert runner.send(runner.plan(path)) == 30
    copy = tmp_path / "copy.jsonl"
    path.rename(copy)

    load = runner.plan(copy)
    assert load.is_finished
    assert runner.send(load) == 0
    assert load.rows_in == 30
    again = runner.plan(copy, again="monday")
    assert not again.is_finished
    assert runner.send(again) == 30
    assert runner.plan(copy, again="monday").is_finished
    assert set(runner.bodies().values()) == {2}


def test_a_changed_file_or_caller_is_a_different_load(runner: LoadRunner, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [request(n) for n in range(10)])
    assert runner.send(runner.plan(path)) == 10
    assert runner.send(runner.plan(path, caller="shop")) == 10
    found = path.stat()
    path.write_text(path.read_text().replace("m-9", "n-9"))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    assert runner.send(runner.plan(path)) == 10

    assert runner.bodies() == {f"m-{n}": 3 for n in range(9)} | {"m-9": 2, "n-9": 1}


def test_only_a_new_file_of_a_folder_is_sent(runner: LoadRunner, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    write_lines(folder / "b.jsonl", [request(n) for n in range(10)])
    assert runner.send(runner.plan(folder)) == 10
    write_parquet(folder / "a.parquet", [request(n) for n in range(10, 15)])

    assert runner.send(runner.plan(folder)) == 5

    assert runner.bodies() == {f"m-{n}": 1 for n in range(15)}


def test_two_files_with_the_same_content_are_refused(runner: LoadRunner, tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / name, [request(0)]) for name in ("a.jsonl", "b.jsonl")]

    with pytest.raises(UnusableFile, match=r"b\.jsonl has the same content as .*a\.jsonl"):
        runner.plan(*paths)


def test_a_file_that_changes_after_validation_is_not_sent(
    runner: LoadRunner, spark: SparkSession, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [request(n) for n in range(10)])
    load = runner.plan(path)
    verdict = runner.check(load)
    path.write_text(path.read_text().replace("m-9", "n-9"))
    os.utime(path, ns=(0, 0))

    with pytest.raises(UnusableFile, match="was changed during the load"):
        load.send(spark, verdict.rows)

    assert runner.records() == []


def test_a_run_that_another_run_fenced_commits_nothing_more(
    runner: LoadRunner, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [request(n) for n in range(10)])
    load = runner.plan(path)
    [file] = runner.read(path, options=(runner.world.requests, None, None))
    name = piece_name(runner.access, file.fingerprint, 0)
    fenced = PieceWriter(runner.access, runner.world.requests, name, 10)
    assert fenced.open() == 0
    fenced.send([(None, json.dumps(request(n)).encode(), []) for n in range(4)], 4)

    def rows() -> Iterator[tuple[str | None, bytes, Headers]]:
        yield None, b'{"message": "never"}', []
        assert runner.send(load) == 10
        yield None, b'{"message": "never"}', []

    with pytest.raises(Fenced):
        fenced.send(rows(), 6)

    fenced.close()
    assert runner.bodies() == {f"m-{n}": 1 for n in range(10)}


def test_two_concurrent_runs_send_one_load(runner: LoadRunner, tmp_path: Path) -> None:
    paths = [
        write_lines(tmp_path / f"{k}.jsonl", [request(n) for n in range(100 * k, 100 * k + 100)])
        for k in range(4)
    ]
    loads = [runner.plan(*paths) for _ in range(2)]
    failures: list[BaseException] = []

    def run(load: Load) -> None:
        try:
            runner.send(load, rate=200)
        except BaseException as failure:
            failures.append(failure)

    runs = [threading.Thread(target=run, args=(load,)) for load in loads]
    for one in runs:
        one.start()
    for one in runs:
        one.join(60)

    assert failures == []
    assert [load.rows_in for load in loads] == [400, 400]
    assert runner.bodies() == {f"m-{n}": 1 for n in range(400)}


def test_a_load_with_a_rate_is_sent_over_time(runner: LoadRunner, tmp_path: Path) -> None:
    paths = [
        write_lines(tmp_path / f"{k}.jsonl", [request(n) for n in range(100 * k, 100 * k + 100)])
        for k in range(3)
    ]

    assert runner.send(runner.plan(*paths), rate=100) == 300

    stamps = [m.timestamp()[1] for m in runner.records()]
    assert max(stamps) - min(stamps) >= 1000, "a hundred rows take a second, except the first ones"


def test_the_rate_is_not_exceeded_after_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    sent_at_s = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", sleep)
    send_rate = SendRate(200)
    for took_s in (0.25, 0.25, 2, 0, 0):
        send_rate.wait_for(100)
        sent_at_s.append(now_s)
        now_s += took_s

    assert sent_at_s == [0, 0.5, 1, 3, 3.5], "the delay of a slow Kafka is not compensated"


def test_the_rate_limits_the_rows_per_transaction() -> None:
    assert [SendRate(rate).rows for rate in (None, 1, 0.5, 300.0, 1e9)] == [
        20_000,
        1,
        1,
        300,
        20_000,
    ]


def commits_of(runner: LoadRunner, name: str) -> int:
    """How often the offset of this consumer group was written."""
    written = read_all(runner.world.kafka.bootstrap_servers, "__consumer_offsets")
    # The key of an offset has the name of the group, and that of the topic.
    group, topic = name.encode(), runner.world.requests.encode()
    return sum(group in (m.key() or b"") and topic in (m.key() or b"") for m in written)


def test_progress_is_committed_again_without_rows(runner: LoadRunner, tmp_path: Path) -> None:
    """Kafka forgets an offset 7 days after its own commit: docs/load.md."""
    path = write_lines(tmp_path / "a.jsonl", [request(n) for n in range(10)])
    [file] = runner.read(path, options=(runner.world.requests, None, None))
    finished, begun, unknown = (piece_name(runner.access, file.fingerprint, n) for n in range(3))
    for name, count in ((finished, 10), (begun, 4)):
        writer = PieceWriter(runner.access, runner.world.requests, name, 10)
        writer.open()
        writer.send([(None, json.dumps(request(n)).encode(), []) for n in range(count)], count)
        writer.close()
    reader = PieceProgressReader(runner.access, runner.world.requests)
    progress = reader.of([finished, begun], wait_for_commits=True)
    assert progress == {finished: PieceProgress(10, 10), begun: PieceProgress(4, 10)}

    gone = {unknown: PieceProgress(10, 10)}  # as if the topic had been created again in between
    commit_again(runner.access, runner.world.requests, progress | gone)

    assert reader.of([finished, begun, unknown], wait_for_commits=True) == progress
    assert [commits_of(runner, name) for name in (finished, begun, unknown)] == [2, 2, 0]
    assert len(runner.records()) == 14


def test_a_load_that_commits_its_progress_again_and_again_sends_each_row_once(
    runner: LoadRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "COMMIT_AGAIN_S", 1.5)
    paths = [
        write_lines(tmp_path / f"{k}.jsonl", [request(n) for n in range(100 * k, 100 * k + 100)])
        for k in range(3)
    ]
    [first, *_] = runner.read(*paths, options=(runner.world.requests, None, None))

    assert runner.send(runner.plan(*paths), rate=50) == 300

    assert runner.bodies() == {f"m-{n}": 1 for n in range(300)}
    assert commits_of(runner, piece_name(runner.access, first.fingerprint, 0)) > 2


def test_kafka_accepts_progress_only_for_an_existing_partition(runner: LoadRunner) -> None:
    """The reason why each piece has its own group, with partition 0."""
    name = piece_name(runner.access, "none", 0)
    writer = PieceWriter(runner.access, runner.world.requests, name, 1)
    writer.open()
    producer = writer._transactions.producer
    producer.begin_transaction()
    group = writer._consumer.consumer_group_metadata()
    with pytest.raises(Exception, match="Unknown topic or partition"):
        producer.send_offsets_to_transaction(
            [TopicPartition(runner.world.requests, 99, 1)], group, 1
        )
    writer.close()
    assert PieceProgressReader(runner.access, runner.world.requests).of([name]) == {}


class Command:
    """`blackbox load` as it is typed."""

    def __init__(self, world: World, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "blackbox", "load", *map(str, arguments)],
            env=os.environ | world.environment(spark_master="local[2]"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> list[psutil.Process]:
        """SIGKILL; returns its child processes, which may continue for a moment."""
        family = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        return family


class Ends(NamedTuple):
    """How many offsets of the request topic are taken, committed or not."""

    consumer: Consumer
    topic: str

    def total(self) -> int:
        return sum(until("it has a leader", lambda n=n: self._span(n))[1] for n in range(4))  # type: ignore[misc]

    def _span(self, partition: int) -> tuple[int, int] | None:
        with suppress(KafkaException):
            return self.consumer.get_watermark_offsets(
                TopicPartition(self.topic, partition), timeout=5
            )
        return None


class Answer(NamedTuple):
    code: int
    out: str
    errors: str


@pytest.fixture
def type_load(
    runner: LoadRunner, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """Run the command in this process, on the shared session."""
    monkeypatch.setattr("blackbox.spark.spark_session.start_session", lambda *_: nullcontext(spark))
    clean = dict.fromkeys(name for name in os.environ if name.startswith("BLACKBOX_"))
    topic = runner.world.requests
    topics = Topics(runner.access.admin())
    until("the topic can be described", lambda: topic in topics.describe([topic]))

    def run(*arguments: object) -> Answer:
        environment = clean | runner.world.environment() | {"COLUMNS": "200"}
        found = CliRunner().invoke(app, ["load", *map(str, arguments)], env=environment)
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        return Answer(found.exit_code, found.stdout, found.stderr)

    return run


def write_many(folder: Path, count: int) -> list[Path]:
    """Rows with ids, headers and callers; a third of them in each format."""
    numbers = [range(k * count // 3, (k + 1) * count // 3) for k in range(3)]
    paths = [folder / f"a.{kind}" for kind in WRITE]
    with paths[0].open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in map(full_row, numbers[0]))
    with paths[1].open("w", newline="") as cells:
        table = csv.DictWriter(cells, list(full_row(0)))
        table.writeheader()
        for row in map(full_row, numbers[1]):
            table.writerow(row | {"headers": json.dumps(row["headers"])})
    schema = pa.Table.from_pylist([full_row(0)]).schema
    with pq.ParquetWriter(paths[2], schema) as writer:
        for start in range(numbers[2].start, numbers[2].stop, 50_000):
            some = range(start, min(start + 50_000, numbers[2].stop))
            writer.write_table(pa.Table.from_pylist(list(map(full_row, some)), schema))
    return paths


def full_row(number: int) -> dict[str, object]:
    return request(number, id=f"r-{number}", headers={"trace": f"t-{number}"}, caller="shop")


def times_in(servers: str, topic: str, count: int) -> Counter[int]:
    """How many rows occur how often in the topic, as a read_committed consumer sees them."""
    seen = bytearray(count)
    options = {"bootstrap.servers": servers, "group.id": "count", "enable.partition.eof": True}
    consumer = Consumer({**options, "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for n in range(4)])
    ended = 0
    while ended < 4:
        message = consumer.poll(10)
        assert message is not None
        for one in (message, *consumer.consume(10_000, 0)):
            error = one.error()
            if error is None:
                asked = json.loads(one.value() or b"")
                number = int(asked["message"].removeprefix("m-"))
                assert (one.key(), asked["headers"]) == (
                    f"r-{number}".encode(), {"trace": f"t-{number}"}
                )  # fmt: skip
                assert one.headers() == [("CALLER_SERVICE", b"shop")]
                seen[number] += 1
            else:
                assert error.code() == KafkaError._PARTITION_EOF
                ended += 1
    consumer.close()
    return Counter(seen)


@pytest.mark.proof
@pytest.mark.timeout(180 + KILLS * 60 + ROWS // 5000)
def test_every_row_is_loaded_once_although_runs_are_killed(
    world: World, type_load: Callable[..., Answer], tmp_path: Path
) -> None:
    paths = write_many(tmp_path, ROWS)
    servers = world.kafka.bootstrap_servers
    ends = Ends(Consumer({"bootstrap.servers": servers, "group.id": "ends"}), world.requests)
    rate = max(100, ROWS // (2 * KILLS + 2))
    orphans: list[psutil.Process] = []
    for kill in range(KILLS):
        wanted = ends.total() + random.randint(1, rate)
        command = Command(world, *paths, "--rate", rate)
        try:
            until(
                f"kill {kill}",
                lambda wanted=wanted: ends.total() >= wanted,  # type: ignore[misc]
                60 + ROWS / 20_000,
            )
            assert command.process.poll() is None
        finally:
            orphans += command.kill()
    ends.consumer.close()

    begun_s = time.monotonic()
    code, out, errors = type_load(*paths, "--json")

    print(f"after {KILLS} kills, the last run took {time.monotonic() - begun_s:.1f} s: {out}")
    assert code == 0, errors
    done = json.loads(out)
    assert (done["files"], done["rows"]) == (3, ROWS)
    assert done["already"] > 0
    assert done["sent"] + done["already"] == ROWS
    assert times_in(servers, world.requests, ROWS) == {1: ROWS}
    assert "this load was already complete" in type_load(*paths).out
    until("their processes have ended", lambda: not any(orphan.is_running() for orphan in orphans))


def test_the_command_names_bad_rows_and_loads_corrected_ones(
    runner: LoadRunner, type_load: Callable[..., Answer], tmp_path: Path
) -> None:
    target = runner.world.targets[0]
    evil = tmp_path / "a\x1b[2J.csv"
    evil.write_text(f'topic,message,countdown\n{target},hello,0\n{target},x,"\x1b[31m"\n')
    code, out, errors = type_load(evil, "--caller", "shop")
    assert (code, out) == (REFUSED, "")
    assert r"a\x1b[2J.csv, line 3: bad-due-time: countdown is '\x1b[31m'" in errors
    assert "\x1b[2J" not in errors
    assert "1 bad row; nothing was sent" in errors
    told = json.loads(type_load(evil, "--json").out)
    assert (told["bad"], told["bad_rows"][0]["number"]) == (1, 3)

    evil.write_text(f"topic,message,countdown,key\n{target},hello,0,k\n")
    tried = type_load(evil, "--caller", "shop", "--dry-run")
    assert tried.code == 0, tried
    assert "nothing was sent (--dry-run)" in tried.out
    assert runner.records() == []
    done = type_load(evil, "--caller", "shop")
    assert done.code == 0, done
    assert [line.split()[:4] for line in done.out.splitlines() if "1" in line] == [
        ["1", "1", "1", "0"]
    ]

    runner.world.start_service().wait_ready()
    [found] = until("it is delivered", lambda: runner.world.received(target))
    assert (found.key(), found.value()) == (b"k", b"hello")
    assert next(iter(found.headers() or [])) == ("CALLER_SERVICE", b"shop")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["nowhere.csv"], "nowhere.csv: no such file"),
        (["s3a://bucket/a.csv"], "wanted: a local path"),
        (["{}/notes.txt"], "--format parquet|csv|jsonl"),
        (["{}/notes.txt", "--format", "xml"], "wanted: parquet, csv or jsonl"),
        (["{}/notes.txt", "--format", "parquet"], "notes.txt: "),
        (["{}/notes.txt", "--request-topic", "TC"], "BLACKBOX_REQUEST_TOPICS has"),
    ],
)
def test_a_load_that_cannot_run_reports_the_cause(
    typed: list[str], told: str, type_load: Callable[..., Answer], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("topic")

    answer = type_load(*(word.format(tmp_path) for word in typed))

    assert answer.code in (1, 2)
    assert told in answer.errors
    assert "Traceback" not in answer.errors


def test_a_recreated_topic_is_loaded_again(runner: LoadRunner, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [request(n) for n in range(5)])
    assert runner.send(runner.plan(path)) == 5
    admin = AdminClient({"bootstrap.servers": runner.world.kafka.bootstrap_servers})
    admin.delete_topics([runner.world.requests])[runner.world.requests].result()
    until("it is gone", lambda: runner.world.requests not in admin.list_topics(timeout=5).topics)
    runner.world.create(NewTopic(runner.world.requests, 4))

    until("nothing of it is loaded", lambda: runner.plan(path).rows_in == 0)
    assert runner.send(runner.plan(path)) == 5
