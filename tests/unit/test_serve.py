"""The addresses that a service listens on."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from fastapi import FastAPI

from blackbox.api.serve import HttpServer


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_two_colons_are_the_addresses_of_both_families(address: str) -> None:
    server = HttpServer(FastAPI(), "::", 0)
    server.start()
    try:
        with closing(socket.create_connection((address, server.port), timeout=5)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 404"
    finally:
        server.stop()
