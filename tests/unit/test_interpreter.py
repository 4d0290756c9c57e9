"""A process returns memory that it no longer needs."""

from __future__ import annotations

import subprocess
import sys

import psutil

from blackbox.support import interpreter

PIECE = 1000
PIECES = 100_000
EIGHT_THREADS = """
import ctypes, sys, threading
from blackbox.support import interpreter

interpreter.tune()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
all_have_some, over = threading.Barrier(9), threading.Event()

def take():
    libc.malloc(1000)
    all_have_some.wait()
    over.wait()

for _ in range(8):
    threading.Thread(target=take).start()
all_have_some.wait()
out = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
over.set()
"""


def test_freed_memory_below_used_memory_is_returned_to_the_system() -> None:
    process = psutil.Process()
    interpreter.give_memory_back()
    before = process.memory_info().rss
    taken = [bytes(PIECE) for _ in range(PIECES)]
    kept = taken[:: PIECES // 100]
    del taken
    interpreter.give_memory_back()
    assert process.memory_info().rss - before < PIECE * PIECES / 10
    assert len(kept) == 100


def test_threads_share_a_few_memory_arenas() -> None:
    found = subprocess.run(
        [sys.executable, "-c", EIGHT_THREADS], capture_output=True, text=True, check=True
    )
    assert found.stdout.count("<heap nr=") <= 4
