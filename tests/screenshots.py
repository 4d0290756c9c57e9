"""`python -m tests.screenshots FOLDER`: the page of a busy service, light and dark, wide and narrow."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Page

from blackbox.embedded import EmbeddedStack
from tests.support.browser import chromium
from tests.support.world import World, until

TARGETS = ("orders", "reminders", "invoices", "mails", "subscriptions")
CALLERS = ("shop", "billing", "crm", "loyalty", "support")
PENDING = 700
LIVELY_S = 100.0
FROZEN_S = 14.0
"""From the moment when one of the two services is frozen."""

WIDTHS = {1440: 1000, 390: 844}
COLOURS = 200
HOUR_S = 3600.0


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with EmbeddedStack() as stack, _world(stack) as world, chromium() as browser:
        config = stack.folder / "patient.properties"
        config.write_text("session.timeout.ms=45000\n")
        more: dict[str, Any] = {"retries": 1, "kafka_config": config}
        first, second = [world.start_service(**more) for _ in range(2)]
        for service in (first, second):
            service.wait_ready()
        until("each has shards", lambda: first.metric("blackbox_shard_open") == 2)
        with httpx.Client(base_url=first.address, trust_env=False, timeout=30) as client:
            _prepare(world, client)
            page = browser.new_page(color_scheme="light", device_scale_factor=1)
            page.goto(first.address)
            random = Random(7)
            frozen = False
            began = time.monotonic()
            while (passed_s := time.monotonic() - began) < LIVELY_S:
                _ask(client, random, _wave(passed_s))
                if passed_s > LIVELY_S - FROZEN_S and not frozen:
                    second.freeze()
                    frozen = True
                page.wait_for_timeout(500)
            for width, height in WIDTHS.items():
                page.set_viewport_size({"width": width, "height": height})
                for scheme in ("light", "dark"):
                    _shoot(page, scheme, folder / f"{width}-{scheme}.png")
        second.thaw()


def _world(stack: EmbeddedStack) -> World:
    folder = stack.folder / "world"
    folder.mkdir()
    world = World(stack.kafka, stack.redis, folder)
    world.requests, world.dead_letters, world.targets = "TB", "blackbox.dead-letters", [*TARGETS]
    return world


def _prepare(world: World, client: httpx.Client) -> None:
    """Requests that are pending for hours, and dead letters."""
    random = Random(11)
    for place, caller in enumerate(CALLERS):
        due_s = [_due_s(random) for _ in range(PENDING // (place + 2))]
        asked = [_request(random, s, id=f"{caller}-{n}") for n, s in enumerate(due_s)]
        _post(client, caller, *asked)
    for caller, topic in (("crm", "newsletter"), ("shop", "order-events"), ("crm", "newsletter")):
        _post(client, caller, _request(random, 0.0, topic=topic))
    _post(client, "loyalty", _request(random, 0.0, expires_after=0.001))
    soon = json.dumps(_request(random, 0.0) | {"countdown": "soon"})
    for value in ('{"topic": "orders", "message"', soon):
        world.send_raw(value, [("CALLER_SERVICE", "support")])
    world.flush()
    until("dead letters", lambda: len(client.get("/dead-letters").json()["letters"]) >= 5)


def _due_s(random: Random) -> float:
    """Some hours from now, more at some of them."""
    hump_s = random.choice((0.6, 2.2, 2.3, 4.0, 4.1, 9.0)) * HOUR_S
    return max(120.0, random.gauss(hump_s, 0.4 * HOUR_S))


def _wave(passed_s: float) -> int:
    """How many requests in half a second: a load that rises and falls."""
    return int(30 + 25 * (1 + (passed_s % 50) / 50) * (passed_s % 23 > 6))


def _ask(client: httpx.Client, random: Random, many: int) -> None:
    lines = [json.dumps(_request(random, random.uniform(0.5, 4))) for _ in range(many)]
    _post(client, random.choice(CALLERS), *lines)


def _request(random: Random, countdown: float, **more: Any) -> dict[str, Any]:
    request = {"topic": random.choice(TARGETS), "message": {"order": random.randrange(10_000)}}
    return request | {"countdown": countdown} | more


def _post(client: httpx.Client, caller: str, *requests: Any) -> None:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in requests]
    answer = client.post(
        "/requests/bulk", content="\n".join(lines), headers={"CALLER_SERVICE": caller}
    )
    assert answer.status_code == 201, answer.text


def _shoot(page: Page, scheme: Any, path: Path) -> None:
    page.emulate_media(color_scheme=scheme)
    page.wait_for_timeout(700)
    taken = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    taken.convert("RGB").quantize(COLOURS, kmeans=1, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    print(path, path.stat().st_size // 1000, "kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
