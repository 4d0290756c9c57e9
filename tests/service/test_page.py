"""The page in a real Chromium, of a real service: what it shows, and what its buttons do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import NewTopic
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page, expect

import blackbox
from blackbox.embedded import EmbeddedStack
from tests.conftest import missing_tool
from tests.support.browser import DEADLINE_MS, NoChromium, chromium
from tests.support.world import ServiceProcess, World, read_all, until

pytestmark = pytest.mark.service

PAGE = Path(blackbox.__file__).parent / "api" / "page"
HOSTILE = "<img src=x onerror=alert(1)>"
LOOK, CHANGE = "l" * 16, "c" * 16
NO_ANSWER = re.compile(r"Failed to load resource: (net::|the server responded with a status of 4)")
"""Console messages of Chromium for answers that a test provoked; the page shows them as text."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=DEADLINE_MS)
    try:
        with chromium() as browser:
            yield browser
    except NoChromium as none:
        missing_tool(str(none))


@pytest.fixture(scope="module")
def world(stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One service for all tests here, each of which has its own callers."""
    with World(stack.kafka, stack.redis, tmp_path_factory.mktemp("page")) as world:
        yield world


@pytest.fixture(scope="module")
def service(world: World) -> ServiceProcess:
    return world.start_service(retries=0).wait_ready()


@pytest.fixture(scope="module")
def api(service: ServiceProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.address, trust_env=False, timeout=30) as client:
        yield client


class Watched:
    """Pages of the browser, with their requests, console messages and blocked content."""

    def __init__(self, browser: Browser) -> None:
        self._context = browser.new_context(viewport={"width": 1440, "height": 1000})
        self._context.set_default_timeout(DEADLINE_MS)
        self.asked: set[str] = set()
        self.faults: list[str] = []
        self._context.on("request", lambda request: self.asked.add(request.url))
        self._context.on("console", self._record)
        self._context.on("weberror", lambda error: self.faults.append(str(error.error)))
        self._context.on("dialog", self._stopped)

    def open(self, address: str, **media: Any) -> Page:
        page = self._context.new_page()
        page.emulate_media(**media)
        page.goto(address)
        return page

    def close(self) -> None:
        self._context.close()

    def _record(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not NO_ANSWER.match(message.text):
            self.faults.append(message.text)

    def _stopped(self, dialog: Dialog) -> None:
        self.faults.append(f"{dialog.type}: {dialog.message}")
        dialog.dismiss()


@pytest.fixture
def watched(browser: Browser, service: ServiceProcess) -> Iterator[Watched]:
    """After each test: only the service got requests, and the console has no error."""
    watched = Watched(browser)
    yield watched
    watched.close()
    assert {httpx.URL(url).host for url in watched.asked} <= {httpx.URL(service.address).host}
    assert watched.faults == []


@pytest.fixture
def page(watched: Watched, service: ServiceProcess) -> Page:
    return watched.open(service.address)


def ask(api: httpx.Client, world: World, caller: str, **more: object) -> str:
    request = {"topic": world.targets[0], "message": "hi", "countdown": 3600} | more
    answer = api.post("/requests", json=request, headers={"CALLER_SERVICE": caller})
    assert answer.status_code == 201, answer.text
    [id] = answer.json()["ids"]
    until("it is stored", lambda: state(api, id) != "unread")
    return str(id)


def state(api: httpx.Client, id: str) -> str:
    return str(api.get(f"/requests/{id}").json()["state"])


def press(place: Page | Locator, name: str | re.Pattern[str]) -> None:
    place.get_by_role("button", name=name, exact=isinstance(name, str)).click()


def requests(page: Page) -> Locator:
    return page.locator("#requests tr")


def search(page: Page, **fields: str) -> None:
    names = {"id": "Id", "target": "Target topic", "caller": "Caller"}
    for field, name in names.items():
        page.locator("#search").get_by_label(name).fill(fields.get(field, ""))
    press(page, "Search")
    expect(page.locator("#requests")).to_have_attribute("aria-busy", "false")


def letters(page: Page, text: str) -> Locator:
    return page.locator("#letters tr").filter(has_text=text)


def dead(api: httpx.Client, world: World, caller: str, *topics: str) -> list[dict[str, Any]]:
    """Dead letters of this caller, whose targets do not exist."""
    for topic in topics:
        ask(api, world, caller, topic=topic, countdown=0)

    def all_there() -> list[dict[str, Any]]:
        found = api.get("/dead-letters", params={"is_open": False}).json()["letters"]
        own = [letter for letter in found if letter.get("caller") == caller]
        return own if len(own) == len(topics) else []

    return until("the dead letters", all_there)


def test_a_sent_request_is_pending_and_found_by_id_topic_and_caller(
    world: World, page: Page, api: httpx.Client
) -> None:
    press(page, "Send a request")
    form = page.get_by_role("dialog", name="Send a request")
    form.get_by_label("Target topic").fill(world.requests)
    form.get_by_label("Message").fill("plain text")
    expect(form.get_by_text("Sent as text")).to_be_visible()
    form.get_by_label("Message").fill('{"long": 10000000000000000000001}')
    expect(form.get_by_text("Sent as JSON")).to_be_visible()
    form.get_by_label("Countdown").fill("3600")
    form.get_by_label("Caller").fill("sender")
    form.get_by_label("Your own id").fill("order/17")
    press(form, "Send")
    expect(form.get_by_role("alert")).to_contain_text("use another topic")
    form.get_by_label("Target topic").fill(world.targets[1])
    press(form, "Send")
    expect(form).to_be_hidden()

    until("it is pending", lambda: state(api, "order/17") == "pending")
    found = api.get("/requests/order/17").json()
    assert (found["caller"], found["target"]) == ("sender", world.targets[1])
    press(page, "Show")
    expect(page.get_by_role("dialog", name="Request")).to_contain_text(found["id"])
    press(page.get_by_role("dialog"), "Close")
    press(page.locator("#message"), "Close")
    expect(page.locator("#message")).to_be_hidden()
    for fields in (
        {"id": "order/17"},
        {"id": found["id"]},
        {"caller": "sender"},
        {"target": world.targets[1], "caller": "sender"},
    ):
        search(page, **fields)
        expect(requests(page)).to_have_count(1)
        expect(requests(page)).to_contain_text(
            re.compile(r"in (59 min|1 h).*pending.*sender.*order/17")
        )
    search(page, caller="nobody")
    expect(page.get_by_text("None pending.")).to_be_visible()
    search(page, id="nobody")
    expect(page.locator("#requests-error")).to_contain_text("no request has this id")
    press(page, "Clear")
    expect(page.locator("#requests-error")).to_be_hidden()
    press(page, "Send a request")
    press(page.get_by_role("dialog"), "Close")


def test_a_message_is_delivered_as_it_was_typed(world: World, page: Page) -> None:
    press(page, "Send a request")
    form = page.get_by_role("dialog", name="Send a request")
    form.get_by_label("Target topic").fill(world.targets[1])
    form.get_by_label("Message").fill('{"long": 10000000000000000000001, "exact": 1.10}')
    form.get_by_label("Countdown").fill("0")
    press(form, "Send")
    [message] = until("it is delivered", lambda: world.received(world.targets[1]))
    assert message.value() == b'{"long":10000000000000000000001,"exact":1.10}'


def test_a_request_is_cancelled_only_after_confirmation(
    world: World, page: Page, api: httpx.Client
) -> None:
    id = ask(api, world, "fickle")
    search(page, caller="fickle")
    press(requests(page), "Cancel")
    question = page.get_by_role("dialog", name="Cancel this request?")
    expect(question).to_contain_text(world.targets[0])
    press(question, "No")
    expect(question).to_be_hidden()
    press(requests(page), "Cancel")
    page.keyboard.press("Escape")
    assert state(api, id) == "pending"

    press(requests(page), "Cancel")
    press(question, "Cancel it")
    expect(page.locator("#message")).to_contain_text(f"Cancelled: {id} will not be delivered.")
    expect(requests(page)).to_have_count(0)
    assert state(api, id) == "ended"


def test_a_cancel_that_comes_too_late_says_so(world: World, page: Page, api: httpx.Client) -> None:
    id = ask(api, world, "slow")
    search(page, id=id)
    press(requests(page), id)
    details = page.get_by_role("dialog", name="Request")
    expect(details).to_contain_text("slow")
    press(details, "Cancel this request")
    assert api.delete(f"/requests/{id}").json()["outcome"] == "cancelled"
    press(page.get_by_role("dialog", name="Cancel this request?"), "Cancel it")
    expect(page.locator("#message")).to_contain_text(
        f"Too late: {id} was cancelled or replaced before."
    )
    expect(requests(page)).to_contain_text("cancelled or replaced")


@pytest.mark.proof
def test_many_requests_are_listed_in_pages_and_by_due_time(
    world: World, page: Page, api: httpx.Client
) -> None:
    lines = [
        json.dumps({"topic": world.targets[0], "message": n, "countdown": 7900 + n, "id": f"m{n}"})
        for n in range(25)
    ]
    api.post("/requests/bulk", content="\n".join(lines), headers={"CALLER_SERVICE": "many"})
    search(page, caller="many")
    expect(requests(page)).to_have_count(10)
    press(page, "Next page")
    expect(page.get_by_role("button", name="m10", exact=True)).to_be_visible()
    press(page, "Next page")
    expect(requests(page)).to_have_count(5)
    press(page, "Previous page")
    expect(page.get_by_role("button", name="m10", exact=True)).to_be_visible()

    page.get_by_label("the next").select_option("24 hours")
    plot = page.get_by_role("slider", name=re.compile("by due time"))
    plot.focus()
    plot.press("ArrowRight")
    expect(page.locator("#due-plot output")).to_have_text(re.compile("overdue"))
    for _ in range(6):
        plot.press("ArrowRight")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"\d+:\d\d . \d+:\d\d: 25 due"))
    plot.press("Enter")
    expect(page.locator("#window")).to_contain_text("due ")
    expect(requests(page)).to_have_count(10)
    bar = page.locator("#due-plot .plot")
    bar.hover(position={"x": 80, "y": 60})
    expect(page.locator("#due-plot output")).to_have_text(re.compile(r"^\d+ overdue$"))
    bar.click(position={"x": 80, "y": 60})
    expect(page.locator("#window")).to_contain_text("overdue")
    press(page, "any due time")
    expect(page.locator("#window")).to_be_hidden()

    press(page.locator("#callers"), "many")
    expect(page.locator("#search").get_by_label("Caller")).to_have_value("many")
    press(page.locator("#targets"), world.targets[0])
    expect(page.locator("#search").get_by_label("Topic")).to_have_value(world.targets[0])
    expect(page.locator("#shards tr")).to_have_count(world.partitions)
    expect(page.locator("#shards")).to_contain_text("open")


def test_throughput_and_lateness_are_shown_live(
    world: World, page: Page, api: httpx.Client
) -> None:
    expect(page.locator("#rate")).to_have_text("0")
    for _ in range(20):
        api.post("/requests", json={"topic": world.targets[0], "message": 1, "countdown": 0})
    expect(page.locator("#late")).to_have_text(re.compile("s$"))
    expect(page.locator("#rate-plot output")).to_have_text(re.compile(r"now [\d.,]+ per second"))
    plot = page.get_by_role("slider", name=re.compile("^lateness"))
    plot.press("End")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"\d: p50 .*s, p99 .*s"))
    plot.press("Escape")
    expect(plot).to_have_attribute("aria-valuetext", re.compile("^now p50"))


def test_a_dead_letter_shows_its_reason_and_is_replayed(
    world: World, page: Page, api: httpx.Client
) -> None:
    topic = f"{world.name}.later"
    [letter] = dead(api, world, "reborn", topic)
    found = letters(page, "reborn")
    expect(found).to_contain_text(re.compile(f"unknown-topic.*does not exist.*{topic}.*reborn"))
    press(found, letter["source"])
    details = page.get_by_role("dialog", name="Dead letter")
    expect(details).to_contain_text('"message":"hi"')
    press(details, "Close")

    world.create(NewTopic(topic, 1))
    press(found, "Replay")
    question = page.get_by_role("dialog", name="Replay this dead letter?")
    press(question, "No")
    assert became(api, letter["place"]) is None
    press(found, "Replay")
    press(question, "Replay")
    expect(page.locator("#message")).to_contain_text("1 dead letter replayed.")
    expect(found).to_have_count(0)
    kafka = world.kafka.bootstrap_servers
    [message] = until("it is delivered", lambda: read_all(kafka, topic))
    assert message.value() == b"hi"


def became(api: httpx.Client, place: str) -> str | None:
    found = api.get("/dead-letters", params={"is_open": False}).json()["letters"]
    [letter] = [one for one in found if one["place"] == place]
    fate: str | None = letter.get("became")
    return fate


def test_dead_letters_are_discarded_and_remain_visible_on_request(
    world: World, page: Page, api: httpx.Client
) -> None:
    world.send_raw("no request", [("CALLER_SERVICE", b"vain")])
    world.flush()
    expect(letters(page, "vain")).to_contain_text("not-json")
    with page.expect_response(
        "**/dead-letters?*"
    ):  # its rows replace the buttons that were there before
        page.get_by_label("Reason").select_option("not-json")
    expect(letters(page, "unknown-topic")).to_have_count(0)
    press(letters(page, "vain"), "Discard")
    press(page.get_by_role("dialog", name="Discard this dead letter?"), "Discard")
    expect(page.locator("#message")).to_contain_text("1 dead letter discarded.")
    expect(letters(page, "vain")).to_have_count(0)
    page.get_by_label("also replayed and discarded").check()
    expect(letters(page, "vain")).to_contain_text("discarded")
    page.get_by_label("also replayed and discarded").uncheck()
    page.get_by_label("Reason").select_option("any")

    gone = [f"{world.name}.gone", f"{world.name}.away"]
    placed = [letter["place"] for letter in dead(api, world, "vain-too", *gone)]
    expect(letters(page, "vain-too")).to_have_count(2)
    press(page, "Replay all shown")
    press(page.get_by_role("dialog", name=re.compile(r"Replay \d+ dead letters\?")), "No")
    press(page, "Discard all shown")
    press(page.get_by_role("dialog", name=re.compile(r"Discard \d+ dead letters\?")), "Discard")
    expect(page.get_by_text("No open dead letters")).to_be_visible()
    assert [became(api, place) for place in placed] == ["discarded", "discarded"]


@pytest.mark.proof
def test_a_target_is_paused_and_resumed_only_after_confirmation(
    world: World, page: Page, api: httpx.Client
) -> None:
    target = world.targets[1]
    id = ask(api, world, "patient", topic=target)
    place = page.locator("#targets tr").filter(has_text=target)
    press(place, "Pause")
    press(page.get_by_role("dialog", name=f"Pause {target}?"), "No")
    assert target not in paused(api)
    press(place, "Pause")
    press(page.get_by_role("dialog", name=f"Pause {target}?"), "Pause")
    expect(page.locator("#message")).to_contain_text(f"{target} is paused.")
    expect(place).to_contain_text("paused")
    assert target in paused(api)
    due = ask(api, world, "prompt", topic=target, countdown=2)
    search(page, caller="prompt")
    expect(requests(page)).to_contain_text(re.compile(r"pending.*the target is paused"))
    press(requests(page), due)
    details = page.get_by_role("dialog", name="Request")
    expect(details).to_contain_text(re.compile(r"waits\s*the target is paused"))
    press(details, "Close")
    api.delete(f"/requests/{due}")
    press(place, "Resume")
    press(page.get_by_role("dialog", name=f"Resume {target}?"), "Resume")
    expect(page.locator("#message")).to_contain_text(f"{target} is resumed.")
    assert target not in paused(api)
    api.delete(f"/requests/{id}")


def paused(api: httpx.Client) -> list[str]:
    return [one["topic"] for one in api.get("/targets/paused").json()["paused"]]


def test_hostile_texts_are_text(world: World, page: Page, api: httpx.Client) -> None:
    ask(api, world, HOSTILE, id=HOSTILE, countdown=60)
    ask(api, world, HOSTILE, topic=f"{world.name}.no", key=HOSTILE, countdown=0)
    world.send_raw(f'{{"topic": "{HOSTILE}"', [("CALLER_SERVICE", HOSTILE)])
    world.flush()
    search(page, id=HOSTILE)
    expect(requests(page).get_by_role("button", name=HOSTILE)).to_be_visible()
    press(requests(page), HOSTILE)
    press(page.get_by_role("dialog"), "Close")
    press(requests(page), "Cancel")
    expect(page.get_by_role("dialog")).to_contain_text(HOSTILE)
    press(page.get_by_role("dialog"), "No")
    search(page, id=f"{HOSTILE}?")
    expect(page.locator("#requests-error")).to_contain_text(HOSTILE)
    expect(letters(page, HOSTILE)).to_have_count(2)
    press(letters(page, "not-json").last, re.compile("@"))
    press(page.get_by_role("dialog"), "Close")
    expect(page.locator("#callers")).to_contain_text(HOSTILE)
    assert page.locator("img").count() == 1
    assert page.locator("script").count() == 1


def test_text_of_callers_does_not_reorder_the_text_around_it(page: Page) -> None:
    ask = "text => import('/page/dom.js').then(dom => dom.element('p', {}, text).textContent)"
    assert page.evaluate(ask, "a\u202egnillib\u2066\u200b\x1b") == (
        r"a\u{202e}gnillib\u{2066}\u{200b}\u{1b}"
    )
    assert page.evaluate(ask, "two\nlines, שלום, \U0001f4a3") == "two\nlines, שלום, \U0001f4a3"


@pytest.fixture(scope="module")
def guarded(world: World) -> ServiceProcess:
    """A second service on the same shards, which requires a token."""
    return world.start_service(retries=0, api_token=CHANGE, api_read_token=LOOK).wait_ready()


@pytest.mark.proof
def test_a_missing_or_wrong_token_is_requested_again(
    world: World, watched: Watched, guarded: ServiceProcess, api: httpx.Client
) -> None:
    id = ask(api, world, "secretive")
    page = watched.open(guarded.address)
    dialog = page.get_by_role("dialog", name="Token required")

    def give(token: str) -> None:
        dialog.get_by_label("Token").fill(token)
        press(dialog, "Use it")

    expect(dialog).to_contain_text("BLACKBOX_API_READ_TOKEN")
    press(dialog, "Not now")
    expect(page.locator("#trouble")).to_contain_text("missing or invalid bearer token")
    press(page, "Enter a token")
    give("wrong" * 4)
    expect(dialog).to_contain_text("The token was rejected")
    give(LOOK)
    expect(dialog).to_be_hidden()
    search(page, id=id)
    expect(page.locator("#trouble")).to_be_hidden()
    press(requests(page), "Cancel")
    press(page.get_by_role("dialog"), "Cancel it")
    expect(dialog).to_contain_text("BLACKBOX_API_TOKEN")
    press(dialog, "Not now")
    expect(page.locator("#message")).to_contain_text("Not cancelled: this token permits reads only")
    press(requests(page), "Cancel")
    press(page.get_by_role("dialog"), "Cancel it")
    give(CHANGE)
    expect(page.locator("#message")).to_contain_text("Cancelled")
    assert state(api, id) == "ended"
    kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    assert page.evaluate(kept) == '[{},{},""]'


@pytest.mark.parametrize("path", [pytest.param("/", marks=pytest.mark.proof), "/docs"])
def test_the_page_fits_the_screen_of_a_phone(
    world: World, watched: Watched, service: ServiceProcess, api: httpx.Client, path: str
) -> None:
    ask(api, world, "w" * 120, id="i" * 200)
    dead(api, world, f"{path}wide" * 20, "t" * 200)
    page = watched.open(service.address + path)
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.locator("tbody tr").first).to_be_visible()
    if path == "/":
        search(page, id="i" * 200)
        expect(requests(page)).to_have_count(1)
        expect(letters(page, "unknown-topic").first).to_be_visible()
    widest = "Math.max(...[document.documentElement, ...document.querySelectorAll('.card, .scroll, .figures div')].map((one) => one.scrollWidth - one.clientWidth))"
    assert page.evaluate(widest) == 0


READABLE = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = rgb(colour).map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (rgb(colour)[3] === 255) return colour;
    }
  };
  const texts = [...document.querySelectorAll("body *")].filter((one) =>
    one.checkVisibility() && !one.disabled && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  return texts.map((one) => {
    const style = getComputedStyle(one);
    const [a, b] = [light(one instanceof SVGElement ? style.fill : style.color), light(behind(one))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.tagName, one.className, one.textContent.slice(0, 40)].map(String);
  }).filter(([contrast]) => contrast < 4.5);
}"""


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_light_and_dark_follow_the_browser_with_enough_contrast(
    world: World, watched: Watched, service: ServiceProcess, api: httpx.Client, path: str
) -> None:
    ask(api, world, "bright")
    dead(api, world, f"bright{path}", f"{world.name}.dark")
    page = watched.open(service.address + path, color_scheme="light")
    expect(page.locator("tbody tr").first).to_be_visible()
    if path == "/":
        expect(letters(page, "unknown-topic").first).to_be_visible()
        expect(page.locator("#due-plot text").first).to_be_visible()
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    assert page.evaluate(READABLE) == []
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(paper) != light
    assert page.evaluate(READABLE) == []


@pytest.mark.proof
def test_the_api_page_lists_every_operation_and_links_back(
    watched: Watched, page: Page, api: httpx.Client
) -> None:
    page.get_by_role("link", name="API").click()
    described = api.get("/openapi.json").json()["paths"]
    operations = page.locator(".operation")
    expect(operations).to_have_count(sum(len(methods) for methods in described.values()))
    cancel = operations.filter(has_text=re.compile(r"^DELETE/requests/\{id\}"))
    expect(cancel).to_contain_text("reports whether that was in time")
    cancel.get_by_role("link", name="CancelState").click()
    expect(page.locator("#CancelState")).to_contain_text("too-late")
    page.get_by_role("link", name="openapi.json").click()
    assert page.url.endswith("/openapi.json")
    page.go_back()
    page.get_by_role("navigation").get_by_role("link", name="Page").click()
    expect(page.get_by_role("heading", name="Dead letters")).to_be_visible()
    page.get_by_role("link", name="Metrics").click()
    assert page.url.endswith("/metrics")
    page.go_back()
    page.get_by_role("link", name="API").click()
    page.get_by_role("link", name="blackbox").click()
    expect(page.get_by_role("heading", name="Dead letters")).to_be_visible()


def test_only_files_of_the_page_are_served_with_security_headers_and_etags(
    api: httpx.Client,
) -> None:
    files = {f"/page/{path.name}" for path in PAGE.iterdir()} - {
        "/page/index.html",
        "/page/docs.html",
    }
    for path in sorted(files | {"/", "/docs"}):
        answer = api.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        again = api.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert api.head(path).headers["content-length"] == str(len(answer.content))
    assert api.get("/page/page.js").headers["content-type"] == "text/javascript; charset=utf-8"
    for path in ("/page/", "/page/../pages.py", "/page/%2e%2e/pages.py", "/page/nothing.js"):
        assert api.get(path).status_code == 404


def test_no_script_of_the_page_writes_html_or_stores_data() -> None:
    forbidden = r"(?:inner|outer|Adjacent)HTML|document\.write|\beval\b|Function\(|Storage|cookie"
    for script in PAGE.glob("*.js"):
        assert re.findall(forbidden, script.read_text()) == [], script.name


@pytest.mark.proof
def test_the_page_shows_that_the_service_does_not_answer(world: World, watched: Watched) -> None:
    mortal = world.start_service(retries=0).wait_ready()
    page = watched.open(mortal.address)
    trouble, status = page.locator("#trouble"), page.locator("#answering")
    expect(status).to_have_text(re.compile("answered at"))
    page.context.set_offline(True)
    expect(trouble).to_contain_text(re.compile(r"No answer since \d+:\d\d:\d\d, trying again"))
    expect(status).to_have_text("no answer")
    page.context.set_offline(False)
    expect(trouble).to_be_hidden()
    assert mortal.stop() == 0
    expect(trouble).to_contain_text("No answer since")
    search(page, caller="anybody")
    expect(page.locator("#requests-error")).to_have_text("the service does not answer")
