"""Run the demo, from the first server to the verdict."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from blackbox.client.request_writer import RequestWriter
from blackbox.demo.display import DemoProgress, Display
from blackbox.demo.script import CALLERS, TARGETS, ExpectedOutcome, ScriptedRecord, write_script
from blackbox.demo.service import STOP_GRACE_S, DemoAudit, DemoService
from blackbox.demo.verdict import DemoVerdict, Tally, percentile
from blackbox.demo.witness import Witness, create_topics
from blackbox.embedded import EmbeddedStack
from blackbox.spark import missing_packages

REQUEST_TOPIC = "TB"
DEAD_LETTER_TOPIC = "blackbox.dead-letters"
WATCHED = (REQUEST_TOPIC, *TARGETS, DEAD_LETTER_TOPIC)
TARGET_PARTITIONS = 4
DRAWN_EVERY_S = 0.2
RATE_OVER_S = 1.0
# After the last due time, for messages that must not come: cancelled ones and duplicates.
QUIET_S = 1.0
OVERTIME_S = 30.0


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo run. `began_s` is when the command was started, epoch seconds."""

    requests: int
    seconds: float
    engine: str
    keep: bool
    began_s: float
    report: Path

    def perform(self, display: Display) -> bool:
        """Run the demo; returns whether both verdicts are good. Leaves no process behind, however it ends."""
        script = write_script(self.requests, self.seconds)
        display.title(
            f"{self.requests:,} requests by {len(CALLERS)} services, due within {self.seconds:g} s"
        )
        with ExitStack() as ending:
            stack = self._start_servers(display, ending)
            service = self._start_service(stack, display, ending)
            self._watch(script, stack, service, display)
            with display.step("reading everything back with an independent consumer") as say:
                verdict = read_back(script, stack.bootstrap_servers)
                say("read everything back with an independent consumer")
            first_s = verdict.first_ms / 1000 - self.began_s if verdict.first_ms else None
            display.verdict(verdict, first_s)
            is_clean = self._audit(stack, display, ending)
            if self.keep:
                display.addresses(stack.bootstrap_servers, stack.redis_url, service.http)
                with suppress(KeyboardInterrupt):
                    Event().wait()
        return verdict.is_good and is_clean

    def _start_servers(self, display: Display, ending: ExitStack) -> EmbeddedStack:
        with display.step("starting Kafka and Redis") as say:
            stack = EmbeddedStack(progress=_fetching(display))
            # Before the start: Ctrl-C may come while only one of the servers runs.
            ending.callback(stack.stop)
            stack.start()
            # Targets are callers' topics: blackbox creates only its own.
            create_topics(stack.bootstrap_servers, TARGETS, TARGET_PARTITIONS)
            say(f"Kafka at {stack.bootstrap_servers}, Redis at port {stack.redis.port}")
        return stack

    def _start_service(
        self, stack: EmbeddedStack, display: Display, ending: ExitStack
    ) -> DemoService:
        with display.step("starting blackbox") as say:
            service = DemoService(stack, engine=self.engine)
            ending.callback(service.stop, STOP_GRACE_S)
            service.wait_ready()
            say(f"blackbox on {self.engine} at {service.http}, all shards open")
        return service

    def _audit(self, stack: EmbeddedStack, display: Display, ending: ExitStack) -> bool:
        """Audit journals, index and targets; returns whether they agree, or True if Spark is not installed."""
        if missing := missing_packages():
            install = "pip install '.[spark]' in a checkout of blackbox"
            display.note(f"no audit, missing {', '.join(missing)}: {install}")
            return True
        page = self.report.absolute()
        with display.step("auditing: requests, receipts, Redis and targets, on Spark") as say:
            audit = DemoAudit(stack, page)
            ending.callback(audit.kill)
            found = audit.verdict()
            say(f"audit: {_audit_summary(found)}")
        display.page(page)
        return not found["by_kind"]

    def _watch(
        self,
        script: Sequence[ScriptedRecord],
        stack: EmbeddedStack,
        service: DemoService,
        display: Display,
    ) -> None:
        # The witness reads before the first request is sent, so lateness is shown as it happens.
        with watched(script, stack.bootstrap_servers) as tally, display.watching():
            meter = _Meter(script, tally)
            for asked in send(script, stack.bootstrap_servers):
                meter.sent = asked
                if time.monotonic() - meter.read_s >= DRAWN_EVERY_S:
                    display.show(meter.read())
            deadline = time.monotonic() + self.seconds + OVERTIME_S
            quiet_from = time.monotonic() + self.seconds + QUIET_S
            while time.monotonic() < deadline and service.is_running:
                display.show(progress := meter.read())
                if progress.pending == 0 and time.monotonic() > quiet_from:
                    break
                time.sleep(DRAWN_EVERY_S)
            display.show(meter.read(), is_last=True)
        if not service.is_running:
            display.note(f"the service exited unexpectedly; the end of its log:\n{service.tail()}")


