"""Bugs in `blackbox/api`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "tracebacks-of-strangers",
        "Each error of the HTTP layer logs a traceback, without a limit.",
        (
            Change(
                "api/connections.py",
                "_uvicorn.addFilter(LogLimit(range(logging.ERROR, logging.CRITICAL + 1)))  # those with a traceback\n",
                "",
            ),
        ),
        (),
        ("tests/service/test_connections.py",),
    ),
    Bug(
        "answers-without-a-bound",
        "Responses that clients do not read accumulate in memory.",
        (
            Change(
                "api/connections.py",
                "        self._bound_unread()\n",
                "",
            ),
        ),
        (),
        ("tests/service/test_connections.py",),
    ),
    Bug(
        "answers-made-ahead",
        "The next response to a pipelined request is made before the client has read the previous one.",
        (
            Change(
                "api/connections.py",
                "        if not self.flow.write_paused:\n            self._go_on()\n",
                "        self._go_on()\n",
            ),
        ),
        (),
        ("tests/service/test_connections.py",),
    ),
    Bug(
        "turns-awaited-by-any-number",
        "Any number of HTTP requests may wait for their turn. They occupy all connections, and probes are not answered.",
        (
            Change(
                "api/turns.py",
                "        if within_s is not None and self._waiting >= self._most_waiting:\n            raise _busy(busy)\n",
                "",
            ),
        ),
        (),
        ("tests/service/test_access_middleware.py",),
    ),
    Bug(
        "closing-letters-in-the-turns-of-changes",
        "Replays of dead letters that wait for an open transaction hold all turns of changes. Requests are answered with 503.",
        (
            Change(
                "api/dead_letters.py",
                "    closes = [places_body, Depends(turns.close_letters)]\n",
                "    closes = [places_body, Depends(turns.change)]\n",
            ),
        ),
        (),
        (
            "tests/unit/test_turns.py::test_dead_letters_that_wait_to_be_closed_do_not_delay_requests",
        ),
    ),
    Bug(
        "letters-counted-before-json",
        "The size of dead letters is limited before JSON escapes them. Control characters make the response six times too large.",
        (
            Change(
                "api/dead_letters.py",
                "            letters=[LetterState.of(one, most_sent_bytes, with_record=is_operator) for one in found]\n",
                "            letters=[LetterState.of(one, with_record=is_operator) for one in found]\n",
            ),
        ),
        (),
        ("tests/service/test_access_middleware.py",),
    ),
    Bug(
        "turn-held-while-streaming",
        "Eight clients that read schedules slowly block all other reads.",
        (
            Change(
                "api/schedules.py",
                '    @router.get("/schedules", response_model=list[Schedule])\n',
                '    @router.get("/schedules", dependencies=looks, response_model=list[Schedule])\n',
            ),
        ),
        (),
        ("tests/service/test_access_middleware.py",),
    ),
    Bug(
        "schedules-read-ahead",
        "The next page of schedules is read before the client has received the previous one.",
        (
            Change(
                "api/schedules.py",
                '        yield b"\\n"  # returns when the client has taken the page\n',
                "",
            ),
        ),
        (),
        ("tests/service/test_access_middleware.py",),
    ),
    Bug(
        "token-not-checked",
        "The HTTP API needs no token, although one is configured.",
        (
            Change(
                "api/access_middleware.py",
                "                self._access.check(request)\n",
                "",
            ),
        ),
        (),
        (
            "tests/service/test_access_middleware.py::test_every_route_except_the_open_ones_requires_a_token",
        ),
    ),
)
