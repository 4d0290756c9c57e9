"""Certificates for servers on this machine, made with openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.conftest import missing_tool

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2")


class Certificates(NamedTuple):
    """A CA, and the certificate of a server on the loopback interface; `both` is its key and certificate."""

    ca: Path
    key: Path
    certificate: Path
    both: Path


def make_certificates(folder: Path, names: str = "IP:127.0.0.1,DNS:localhost") -> Certificates:
    """A new CA and a certificate that it has signed, for a server of these names."""
    folder.mkdir(parents=True, exist_ok=True)
    ca = make_ca(folder)
    key, certificate, both = folder / "server.key", folder / "server.crt", folder / "server.pem"
    signed = ("-CA", str(ca), "-CAkey", str(ca.with_suffix(".key")), "-subj", "/CN=localhost")
    named = ("-addext", f"subjectAltName={names}")
    openssl("req", "-x509", *CURVE, "-nodes", *signed, *named, "-keyout", key, "-out", certificate)
    both.write_text(key.read_text() + certificate.read_text())
    return Certificates(ca, key, certificate, both)


def make_ca(folder: Path) -> Path:
    """The certificate of a new CA; its key is beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    ca = folder / "ca.crt"
    key = ca.with_suffix(".key")
    openssl("req", "-x509", *CURVE, "-nodes", "-subj", "/CN=ca", "-keyout", key, "-out", ca)
    return ca


def make_locked_key(folder: Path, password: str) -> tuple[Path, Path]:
    """A client's certificate, and its key, encrypted with `password`."""
    key, certificate = folder / "locked.key", folder / "locked.crt"
    lock = ("-passout", f"pass:{password}", "-subj", "/CN=client")
    openssl("req", "-x509", *CURVE, *lock, "-keyout", key, "-out", certificate)
    return key, certificate


def openssl(*arguments: str | Path) -> None:
    if shutil.which("openssl") is None:
        missing_tool("there is no openssl on PATH; install it")
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
