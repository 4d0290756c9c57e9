"""Bugs in `blackbox/formats`."""

from __future__ import annotations

from tests.mutations.bugs.bug import Bug, Change

BUGS = (
    Bug(
        "errors-explained-at-any-size",
        "Python's parser reads a record of 1 MB to name the wrong field. All callers wait.",
        (
            Change(
                "formats/json_object.py",
                "    if len(value) > MAX_EXPLAINED_BYTES:\n",
                "    if len(value) == -1:\n",
            ),
        ),
        (),
        ("tests/unit/test_countdown.py",),
    ),
    Bug(
        "numbers-read-by-python",
        "Python's parser reads each number of a record that orjson would change. All callers wait.",
        (
            Change(
                "formats/json_object.py",
                '    return asked | {"message": orjson.Fragment(_exact_message(asked, parts))}\n',
                "    number = orjson.Fragment\n"
                "    exact = json.loads(value, parse_int=number, parse_float=number)\n"
                '    return asked | {"message": exact["message"]}\n',
            ),
        ),
        (),
        ("tests/unit/test_countdown.py",),
    ),
    Bug(
        "headers-without-limit",
        "A request may have 70,000 headers, and Python code checks each of them.",
        (
            Change(
                "formats/countdown.py",
                "    if len(headers) + of_record > MAX_HEADERS:\n",
                "    if len(headers) == -1:\n",
            ),
        ),
        (),
        ("tests/unit/test_countdown.py",),
    ),
    Bug(
        "schedule-ids-without-limit",
        "The id of a schedule may have 1 MB, and takes several times as much in Redis.",
        (
            Change(
                "formats/scheduler.py",
                "    if key is not None and len(key) > MAX_ID_BYTES:\n",
                "    if key is not None and len(key) == -1:\n",
            ),
        ),
        (),
        ("tests/unit/test_scheduler.py",),
    ),
    Bug(
        "tombstones-of-any-key",
        "A cancel with the headers of another schedule's message passes for the tombstone of a schedule, and is ignored.",
        (
            Change(
                "formats/scheduler.py",
                "        return first_header(record.headers[::-1], KEY) in (None, record.key)\n",
                "        return True\n",
            ),
        ),
        (),
        ("tests/unit/test_scheduler.py",),
    ),
    Bug(
        "accepted-requests-judged-again",
        "Requests of the cold tier are judged again by the current BLACKBOX_MAX_COUNTDOWN_S.",
        (
            Change(
                "formats/format.py",
                "        unlimited._max_countdown_s = LONGEST_COUNTDOWN_S\n",
                "",
            ),
        ),
        (),
        ("tests/unit/test_promotion.py",),
    ),
    Bug(
        "records-of-tiny-headers",
        "A record may have 50,000 headers, each of which takes 25 bytes in Redis.",
        (
            Change(
                "formats/format.py",
                "    if record.value is None or count <= MAX_HEADERS:\n",
                "    if count:\n",
            ),
        ),
        (),
        ("tests/unit/test_many_headers.py::test_a_record_has_a_thousand_headers_at_most",),
    ),
    Bug(
        "quick-records-of-tiny-headers",
        "A usual request, which is parsed the quick way, may have 50,000 headers.",
        (
            Change(
                "formats/countdown.py",
                "            has_all = has_all and len(headers) <= MAX_HEADERS\n",
                "",
            ),
        ),
        (),
        ("tests/unit/test_many_headers.py::test_a_usual_record_has_a_thousand_headers_at_most",),
    ),
)
