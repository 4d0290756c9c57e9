"""Realistic bugs, each as a change of the product's source text.

Each of them has lost or duplicated messages of a system like this one.
"""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """In a file of the package, a text that occurs once, and its replacement."""

    file: str
    old: str
    new: str


class Bug(NamedTuple):
    """`tests` are run if the tests without servers find nothing; () if these must find the bug. Functions among
    them, `file::test`, are run first until the page names the tests that found the bug.

    `faults` of the chaos suite are played one after the other, and may also show the bug.
    """

    name: str
    what: str
    changes: tuple[Change, ...]
    faults: tuple[str, ...]
    tests: tuple[str, ...] = ("tests/service/test_exactly_once.py",)
