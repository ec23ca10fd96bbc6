"""Jobs with `process=True`. The child processes import this module."""

from __future__ import annotations

import os
import signal
from typing import Any

from longshore import Fail, Longshore, SyncContext

ls = Longshore("http://127.0.0.1:1")


@ls.job("process_doubles", process=True)
def doubles(n: int) -> tuple[int, int]:
    return os.getpid(), 2 * n


@ls.job("process_dies", process=True)
def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@ls.job("process_breaks", process=True)
def breaks() -> None:
    raise ValueError("it broke")


@ls.job("process_fails", process=True)
def fails() -> None:
    raise Fail("hopeless")


@ls.job("process_waits", process=True)
def waits(ctx: SyncContext) -> None:
    ctx.cancelled.wait(60)
    ctx.raise_if_cancelled()


@ls.job("process_steps", process=True)
def steps(ctx: SyncContext) -> list[Any]:
    ctx.progress({"done": 1})
    once = ctx.step("once", lambda: [ctx.lease_no, "done"])
    ctx.sleep("nap", 0)
    return [ctx.attempt, once]
