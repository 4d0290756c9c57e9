"""Access control over HTTP: one bearer token to read, another to make changes."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.exceptions import HTTPException

CHALLENGE = {"WWW-Authenticate": "Bearer"}
INSUFFICIENT_SCOPE = {"WWW-Authenticate": 'Bearer error="insufficient_scope"'}

CLOSED = (
    "other machines can reach this address, so only health and metrics are served: set "
    "BLACKBOX_API_TOKEN (for example from `openssl rand -hex 32`), or listen on 127.0.0.1"
)

READING_METHODS = ("GET", "HEAD", "OPTIONS")
OPEN_PATHS = ("/livez", "/readyz", "/metrics", "/liveness", "/openapi.json", "/", "/docs")
OPEN_FOLDER = "/page/"
"""Paths that need no token: probes, metrics, and pages without any data of this installation."""


@dataclass(frozen=True, slots=True)
class Access:
    """The conditions of access through one of `hosts`; reading the open paths needs nothing.

    If a token is set, reads need one of the tokens. Changes need `operate_token`; if that is not set,
    they are allowed on loopback only. Without any token, every caller on loopback may do everything;
    if other machines can connect, only the open paths answer.
    """

    hosts: Sequence[str]
    operate_token: str | None = field(default=None, repr=False)
    read_token: str | None = field(default=None, repr=False)

    def check(self, request: Request) -> None:
        """Raise HTTPException 401 or 403 unless the headers allow this request."""
        path = request.scope["path"]
        is_read = request.method in READING_METHODS
        is_open = is_read and (path in OPEN_PATHS or path.startswith(OPEN_FOLDER))
        if self.operate_token is self.read_token is None:
            # Before the open paths: a page of another site must not read metrics either.
            self._check_same_site(request)
            if self.is_closed and not is_open:
                raise HTTPException(403, CLOSED)
        if not is_read:
            self.operate(request)
        # Every path that is not listed as open is protected, so no route can forget the check.
        elif not is_open:
            self.read(request)

    @property
    def is_closed(self) -> bool:
        """Whether other machines can connect and no token is set."""
        has_none = self.operate_token is self.read_token is None
        return has_none and not all(map(is_loopback, self.hosts))

    def read(self, request: Request) -> None:
        """Raise HTTPException 401 unless this caller may read."""
        tokens = [token for token in (self.read_token, self.operate_token) if token is not None]
        if tokens and not any(_has(request, token) for token in tokens):
            raise _unknown("BLACKBOX_API_READ_TOKEN or BLACKBOX_API_TOKEN")

    def operate(self, request: Request) -> None:
        """Raise HTTPException 401 or 403 unless this caller may make changes."""
        if self.operate_token is not None:
            if _has(request, self.operate_token):
                return
            if self.read_token is not None and _has(request, self.read_token):
                why = "this token permits reads only; changes need the value of BLACKBOX_API_TOKEN"
                raise HTTPException(403, why, INSUFFICIENT_SCOPE)
            raise _unknown("BLACKBOX_API_TOKEN")
        if not all(map(is_loopback, self.hosts)):
            hosts = ", ".join(self.hosts)
            raise HTTPException(
                403, f"changes through {hosts} are not allowed; set BLACKBOX_API_TOKEN"
            )
        self._check_same_site(request)

    def may_operate(self, request: Request) -> bool:
        """Whether this caller may make changes."""
        try:
            self.operate(request)
        except HTTPException:
            return False
        return True

    def _check_same_site(self, request: Request) -> None:
        """On loopback, raise HTTPException 403 for requests from pages of other sites."""
        if not all(map(is_loopback, self.hosts)):
            return
        host, origin = request.headers.get("Host"), request.headers.get("Origin")
        # With DNS rebinding a foreign name resolves to 127.0.0.1; only Host still shows that name.
        own = _address(str(request.url) if host is None else f"//{host}")
        theirs = own if origin is None else _address(origin)
        # The port too: another service on this host serves pages of another origin.
        is_here = own.is_loopback and theirs.is_loopback and own.port == theirs.port
        # Browsers send no Origin with a GET for an image or a script of another site.
        if not is_here or request.headers.get("Sec-Fetch-Site") == "cross-site":
            raise HTTPException(
                403,
                "without BLACKBOX_API_TOKEN, only requests to 127.0.0.1 or localhost, not from "
                "other sites, are allowed",
            )


class _Address(NamedTuple):
    is_loopback: bool
    port: int | None


def _address(url: str) -> _Address:
    """The address in a URL; not loopback if it cannot be parsed."""
    try:
        parts = urlsplit(url)
        return _Address(is_loopback(parts.hostname or ""), parts.port)
    except ValueError:
        return _Address(False, None)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _has(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # Bytes: compare_digest raises TypeError for text that is not ASCII, which clients can send.
    is_same = hmac.compare_digest(given.strip().encode(), token.encode())
    return scheme.lower() == "bearer" and is_same


def _unknown(tokens: str) -> HTTPException:
    return HTTPException(
        401,
        f"missing or invalid bearer token: send Authorization: Bearer with the value of {tokens}",
        CHALLENGE,
    )
