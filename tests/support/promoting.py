"""One promotion of every shard at a given time: a process that a test may kill."""

from __future__ import annotations

import sys

from blackbox.config.settings import load
from blackbox.config.wiring import kafka
from blackbox.engine.promoter import Promoter
from blackbox.journal.topics import Topics
from blackbox.records.errors import Fenced
from blackbox.records.request import Shard


def main(now_ms: int) -> None:
    settings = load()
    access = kafka(settings)
    promoter = Promoter(settings, access)
    for topic, count in Topics(access.admin()).partitions(list(settings.topics)).items():
        for partition in range(count):
            try:
                print(promoter.promote(Shard(topic, partition), now_ms), flush=True)
            except Fenced as reason:
                print(reason, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
