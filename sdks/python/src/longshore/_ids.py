"""Ids of jobs: UUID version 7, which sort by the time of creation."""

from __future__ import annotations

import os
import threading
import time

_lock = threading.Lock()
_last = 0


def _after_fork() -> None:
    """Another thread may have held the lock when the process was forked, and does not exist here."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def new_id() -> str:
    """A new UUID v7. Ids that one process creates are in ascending order."""
    global _last
    random = int.from_bytes(os.urandom(8), "big") & 0x3FFF_FFFF_FFFF_FFFF
    # The time in steps of 1/4096 ms: 48 bits of milliseconds and 12 bits of their fraction.
    now = (time.time_ns() << 12) // 1_000_000
    with _lock:
        _last = now = max(now, _last + 1)
    number = ((now >> 12) << 80) | 0x7000_0000_0000_0000_0000 | ((now & 0xFFF) << 64) | (1 << 63) | random
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
