"""dramatiq on Redis: messages with a delay."""

from __future__ import annotations

from bench.peers.contestant import Setting
from bench.peers.redis_peer import Spec

SPEC = Spec(
    name="dramatiq",
    kind="python",
    packages=("dramatiq[redis]==2.2.1", "hiredis==3.5.0"),
    workers=(("dramatiq", "with_dramatiq", "--processes", "2", "--threads", "8"),),
    client=("python", "schedule.py", "with_dramatiq"),
    settings=(
        Setting("2 processes of 8 threads", "the defaults: one process for each core"),
        Setting("heartbeat_timeout 60 s", "the default: after it, work of a killed worker returns"),
        Setting(
            "maintenance_chance 1 %",
            "work returns with this share of commands; with the default of 0.1 % idle workers take minutes more",
        ),
        Setting("one message a call", "it has no call for many messages"),
    ),
    # Idle workers send a few commands a second, of which one in a hundred gives work back.
    recovery_s=180.0,
)
