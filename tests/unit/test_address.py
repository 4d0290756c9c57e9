"""Valid values of BLACKBOX_REDIS_URL, and the errors for others."""

from __future__ import annotations

import pytest

from blackbox.index.address import BadAddress, ServerAddress, read
from blackbox.index.connection import pool

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://redis", "redis:6379"),
        ("rediss://:hunter2@redis:6380/3", "redis:6380"),
        ("redis://[::1]:7000", "[::1]:7000"),
        ("unix:///run/redis.sock?password=hunter2", "/run/redis.sock"),
        (
            "redis+sentinel://:hunter2@one:1,two/shop?sentinel_password=hunter2",
            "shop (sentinels one:1, two:26379)",
        ),
        ("redis+cluster://:hunter2@one,[::1]:7001/", "the nodes of the cluster, one:6379, [::1]:7001"),
    ],
)  # fmt: skip
def test_a_printed_address_shows_the_servers_and_no_password(url: str, shown: str) -> None:
    assert str(read(url)) == shown
    assert SECRET not in repr(read(url))


def test_an_address_of_sentinels_is_parsed() -> None:
    address = read(
        "redis+sentinel://me:a%2Fb@one:1,two:2/shop/3?socket_timeout=9&sentinel_username=s"
    )
    assert address.kind == "sentinel"
    assert address.places == (ServerAddress("one", 1), ServerAddress("two", 2))
    assert address.service == "shop"
    assert address.options == {
        "username": "me", "password": "a/b", "db": 3, "socket_timeout": 9.0,
    }  # fmt: skip
    assert address.of_sentinels == {"username": "s"}


def test_tls_applies_to_sentinels_and_to_redis() -> None:
    address = read("rediss+sentinel://one/shop?ssl_ca_certs=/ca.pem")
    assert address.options["ssl_ca_certs"] == "/ca.pem"
    assert address.of_sentinels == {"ssl": True, "ssl_ca_certs": "/ca.pem"}


def test_the_nodes_of_a_cluster_share_a_login_and_options() -> None:
    address = read("redis+cluster://me:hunter2@one,two:7001?socket_timeout=9")
    assert address.places == (ServerAddress("one", 6379), ServerAddress("two", 7001))
    assert address.options == {"username": "me", "password": SECRET, "socket_timeout": 9.0}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis:6379", "scheme missing; wanted: redis://, rediss:// or unix://; redis+sentinel://"),
        ("http://redis", "scheme 'http'; wanted: redis://"),
        ("redis-cluster://redis", "scheme 'redis-cluster'; wanted: redis://"),
        (
            "redis+sentinel://one:26379",
            "the service name is missing; wanted: redis+sentinel://host:26379",
        ),
        ("redis+sentinel://one/shop/a", "the db after 'shop' is not a number; wanted: redis+"),
        ("redis+sentinel://one/my shop", "the service name may have only letters"),
        ("redis+sentinel://one/shop?sentinel_pass=x", "unknown option starting with sentinel_"),
        ("redis+sentinel:///shop", "the hosts cannot be parsed; wanted: redis+sentinel://host"),
        ("redis+cluster://one:99999", "the hosts cannot be parsed; wanted: redis+cluster://host"),
        ("redis+cluster://one,two:x", "the hosts cannot be parsed; wanted: redis+cluster://host"),
        ("redis+cluster://one/3", "a db is given, but a cluster has only db 0; wanted: redis+"),
        ("redis+cluster://one?db=3", "a db is given, but a cluster has only db 0; wanted: redis+"),
        ("redis://one:x", "not a Redis address, or an invalid option; wanted: redis://"),
        (
            "redis://one?socket_timeout=x",
            "not a Redis address, or an invalid option; wanted: redis://",
        ),
    ],
)
def test_a_bad_address_is_refused_with_what_is_expected(url: str, why: str) -> None:
    with pytest.raises(BadAddress) as refused:
        read(url)
    assert str(refused.value).startswith(why)


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel", "redis+cluster"])
def test_connections_do_not_print_their_password(scheme: str) -> None:
    connections = pool(f"{scheme}://me:{SECRET}@one:1/0")
    assert SECRET not in repr(connections)
