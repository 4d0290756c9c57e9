"""How Spark is started on this machine."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from blackbox.config.settings import Half
from blackbox.engine.spark.driver import slots_for
from blackbox.spark.spark_session import numbered

pytestmark = pytest.mark.service

RPC_REQUEST, OPEN_BLOCKS = 3, 0
EXPECTS_SECRET = b"Expected SaslMessage"


def test_a_stranger_on_this_machine_gets_nothing_from_the_ports_of_spark(
    spark: SparkSession,
) -> None:
    block_managers = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().keySet()
    block_manager = block_managers.mkString(",").rpartition(":")[2]
    ports = [int(spark.sparkContext.getConf().get("spark.driver.port", "")), int(block_manager)]

    application = spark.sparkContext.applicationId
    answers = [answer(port, open_block(application, "broadcast_0_piece0")) for port in ports]
    assert [EXPECTS_SECRET in one for one in answers] == [True, True], answers


def test_the_records_that_spark_keeps_on_disk_are_private(spark: SparkSession) -> None:
    numbered(spark, 2).repartition(2).collect()

    folder = Path(spark.sparkContext.getConf().get("spark.local.dir", "/tmp"))

    assert list(folder.glob("blockmgr-*/*/shuffle_*.data"))
    assert folder.stat().st_mode & 0o077 == 0


def test_the_secret_of_spark_is_not_in_the_process_list(spark: SparkSession) -> None:
    commands = list[str]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            commands.append(" ".join(process.cmdline()))

    assert any("spark.authenticate=true" in command for command in commands)
    assert not [command for command in commands if "secret" in command.lower()]


def answer(port: int, body: bytes) -> bytes:
    """What Spark answers to a request of a client that knows its protocol, but not its secret."""
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        frame = struct.pack(">qbqi", 8 + 1 + 8 + 4 + len(body), RPC_REQUEST, 1, len(body))
        client.sendall(frame + body)
        return client.recv(1 << 16)


def open_block(application: str, block: str) -> bytes:
    """Asks a block manager for a block; without a secret, it answers."""
    strings = [text.encode() for text in (application, "driver", block)]
    application_id, executor, name = (struct.pack(">i", len(one)) + one for one in strings)
    return struct.pack(">b", OPEN_BLOCKS) + application_id + executor + struct.pack(">i", 1) + name


@pytest.mark.parametrize(
    ("only", "intake", "dispatch"), [(None, 3, 2), ("intake", 5, 0), ("dispatch", 0, 5)]
)
def test_one_half_alone_gets_all_slots(only: Half | None, intake: int, dispatch: int) -> None:
    assert slots_for("intake", 5, only) == intake
    assert slots_for("dispatch", 5, only) == dispatch