def send(script: Sequence[ScriptedRecord], bootstrap_servers: str) -> Iterator[int]:
    """Write the script as its callers would; yields how many requests the clients have taken."""
    with ExitStack() as clients:
        of: dict[str, RequestWriter] = {}
        for caller in CALLERS:
            asker = RequestWriter(
                bootstrap_servers, caller=caller.name, request_topic=REQUEST_TOPIC
            )
            of[caller.name] = clients.enter_context(asker)
        sent = 0
        for line in script:
            # Without the first header, CALLER_SERVICE, which the client writes itself. The id is
            # the key, so a cancel lands in the partition of its request.
            of[line.caller].write(line.value, key=line.caller_id, headers=line.headers[1:])
            sent += line.expected is not ExpectedOutcome.CANCEL
            yield sent


@contextmanager
def watched(script: Sequence[ScriptedRecord], bootstrap_servers: str) -> Iterator[Tally]:
    """A tally that a thread fills until the context ends."""
    tally = Tally(script, REQUEST_TOPIC)
    ended = Event()
    witness = Witness(bootstrap_servers, WATCHED)

    def follow() -> None:
        while not ended.is_set():
            for seen in witness.read(0.1):
                tally.take(seen)
        witness.close()

    thread = Thread(target=follow, name="witness", daemon=True)
    thread.start()
    try:
        yield tally
    finally:
        ended.set()
        thread.join(5)


def read_back(script: Sequence[ScriptedRecord], bootstrap_servers: str) -> DemoVerdict:
    """The verdict of a new consumer that knows only what was sent."""
    tally = Tally(script, REQUEST_TOPIC)
    with closing(Witness(bootstrap_servers, WATCHED)) as witness:
        for seen in witness.read_to_end():
            tally.take(seen)
    return tally.verdict()


class _Meter:
    """Computes the progress from what the callers sent and the witness read."""

    def __init__(self, script: Sequence[ScriptedRecord], tally: Tally) -> None:
        self._tally = tally
        self._requests = sum(line.expected is not ExpectedOutcome.CANCEL for line in script)
        self._wanted = sum(line.expected is ExpectedOutcome.DELIVERED for line in script)
        self._outcomes = sum(
            line.expected in (ExpectedOutcome.DELIVERED, ExpectedOutcome.DEAD) for line in script
        )
        self._began = self.read_s = time.monotonic()
        self._counted = (self._began, 0)
        self._history: deque[tuple[float, int]] = deque([(self._began, 0)])
        self.sent = 0

    def read(self) -> DemoProgress:
        now = self.read_s = time.monotonic()
        delivered, dead = self._tally.delivered, self._tally.dead
        # The time of the last delivery, or the rate of the whole run would fall after its end.
        if delivered > self._counted[1]:
            self._counted = (now, delivered)
        self._history.append((now, delivered))
        while len(self._history) > 1 and now - self._history[1][0] >= RATE_OVER_S:
            self._history.popleft()
        late_ms = self._tally.late_ms
        return DemoProgress(
            elapsed_s=now - self._began,
            requests=self._requests,
            wanted=self._wanted,
            sent=self.sent,
            pending=max(0, min(self.sent, self._outcomes) - delivered - dead),
            delivered=delivered,
            dead=dead,
            p50_ms=percentile(late_ms, 0.5),
            p99_ms=percentile(late_ms, 0.99),
            per_second=self._per_second(),
        )

    def _per_second(self) -> float:
        """Deliveries per second: over the last second, or over the whole run once none arrive."""
        (then, before), (at, delivered) = self._history[0], self._counted
        if delivered == before:
            then, before = self._began, 0
        return (delivered - before) / (at - then) if at > then else 0.0


def _audit_summary(audit: dict[str, Any]) -> str:
    requests = sum(audit["states"].values())
    if not audit["by_kind"]:
        return f"each of {requests:,} requests has exactly one state, no exceptions"
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in audit["by_kind"].items())
    return f"exceptions in {requests:,} requests: {kinds}"


def _fetching(display: Display) -> Callable[[str], None]:
    def note(text: str) -> None:
        if text.startswith("fetching"):
            display.note(text)

    return note
