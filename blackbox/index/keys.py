"""Names of a shard's keys; the hash tag keeps all of them in one Redis Cluster slot."""

from __future__ import annotations

from blackbox.records.request import Shard

PREFIX = "blackbox:"
SENTINEL = b"~"
"""A member of `due` at +inf, not a request: without it the key was lost, however few are pending."""

IDS_SENTINEL = b"\xff"
"""A field that keeps `ids` in existence, not UTF-8 and so never a caller's id: without the key, it was lost."""


class Keys:
    """The keys of one shard, as bytes ready to be packed."""

    def __init__(self, shard: Shard) -> None:
        self.prefix = f"{PREFIX}{{{shard}}}:".encode()
        self.due = self.prefix + b"due"
        self.ids = self.prefix + b"ids"
        self.state = self.prefix + b"state"
        self.receipts = self.prefix + b"receipts"
        self.cold = self.prefix + b"cold"
        self.skip = self.prefix + b"skip"
        self.ignored = self.prefix + b"ignored"
        self.early = self.prefix + b"early"
        self.moved = self.prefix + b"moved"
        self.ended = self.prefix + b"ended"
        self.unwanted = self.prefix + b"unwanted"
        self.in_flight = self.prefix + b"in-flight"
        self.paused = self.prefix + b"paused"
        self.callers = self.prefix + b"callers"

    def message(self, member: bytes) -> bytes:
        return self.prefix + b"msg:" + member

    def of(self, caller: str) -> bytes:
        """The due times of a caller's pending requests, if these are counted."""
        return self.prefix + b"of:" + caller.encode()
