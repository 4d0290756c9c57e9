"""Texts that callers should not write, but may try."""

from __future__ import annotations

from hypothesis import strategies as st

ESCAPE = "\x1b"
TEXTS = (
    "two\nlines", "\r\n2026-01-01T00:00:00.000Z ERROR blackbox.run: forged", f"{ESCAPE}[2J{ESCAPE}[31m",
    f"{ESCAPE}]0;title\x07", "\x9b31m", "{TB-1}:due", "}:x", "blackbox:{TB-1}:due", "nul\x00nul",
    "\u202edesrever", "\u2028\u2029\x85", "<script>alert(1)</script>", "\"'`;--", "%s%n{0}{shard}",
    "${jndi:ldap://x}", "$\\frac{1}{2}$", "*?[a-z]", "../../etc/passwd", "x" * 10_000, "\U0001f4a3",
    "שלום", 'a="b",} 1', "[bold red]x[/]", "\x7f", "\ud800",
)  # fmt: skip

texts = st.one_of(
    st.sampled_from(TEXTS),
    st.text(max_size=40),
    st.text(alphabet="{}:\r\n\x00\x1b*-TB0123456789due", max_size=20),
)
