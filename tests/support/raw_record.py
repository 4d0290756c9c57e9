"""Records that no client here can write: with header names that are not text, or offsets that are not their own."""

from __future__ import annotations

import gzip
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple


class RawRecord(NamedTuple):
    """A record as its bytes say. `offset_delta` is relative to its batch: None is its place in that.

    A length of the key below 0 stands for no key.
    """

    value: bytes
    offset_delta: int | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()
    key_length: int = -1


SILENT = RawRecord(b"{}", key_length=-2)
"""The Kafka client never returns it."""
DISTANT = RawRecord(b"{}", offset_delta=10_000_000)
"""It claims an offset that its partition does not have."""


def write_with_header(bootstrap_servers: str, topic: str, name: bytes, value: bytes) -> None:
    """Produce to partition 0 a record with one header, whose name may be any bytes."""
    write_raw(bootstrap_servers, topic, [RawRecord(value, headers=[(name, b"1")])])


def write_raw(
    bootstrap_servers: str,
    topic: str,
    records: Sequence[RawRecord],
    partition: int = 0,
    *,
    compressed: bool = False,
) -> list[int]:
    """Produce the records as one batch; returns their offsets."""
    now_ms, last = int(time.time() * 1000), len(records) - 1
    encoded = b"".join(_encoded(record, place) for place, record in enumerate(records))
    attributes, encoded = (1, gzip.compress(encoded)) if compressed else (0, encoded)
    checked = struct.pack(">hiqqqhii", attributes, last, now_ms, now_ms, -1, -1, -1, len(records))
    checked += encoded
    batch = struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked)) + checked
    name_of_topic = topic.encode()
    request = (
        struct.pack(">hhihhhi", 0, 3, 1, -1, -1, 1, 5000)
        + struct.pack(">ih", 1, len(name_of_topic))
        + name_of_topic
        + struct.pack(">iii", 1, partition, len(batch))
        + batch
    )
    host, _, port = bootstrap_servers.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as broker:
        broker.sendall(struct.pack(">i", len(request)) + request)
        answer = broker.makefile("rb").read(4 + 4 + 4 + 2 + len(name_of_topic) + 4 + 4 + 2 + 8)
    error, first = struct.unpack(">hq", answer[-10:])
    assert error == 0, answer
    return [*range(first, first + len(records))]


def _encoded(record: RawRecord, place: int) -> bytes:
    delta = place if record.offset_delta is None else record.offset_delta
    body = b"\0" + _varint(0) + _varint(delta) + _varint(record.key_length)
    body += _counted(record.value)
    body += _varint(len(record.headers))
    for name, value in record.headers:
        body += _counted(name) + _counted(value)
    return _counted(body)


def _counted(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    """Zigzag: negative numbers are odd."""
    left = (number << 1) ^ (number >> 63)
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
