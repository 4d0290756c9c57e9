"""The address of Redis: parses `BLACKBOX_REDIS_URL`. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from redis.connection import parse_url

Kind = Literal["server", "sentinel", "cluster"]

WANTED = (
    "wanted: redis://, rediss:// or unix://; redis+sentinel:// or rediss+sentinel://; "
    "redis+cluster:// or rediss+cluster://"
)
_SENTINEL = "redis+sentinel://host:26379,host:26379/<service name>[/db]"
_CLUSTER = "redis+cluster://host:6379,host:6379"
_ENCODE = "in a password, write / as %2F, @ as %40, ? as %3F, # as %23"

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,19}")
_SCHEMES = re.compile(r"(rediss?)\+(sentinel|cluster)")
_PLACE = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
_SERVICE = re.compile(r"[A-Za-z0-9._-]+")
_DEFAULT_PORTS = {"server": 6379, "sentinel": 26379, "cluster": 6379}
_OF_SENTINELS = {"sentinel_username", "sentinel_password"}


class BadAddress(ValueError):
    """A URL that does not lead to a Redis. The text quotes nothing that may be part of a password."""


class ServerAddress(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Address:
    """One server, the primary that sentinels name, or a cluster. Passwords are not printed.

    `options` are those of redis-py's connections, `of_sentinels` those that connections to
    sentinels get instead.
    """

    kind: Kind
    places: tuple[ServerAddress, ...] = ()
    service: str = ""
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    of_sentinels: dict[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        places = ", ".join(map(str, self.places))
        if self.kind == "sentinel":
            return f"{self.service} (sentinels {places})"
        if self.kind == "cluster":
            return f"the nodes of the cluster, {places}"
        return places or str(self.options.get("path", ""))


def read(url: str) -> Address:
    """Parse the address in a URL. Raises BadAddress, which says what is expected."""
    scheme, found, _ = url.partition("://")
    if found and scheme in ("redis", "rediss", "unix"):
        options = _options(url)
        place = ServerAddress(
            options.get("host", "localhost"), options.get("port", _DEFAULT_PORTS["server"])
        )
        return Address("server", () if scheme == "unix" else (place,), options=options)
    of_many = _SCHEMES.fullmatch(scheme)
    if not found or of_many is None:
        shown = repr(scheme) if found and _SCHEME.fullmatch(scheme) else "missing"
        raise BadAddress(f"scheme {shown}; {WANTED}")
    base, kind = of_many.groups()
    hosts, parts = _split(url)
    read_many = _sentinel if kind == "sentinel" else _cluster
    return read_many(base, hosts, parts)


def _sentinel(base: str, hosts: str, parts: SplitResult) -> Address:
    login, places = _places(hosts, "sentinel")
    service, _, db = unquote(parts.path).removeprefix("/").partition("/")
    if not service:
        raise BadAddress(
            f"the service name is missing; wanted: {_SENTINEL}, where the service is the name "
            "after `sentinel monitor` in sentinel.conf"
        )
    if not _SERVICE.fullmatch(service):
        raise BadAddress(
            "the service name may have only letters, digits, '.', '_' and '-'; wanted: "
            f"{_SENTINEL}; {_ENCODE}"
        )
    if not re.fullmatch(r"\d*", db, re.ASCII):
        raise BadAddress(f"the db after {service!r} is not a number; wanted: {_SENTINEL}")
    options = _options(f"{base}://{login}-/{db}?{parts.query}")
    given = {name: options.pop(name) for name in list(options) if name.startswith("sentinel_")}
    if not given.keys() <= _OF_SENTINELS:
        raise BadAddress(
            "unknown option starting with sentinel_; use sentinel_username or sentinel_password"
        )
    of_sentinels = {name.removeprefix("sentinel_"): value for name, value in given.items()}
    # Sentinels get TLS and its certificates as well, but never the password of Redis.
    if base == "rediss":
        of_sentinels |= {n: value for n, value in options.items() if n.startswith("ssl_")}
        of_sentinels["ssl"] = True
    return Address("sentinel", places, service, _without_place(options), of_sentinels)


def _cluster(base: str, hosts: str, parts: SplitResult) -> Address:
    login, places = _places(hosts, "cluster")
    if parts.path.strip("/") not in ("", "0"):
        raise BadAddress(
            f"a db is given, but a cluster has only db 0; wanted: {_CLUSTER}; {_ENCODE}"
        )
    options = _options(f"{base}://{login}-/?{parts.query}")
    if options.pop("db", 0) != 0:
        raise BadAddress(f"a db is given, but a cluster has only db 0; wanted: {_CLUSTER}")
    return Address("cluster", places, options=_without_place(options))


def _split(url: str) -> tuple[str, SplitResult]:
    """Split a URL into its hosts and the rest, parsed with a placeholder as the host."""
    # Newer Pythons do not split a URL whose list of hosts contains [::1].
    scheme, _, rest = url.partition("://")
    hosts = re.split("[/?#]", rest, maxsplit=1)[0]
    return hosts, urlsplit(f"{scheme}://-{rest[len(hosts) :]}")


def _places(netloc: str, kind: Kind) -> tuple[str, tuple[ServerAddress, ...]]:
    """Split hosts from what is before them: `user:password@` or nothing."""
    login, at, hosts = netloc.rpartition("@")
    places = []
    for host in hosts.split(","):
        match = _PLACE.fullmatch(host)
        port = int(match[3] or _DEFAULT_PORTS[kind]) if match else 0
        if match is None or not 0 < port <= 65_535:
            wanted = _SENTINEL if kind == "sentinel" else _CLUSTER
            raise BadAddress(f"the hosts cannot be parsed; wanted: {wanted}; {_ENCODE}")
        places.append(ServerAddress(match[1] or match[2], port))
    return login + at, tuple(places)


def _options(url: str) -> dict[str, Any]:
    try:
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        # the cause may quote a piece of the password
        raise BadAddress(
            f"not a Redis address, or an invalid option; {WANTED}; {_ENCODE}"
        ) from None
    return options


def _without_place(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("host", "port")}
