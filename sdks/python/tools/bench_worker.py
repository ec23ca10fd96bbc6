"""The worker that `bench sdks` measures. It handles the kinds of that benchmark:

- `bench` returns at once.
- `pick_up` prints the milliseconds since the time in its payload, in microseconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from longshore import Longshore

ls = Longshore()


@ls.job("bench")
async def do_nothing(**payload: Any) -> None: ...


@ls.job("pick_up")
async def pick_up(at: int) -> None:
    print((time.time_ns() // 1000 - at) / 1000, flush=True)


if __name__ == "__main__":
    ls.work(concurrency=int(os.environ.get("WORKER_CONCURRENCY", "10")))
