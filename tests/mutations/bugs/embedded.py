"""Bugs in `blackbox/embedded`, and in the demo that uses it."""

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
    Bug(
        "password-in-the-process-list",
        "The process list shows the password of the Redis of a demo to other users of the machine.",
        (
            Change(
                "demo/service.py",
                '            [*BLACKBOX, "run"],\n',
                '            ["env", f"BLACKBOX_REDIS_URL={stack.redis_url}", *BLACKBOX, "run"],\n',
            ),
        ),
        (),
        (
            "tests/service/test_demo.py"
            "::test_the_password_of_the_demos_redis_is_not_in_the_process_list",
        ),
    ),
)
