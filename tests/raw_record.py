"""A record that no client here can write: clients require header names to be text."""

from __future__ import annotations

import socket
import struct
import time


def write_with_header(bootstrap_servers: str, topic: str, name: bytes, value: bytes) -> None:
    """Produce to partition 0 a record with one header, whose name may be any bytes (below 30)."""

    def counted(data: bytes) -> bytes:
        return bytes([len(data) << 1]) + data  # a zigzag varint below 64

    record = bytes([0, 0, 0, 1]) + counted(value) + bytes([2]) + counted(name) + counted(b"1")
    now_ms = int(time.time() * 1000)
    checked = struct.pack(">hiqqqhii", 0, 0, now_ms, now_ms, -1, -1, -1, 1) + counted(record)
    records = struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked)) + checked
    name_of_topic = topic.encode()
    request = (
        struct.pack(">hhihhhi", 0, 3, 1, -1, -1, 1, 5000)
        + struct.pack(">ih", 1, len(name_of_topic))
        + name_of_topic
        + struct.pack(">iii", 1, 0, len(records))
        + records
    )
    host, _, port = bootstrap_servers.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as broker:
        broker.sendall(struct.pack(">i", len(request)) + request)
        answer = broker.makefile("rb").read(4 + 4 + 4 + 2 + len(name_of_topic) + 4 + 4 + 2)
    assert answer[-2:] == b"\0\0", answer


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
