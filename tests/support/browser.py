"""A real headless Chromium, for the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_MS = 15_000


class NoChromium(Exception):
    """Chromium is not installed on this machine."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium; it sends no requests of its own."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise NoChromium("there is no Chromium on PATH; on Debian: apt-get install chromium")
    options = ["--no-sandbox", "--disable-dev-shm-usage", "--no-proxy-server"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        try:
            yield browser
        finally:
            browser.close()
