"""Rate limits of targets: what exceeds one is parked, and comes out in the following seconds.

No times are stored: in each second, the oldest parked messages come out. So a changed rate applies
at once, and messages that were cancelled hold up nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

from blackbox.core.due_batch import LONGEST_RETRY_MS, DueBatch
from blackbox.core.ports import Rates
from blackbox.records.request import Shard

OVER_RATE = "waiting for the rate limit of its target"
# Short, since a shard with a high rate needs the rest of the second.
TURNS_MS = 200


def park_over_rate(
    batch: DueBatch, rates: Rates, cluster: str, parked: Mapping[int, str], now_ms: int
) -> None:
    """Park what exceeds its target's rate limit; `parked` are the targets parked for, by band."""
    limited = rates.limited()
    ready: dict[str, list[int]] = {}
    for offset, entry in batch.ready.items() if limited else ():
        if entry.target in limited:
            ready.setdefault(entry.target, []).append(offset)
    asked = {target: len(offsets) for target, offsets in ready.items()}
    counted = rates.count(cluster, asked, now_ms) if ready else {}
    for target, offsets in ready.items():
        # released and retried entries are not in the order of due times
        offsets.sort(key=lambda offset: batch.ready[offset].due_ms)
        for place, offset in enumerate(offsets[max(0, limited[target] - counted[target]) :]):
            entry = batch.ready.pop(offset)
            # even with `expires_after`: it would be read again and again, and overtake the others
            if not batch.park(offset, entry, OVER_RATE, parked):
                later_s = min(1 + place // limited[target], LONGEST_RETRY_MS // 1000)
                batch.postponed[offset] = (now_ms // 1000 + later_s) * 1000, None


def within_rates(
    released: dict[str, int], rates: Rates | None, cluster: str, shard: Shard, now_ms: int
) -> dict[str, int]:
    """Of the parked messages that may come out, by target, how many may go now."""
    if rates is None:
        return released
    free = dict(released)
    limited = rates.limited()
    waiting = free.keys() & limited.keys()
    if now_ms < _turn_ms(shard, now_ms // 1000):
        free |= dict.fromkeys(waiting, 0)
    elif waiting:
        counted = rates.count(cluster, dict.fromkeys(waiting, 0), now_ms)
        free |= {target: limited[target] - counted[target] for target in waiting}
    return {target: count for target, count in free.items() if count > 0}


def next_turn_ms(shard: Shard, now_ms: int) -> int:
    """When parked messages for a target with a rate come out next, epoch ms."""
    second = now_ms // 1000
    turn_ms = _turn_ms(shard, second)
    return turn_ms if turn_ms > now_ms else _turn_ms(shard, second + 1)


def _turn_ms(shard: Shard, second: int) -> int:
    # in another order each second: else one shard could take all that the others wait for
    return second * 1000 + crc32(f"{shard} {second}".encode()) % TURNS_MS
