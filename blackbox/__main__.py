"""`python -m blackbox` is `blackbox`."""

from __future__ import annotations

from blackbox.cli import app

app()
