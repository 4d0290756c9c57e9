"""An open transaction in a request topic hides later records of others: this is measured and reported."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from blackbox.config.wiring import kafka
from blackbox.engine.hidden_records import WARN_AFTER_S, HiddenRecords
from blackbox.engine.metrics import Metrics
from blackbox.records.request import Shard
from tests.support.world import World, until

pytestmark = pytest.mark.service


def test_an_open_transaction_is_reported_with_the_records_that_it_hides(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [1000.0]
    metrics = Metrics()
    shards = [Shard(world.requests, 0), Shard(world.requests, 1)]
    access = kafka(world.settings())
    hidden = HiddenRecords(access, metrics, lambda: shards, lambda: now_s[0])

    def seen(shard: Shard) -> tuple[float | None, float | None]:
        positions, value = {"shard": str(shard)}, metrics.registry.get_sample_value
        names = "blackbox_hidden_records", "blackbox_hidden_seconds"
        return value(names[0], positions), value(names[1], positions)

    def checked() -> tuple[float | None, float | None]:
        hidden.check()
        return seen(shards[0])

    world.ask(3, within_s=0, partition=0)
    assert until("it answers", lambda: checked()[0] is not None) is not None
    assert checked() == (0, 0)

    open_one = Producer(
        {"bootstrap.servers": world.kafka.bootstrap_servers, "transactional.id": world.name}
    )
    open_one.init_transactions(10)
    open_one.begin_transaction()
    open_one.produce(world.requests, "{}", partition=0)
    assert open_one.flush(10) == 0
    world.ask(4, within_s=0, partition=0)
    until("it is seen", lambda: checked() == (5, 0))
    now_s[0] += WARN_AFTER_S + 1
    assert checked() == (5, WARN_AFTER_S + 1)
    assert seen(shards[1]) == (0, 0)
    [told] = [r.getMessage() for r in caplog.records if r.name == "blackbox.engine.hidden"]
    assert (
        f"{shards[0]}: an open transaction has hidden 5 records (of all callers) from offset 3 on for 31 s"
        in told
    )

    open_one.abort_transaction(10)
    until("it has ended", lambda: checked() == (0, 0))
