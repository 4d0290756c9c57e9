"""Hostile callers: valid, unusual, mutated and random records, in each format of a request topic."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from google.protobuf.message import Message

from blackbox.formats.proto import timer_pb2 as older
from blackbox.formats.proto import xray_pb2 as current
from blackbox.formats.proto.future_pb2 import Future
from blackbox.records.request import Shard, request_id

FAR_S = 86_400
NAMES = 50

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, 1e308, -1e308, 2**63, 2**64, 10**40, float("nan"), float("inf"),
    "", " ", "\x00", "\x1b[31m", "\u202e", "\ud800", "a\nb", "{}", "90", "x" * 300, "é" * 200, "__x",
    "..", [], {}, [[]], {"a": None}, {"topic": "t"}, [1, "2", None],
]  # fmt: skip
FIELDS = (
    "topic", "message", "countdown", "at", "id", "cancel", "key", "headers", "encoding",
    "expires_after", "Topic", "", "\x00", "x" * 300,
)  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, 17, -1, 2**31, 2**32, 2**43 - 1, 2**43, 5 * 2**43, 2**53, 2**62 - 1, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, 10**40, -(2**63), -(2**64), True, False, None, 0.5, -0.0, 1e308, "1",
]  # fmt: skip
LARGE = [2**43, 5 * 2**43, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
NOT_YET = [2**31, 2**43, 2**53, 2**62 - 1]
"""Offsets that ids can name, and no record has."""
CHARACTERS = b'{}[]":,\\u0000\x00\xff\xc3\xed\xa0\x80 \n\t-+.eE1truefalsenull'


class Drawn(NamedTuple):
    """A record to write."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class Hostile:
    """Draws records of the format `countdown`."""

    def __init__(self, seed: int, targets: list[str], own: list[str]) -> None:
        self._random = Random(seed)
        self._targets = targets
        self._own = own

    def record(self) -> Drawn:
        if self._random.random() < 0.2:
            # most with a valid request, so that nothing but the header is wrong
            value = self._plain() if self._random.random() < 0.8 else self._value()
            return Drawn(self._key(), value, [*self._headers(), self._forged()])
        return Drawn(self._key(), self._value(), self._headers())

    def _value(self) -> bytes | None:
        draw = self._random
        kinds: list[Callable[[], bytes | None]] = [
            self._plain, self._plain, self._odd, self._mutated, self._mutated, self._named,
            self._noise,
        ]  # fmt: skip
        return draw.choice(kinds)()

    def _headers(self) -> list[tuple[str, bytes | None]]:
        draw = self._random
        names = ["CALLER_SERVICE", "trace", "blackbox-id", "blackbox-carried", "", "\x00", "é"]
        return [
            (draw.choice(names), draw.choice([None, b"", b"\xff", b"[1]", b"shop"]))
            for _ in range(draw.choice([0, 0, 1, 1, 2, 5]))
        ]

    def _forged(self) -> tuple[str, bytes | None]:
        """A header by which blackbox marks its own records, nearly as it writes them."""
        draw = self._random
        number, other = draw.choice(NUMBERS), draw.choice(NUMBERS)
        match draw.randrange(5):
            case 0 | 1:
                at = draw.randrange(NAMES)
                offsets = draw.choice([[at, at], [at, at], [at, 0], [number, other]])
                written_ms = draw.choice([*NUMBERS, *LARGE * 3, int(time.time() * 1000)])
                carries = [*offsets, written_ms, draw.choice([True, False])]
                return "blackbox-carried", json.dumps(carries).encode()
            case 2:
                names = ["blackbox-follows", "blackbox-again", "blackbox-source"]
                return draw.choice(names), f"{self._own[0]}/{number}@{other}".encode()
            case 3:
                place = f"{self._own[2]}/{number}@{other}"
                return (
                    "blackbox-letter",
                    f"{draw.choice(['replayed', 'discarded'])} {place}".encode(),
                )
            case _:
                shard = Shard(self._own[0], draw.choice([0, 1, 2**20 - 1]))
                odd = [None, b"", b"%x" % draw.getrandbits(128), b"o-17"]
                ids = [request_id(shard, offset).encode() for offset in NOT_YET]
                names = ["blackbox-cancel", "blackbox-replaces"]
                return draw.choice(names), draw.choice([*odd, *ids * 2])

    def _key(self) -> bytes | None:
        return self._random.choice([None, b"", b"k", b"\xff\x00", b"long" * 100])

    def _asked(self) -> dict[str, Any]:
        draw = self._random
        return {
            "topic": draw.choice(self._targets),
            "message": draw.choice(["hi", "", "é", None, 1, {"a": [1.0, "b"]}, "x" * 1000]),
            "countdown": draw.choice([0, -3, 0.2, 1, FAR_S]),
        }

    def _plain(self) -> bytes:
        return json.dumps(self._asked()).encode()

    def _named(self) -> bytes:
        name = {"id": f"order-{self._random.randrange(NAMES)}"}
        asked = self._asked() | name if self._random.random() < 0.7 else name | {"cancel": True}
        return json.dumps(asked).encode()

    def _odd(self) -> bytes:
        draw = self._random
        asked = self._asked()
        if draw.random() < 0.1:
            asked["topic"] = draw.choice(self._own)
        for _ in range(draw.randint(1, 3)):
            asked[draw.choice(FIELDS)] = draw.choice(ODD)
        for _ in range(draw.choice([0, 0, 1])):
            del asked[draw.choice(list(asked))]
        return json.dumps(asked).encode()

    def _mutated(self) -> bytes:
        kinds: list[Callable[[], bytes]] = [self._plain, self._named, self._odd]
        return mutated(self._random, self._random.choice(kinds)())

    def _noise(self) -> bytes | None:
        draw = self._random
        return draw.choice([None, b"", b"[" * 5000, draw.randbytes(draw.randint(1, 300))])


