"""The formats of request topics: how the bytes of a record become a Request, Cancel or Invalid.

A new format is a subclass of Format in a file of its own, and a line in FORMATS; see
`docs/adding-a-format.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from blackbox.formats.format import Format, Options

__all__ = ["FORMATS", "Format", "FormatDescription", "Options", "make_format"]

_BACKSLASH = ord("\\")


def _names_an_id(value: bytes | None) -> bool:
    if value is None:
        return False
    # JSON can also write the letters of a key as \u escapes
    return value.find(b'"id"') >= 0 or (_BACKSLASH in value and b"\\u" in value)


class FormatDescription(NamedTuple):
    """The properties of a format before its class, `module:name`, is loaded. The class may need a library.

    may_have_caller_id -- whether a record with this value may have a caller id; much quicker than
                          parsing, and True where only parsing can decide
    is_schedule        -- a delivery also writes the tombstone of its record, as compaction needs
    has_output_topic   -- messages go to the deployment's topic for answers, not to one that they name
    """

    class_path: str
    may_have_caller_id: Callable[[bytes | None], bool] = lambda value: True
    is_schedule: bool = False
    has_output_topic: bool = False


FORMATS = {
    "countdown": FormatDescription("blackbox.formats.countdown:Countdown", _names_an_id),
    "scheduler": FormatDescription("blackbox.formats.scheduler:Scheduler", is_schedule=True),
    "future": FormatDescription("blackbox.formats.future:Future", lambda value: False),
    "timer": FormatDescription("blackbox.formats.timer:Timer", has_output_topic=True),
}
"""By the name in BLACKBOX_REQUEST_TOPICS."""


def make_format(name: str, options: Options) -> Format:
    """The format of this name. Raises KeyError for an unknown one."""
    module, _, cls = FORMATS[name].class_path.partition(":")
    made: Format = getattr(import_module(module), cls)(options)
    return made
