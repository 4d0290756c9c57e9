"""The phases of a round: schedule, drain, lateness, and a kill in the middle of a drain."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from bench.peers.contestant import Contestant, NotMeasured, Plan, Site
from bench.peers.processes import Clock
from bench.peers.results import (
    Executions,
    Kill,
    Late,
    Round,
    Tally,
    first_executions,
    percentile,
    round_down,
    tally,
)

# Within Redis for every contestant: blackbox keeps requests that are due in more than a day elsewhere.
FAR_S = 7200
PROBES = 200
TRIAL = 1000
PATIENCE_S = 20.0
# After the time in which lost work returns: until nothing was executed for so long.
SETTLE_S = 10.0
# Some repeat jobs for ever.
LONGEST_S = 300.0
DEADLINE_S = 120.0
SKIPPED_S = 3
RATES = (100, 1000)
NUMBERS = 10_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """`most` jobs in a phase, `seconds` for a phase, `late_s` of the lateness runs; whether workers are killed."""

    most: int
    seconds: float
    late_s: int
    kills: bool = True


class Phases:
    """The phases of one contestant. Each phase has numbers of its own."""

    def __init__(
        self, site: Site, one: Contestant, limits: Limits, say: Callable[[str], None]
    ) -> None:
        self._site, self._one, self._limits, self._say = site, one, limits, say
        self._next = 0
        self._redis = redis.Redis.from_url(site.stack.redis_url, socket_timeout=120)

    def calibrate(self) -> int:
        """How many jobs the contestant can schedule, and drain, within the time of a phase."""
        self._say("calibrating")
        try:
            self._begin()
            schedule_per_s, drain_per_s = self._drain_once(TRIAL)
        finally:
            self._finish()
        count = min(schedule_per_s, drain_per_s) * self._limits.seconds
        return max(100, min(self._limits.most, round_down(count)))

    def run(self, found: Round) -> None:
        """Fill in the figures. After a failure, those of the phases before it are kept."""
        try:
            self._schedule(found)
            self._begin()
            self._drain(found)
            for per_s in RATES:
                self._lateness(found, per_s)
            if self._limits.kills:
                self._kill(found)
        finally:
            self._finish()

    def _begin(self) -> None:
        """Start the workers, and wait until they execute."""
        self._one.clear()
        self._next = 0
        self._one.start()
        plan = self._plan(PROBES, due_ms=_whole_s(time.time() + 2))
        self._one.schedule(plan)
        # The first jobs wait until the workers are ready.
        if self._wait(plan, DEADLINE_S).distinct < plan.count:
            raise NotMeasured("its workers did not execute the first jobs; see its log")

    def _finish(self) -> None:
        self._one.end(signal.SIGTERM)
        self._one.close()

    def _plan(self, count: int, *, due_ms: int = 0, per_s: int = 0) -> Plan:
        plan = Plan(self._next, count, due_ms, per_s)
        self._next += count
        return plan

    def _schedule(self, found: Round) -> None:
        """The rate of the client, and the memory of pending jobs. No worker runs, if none is needed."""
        self._say("schedule")
        if self._one.needs_worker_to_schedule:
            self._begin()
        else:
            self._one.clear()
        plan = self._plan(found.count, due_ms=_whole_s(time.time() + FAR_S))
        before, in_kafka = self._used_memory(), self._one.kafka_bytes()
        scheduled = self._one.schedule(plan)
        found.schedule = plan.count / scheduled.seconds
        found.redis_bytes = max(0, self._used_memory() - before) / plan.count
        found.kafka_bytes = (self._one.kafka_bytes() - in_kafka) / plan.count
        if self._one.needs_worker_to_schedule:
            self._finish()

    def _used_memory(self) -> int:
        return int(self._redis.info("memory")["used_memory"])

    def _drain_once(self, count: int) -> tuple[float, float]:
        plan = self._plan(count, due_ms=_whole_s(time.time() + 5))
        scheduled = self._one.schedule(plan)
        done = self._wait(plan, PATIENCE_S)
        if not done.distinct:
            raise NotMeasured("its workers executed nothing")
        began_ms = max(plan.due_ms, int(done.at_ms.min()))
        seconds = max(0.05, (int(done.at_ms.max()) - began_ms) / 1000)
        return count / scheduled.seconds, done.distinct / seconds

    def _due_after(self, count: int, schedule_per_s: float | None) -> int:
        """An instant at which `count` jobs will have been scheduled."""
        needed_s = count / schedule_per_s if schedule_per_s else 10.0
        return _whole_s(time.time() + 3 + 1.5 * needed_s)

    def _drain(self, found: Round) -> None:
        self._say("drain")
        clock = Clock(self._site.stack, self._one.workers(), self._one.servers)
        plan = self._plan(found.count, due_ms=self._due_after(found.count, found.schedule))
        scheduled = self._one.schedule(plan)
        if time.time() * 1000 > plan.due_ms:
            found.notes.append("the last jobs of the drain were scheduled after they were due")
        done = self._wait(plan, PATIENCE_S)
        used = clock.read()
        if not self._one.client_is_worker:
            used["client"] = scheduled.cpu_s
        found.cpu_us = {name: seconds / plan.count * 1e6 for name, seconds in used.items()}
        self._add(found, done, plan)
        # The first execution of each job: what is repeated much later is not part of the drain.
        firsts = first_executions(done)
        took_s = max(0.001, (int(firsts.at_ms.max()) - plan.due_ms) / 1000)
        found.drain = firsts.distinct / took_s
        found.first_ms = float(firsts.at_ms.min() - plan.due_ms)

    def _lateness(self, found: Round, per_s: int) -> None:
        self._say(f"lateness at {per_s:,} per second")
        plan = self._plan(per_s * (SKIPPED_S + self._limits.late_s), per_s=per_s)
        scheduled = self._one.schedule(plan)
        done = self._wait(plan, PATIENCE_S)
        self._add(found, done, plan)
        measured = first_executions(done).of(plan.first + per_s * SKIPPED_S, plan.count)
        if not len(measured.number):
            found.notes.append(f"nothing was executed at {per_s:,} per second")
            return
        late_ms = measured.at_ms - measured.due_ms
        p50, p99 = percentile(late_ms, 0.5), percentile(late_ms, 0.99)
        got = plan.count / scheduled.seconds
        found.late.append(Late(plan.count, p50, p99, float(late_ms.max()), per_s, got))

    def _add(self, found: Round, done: Executions, plan: Plan) -> None:
        lost, doubled, early = tally(done, plan.count)
        found.lost += lost
        found.doubled += doubled
        found.early += early
        if early:
            found.earliest_ms = max(found.earliest_ms, int((done.due_ms - done.at_ms).max()))

    def _kill(self, found: Round) -> None:
        self._say("kill")
        count = found.count
        plan = self._plan(count, due_ms=self._due_after(count, found.schedule))
        base = self._one.executed()
        self._one.schedule(plan)
        deadline = plan.due_ms / 1000 + PATIENCE_S
        while self._one.executed() - base < count // 3 and time.time() < deadline:
            time.sleep(0.002)
        self._one.end(signal.SIGKILL)
        killed = time.time()
        before = min(self._one.executed() - base, count)
        self._one.start()
        done = self._wait(plan, SETTLE_S, until=killed + self._one.recovery_s)
        result: Tally = tally(done, count)
        firsts = first_executions(done)
        recovered_s = (
            max(0.0, int(firsts.at_ms.max()) / 1000 - killed) if len(firsts.number) else 0.0
        )
        found.kill = Kill(count, before, *result, recovered_s)

    def _wait(self, plan: Plan, patience_s: float, *, until: float = 0.0) -> Executions:
        """The executions of a phase: when all were executed, or after a time without any.

        With `until`, it also waits for executions that are repeated before that instant.
        """
        due_s = max(time.time(), plan.due_ms / 1000)
        seen, read, changed, until = -1, 0.0, due_s, max(until, due_s)
        while True:
            executed, now = self._one.executed(), time.time()
            if executed != seen:
                seen, changed = executed, max(now, changed)
            is_over = now - changed > patience_s or now > until + LONGEST_S
            is_near = executed >= plan.first + plan.count and now - read > 0.2
            # Reading all executions costs more than counting them.
            if now >= until and (is_over or is_near):
                found = self._one.executions().of(plan.first, plan.count)
                read = time.time()
                if is_over or found.distinct >= plan.count:
                    return found
            time.sleep(0.05)


def _whole_s(seconds: float) -> int:
    """Rounded up, in ms: the due times of some contestants are whole seconds."""
    return -int(-seconds // 1) * 1000