def mutated(draw: Random, whole: bytes) -> bytes:
    """The value with a few bytes changed, repeated, inserted or removed."""
    value = bytearray(whole)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(value) + 1)
        match draw.randrange(4):
            case 0:
                value[at : at + 1] = draw.choices(CHARACTERS, k=1)
            case 1:
                value[at:at] = draw.choices(CHARACTERS, k=draw.randint(1, 4))
            case 2:
                del value[at : at + draw.randint(1, 8)]
            case _:
                value[at:at] = value[at : at + draw.randint(1, 40)]
    return bytes(value)


class HostileFutures(Hostile):
    """Draws records of the format `future`."""

    def _key(self) -> bytes | None:
        draw = self._random
        now_s = int(time.time())
        odd = [None, b"", b"k", b"\xff", b"-1", b"1e9", b"9" * 30, b" 1", b"1.5"]
        usual = [b"%d" % (now_s + draw.choice([-5, 0, 2, FAR_S]))] * 12
        return draw.choice([*usual, *odd])

    def _plain(self) -> bytes:
        draw = self._random
        topic = draw.choice([*self._targets * 4, *self._own, "", "a b", "__x", "x" * 300])
        callback = draw.choice([b"", b"\x00\xff", b"x" * 1000])
        return serialised(
            Future(callBackTopic=topic, callBackKey=draw.choice(["", "k", "é"]), callBack=callback)
        )

    _named = _odd = _plain


class HostileTimers(Hostile):
    """Draws records of the format `timer`, of both contracts."""

    def _plain(self) -> bytes:
        draw = self._random
        at_s = draw.choice([0, 1, int(time.time()) + 2, int(time.time()) + FAR_S, 2**64 - 1])
        name = draw.choice(
            [f"t-{draw.randrange(NAMES * 20)}"] * 8 + ["", "x" * 300, "a\nb", "\x00"]
        )
        if draw.random() < 0.5:
            action = draw.choice([1, 1, 1, 1, 2, 3])
            header = older.Header.FromString(b"\x0a\x04shop")
            return serialised(
                older.Timer(header=header, action=action, correlation_id=name, expire_at=at_s)
            )
        kind = draw.choice(["", "xray.events.TimerCreate", "xray.events.TimerCancel"])
        asked = current.Request(
            correlation_id=name, type=kind, context=[{"key": "a", "value": "b"}]
        )
        return serialised(current.TimerCreate(request=asked, expire_at=at_s))

    _named = _odd = _plain


def serialised(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


HOSTILE = {"countdown": Hostile, "future": HostileFutures, "timer": HostileTimers}
