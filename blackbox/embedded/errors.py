"""Errors of the embedded stack."""

from __future__ import annotations


class EmbeddedError(RuntimeError):
    """An embedded server cannot be started; the text says why and what to do next."""
