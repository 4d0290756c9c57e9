"""Bugs in `blackbox/embedded`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "kept-password-readable",
        "The password of the embedded Redis stays readable for others in a file that exists already.",
        (
            Change(
                "embedded/redis.py",
                "        configuration.chmod(0o600)  # touch leaves the mode of a file that exists\n",
                "",
            ),
        ),
        (),
        ("tests/embedded/test_redis.py",),
    ),
)
