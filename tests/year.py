"""A world whose clock the test turns: months pass in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import redis
from confluent_kafka import Message

from blackbox.connect import formats, kafka
from blackbox.dispatch import Dispatch
from blackbox.doubt import Doubt
from blackbox.endings import Endings
from blackbox.index.connection import pool
from blackbox.index.inspector import Inspector
from blackbox.index.shard_index import ShardIndex
from blackbox.intake import Intake
from blackbox.journal.shard_journal import ShardJournal
from blackbox.journal.targets import Targets
from blackbox.journal.topics import OwnTopics
from blackbox.journal.writer import Writer
from blackbox.promoter import Promoter
from blackbox.recovery import Recovery
from blackbox.request import Shard
from blackbox.sorting import Sorting
from tests.world import World, each_of, read_all, until

HORIZON_S = 3600
HOUR_MS = 3_600_000
YEARS_S = 315_360_000
"""Nothing is written again for its age, unless Kafka would remove it."""

DAY_MS = 24 * HOUR_MS


class Year:
    """A world whose clock the test turns: its shards are opened, filled and emptied at any time."""

    def __init__(self, world: World, horizon_s: int = HORIZON_S) -> None:
        self.world = world
        kept = {"hot_horizon_s": horizon_s, "renew_after_s": YEARS_S}
        self.environment = world.environment(**kept)
        self.settings = world.settings(**kept)
        self.access = kafka(self.settings)
        self.client = redis.Redis.from_url(world.redis.url)
        self.shards = [Shard(world.requests, 0)]
        self.began_ms = time.time_ns() // 1_000_000
        topics = OwnTopics(self.access, [world.requests], world.dead_letters)
        topics.ensure()
        until("its shard has a leader", self._has_leader)

    def _has_leader(self) -> bool:
        journal = ShardJournal(self.shards[0], self.access)
        try:
            return journal.request_bounds().end == journal.receipt_bounds().end == 0
        except Doubt:
            return False
        finally:
            journal.close()

    def ask(
        self, body: str, due_ms: int, *, id: str | None = None, partition: int = 0, **more: object
    ) -> None:
        request: dict[str, object] = {"topic": self.world.targets[0], "message": body, "at": due_ms}
        named = {"id": id} if id else {}
        self.world.send_raw(json.dumps(request | named | more), [], partition)

    def cancel(self, id: str, partition: int = 0) -> None:
        self.world.send_raw(json.dumps({"id": id, "cancel": True}), [], partition)

    def pass_to(self, now_ms: int) -> None:
        """Open every shard at that time and deliver all that is due."""
        self.world.flush()
        for shard in self.shards:
            self._live(shard, now_ms)

    def _live(self, shard: Shard, now_ms: int) -> None:
        connections = pool(self.world.redis.url)
        index = ShardIndex(shard, connections, grace_s=self.settings.grace_s)
        journal = ShardJournal(shard, self.access)
        uncommitted = ShardJournal(shard, self.access, isolation="read_uncommitted")
        writer = Writer(shard, self.access, exactly_once=True)
        intake = Intake(formats(self.settings)[shard.topic], index, self.settings.horizon_ms)
        try:
            Recovery(
                shard=shard,
                group=self.settings.group_id,
                index=index,
                journal=journal,
                writer=writer,
                confirm=lambda: None,
                apply=lambda batch, opening: intake.apply(batch, now_ms, opening),
                ahead=lambda batch: intake.upcoming(batch, now_ms),
                now_ms=lambda: now_ms,
            ).open()
            sorting = Sorting(
                shard=shard,
                targets=Targets(self.access),
                journal=journal,
                reread=intake.reread,
                dead_letter_topic=self.world.dead_letters,
                endings=Endings(shard, formats(self.settings)[shard.topic], uncommitted),
            )
            dispatch = Dispatch(index, writer, sorting)
            while dispatch.tick(now_ms).is_full:
                pass
        finally:
            for part in (index, journal, writer, uncommitted):
                part.close()
            connections.disconnect()

    def promote(self, now_ms: int) -> int:
        """How many came near."""
        self.world.flush()
        promoter = Promoter(self.settings, self.access)
        try:
            return sum(promoter.promote(shard, now_ms).near for shard in self.shards)
        finally:
            promoter.close()

    def promote_killed(self, now_ms: int, after_s: float) -> None:
        """A promotion that may be killed half-way."""
        command = [sys.executable, "-m", "tests.promoting", str(now_ms)]
        with (self.world.folder / "promoting.log").open("ab") as log:
            running = subprocess.Popen(
                command, env=os.environ | self.environment, stdout=log, stderr=log
            )
        try:
            running.wait(after_s)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()

    def standing(self, shard: int = 0) -> tuple[int, int]:
        """Entries in Redis, and requests in the cold tier."""
        inspector = Inspector(self.client.connection_pool)
        found = inspector.standing(self.shards[shard], 0)
        assert len(inspector.cold(self.shards[shard])[1]) == found.cold
        return found.pending, found.cold

    def forget(self) -> None:
        for key in self.client.scan_iter(f"blackbox:{{{self.world.requests}-*"):
            self.client.delete(key)

    def delivered(self) -> list[str]:
        return sorted((m.value() or b"").decode() for m in self.messages())

    def counts(self, most: int) -> bytearray:
        """How often each of these many numbers was delivered."""
        counts = bytearray(most)
        for message in each_of(self.world.kafka.bootstrap_servers, self.world.targets[0]):
            counts[int(message.value() or b"")] += 1
        return counts

    def redis_bytes(self) -> int:
        memory: Any = self.client.info("memory")
        return int(memory["used_memory"])

    def messages(self, topic: str | None = None) -> list[Message]:
        return read_all(self.world.kafka.bootstrap_servers, topic or self.world.targets[0])
