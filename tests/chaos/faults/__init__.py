"""All faults. A fault is a function of a scene that breaks something and repairs it."""

from __future__ import annotations

from tests.chaos.faults import (
    binding,
    brokers,
    clocks,
    crashes,
    failover,
    kafka,
    low_water,
    mixed,
    network,
    records,
    redis,
    services,
    spark,
    topics,
)
from tests.chaos.faults.fault import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for group in (
        services,
        crashes,
        network,
        redis,
        low_water,
        failover,
        clocks,
        topics,
        records,
        binding,
        mixed,
        kafka,
        brokers,
        spark,
    )
    for fault in group.FAULTS
}
