"""Jobs with `process=True`. The child processes import this module."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextvars import ContextVar
from typing import Any

from longshore import Fail, Longshore, Retry, Snooze, SyncContext

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
    ctx.cancelled.wait(3600)
    ctx.raise_if_cancelled()


@ls.job("process_steps", process=True)
def steps(ctx: SyncContext) -> list[Any]:
    ctx.progress({"done": 1})
    once = ctx.step("once", lambda: [ctx.attempt, "done"])
    ctx.sleep("nap", 0)
    return [ctx.attempt, once]


seen: ContextVar[str] = ContextVar("seen", default="nothing")


@ls.job("process_snoozes", process=True)
def snoozes(ctx: SyncContext) -> int:
    if ctx.lease_no == 1:
        raise Snooze(0.01)
    return ctx.attempt


@ls.job("process_retries", process=True)
def retries(ctx: SyncContext) -> int:
    class Busy(Retry):
        def __init__(self) -> None:
            super().__init__("busy", after=0.01)

    if ctx.attempt == 1:
        raise Busy
    return ctx.attempt


@ls.job("process_returns_no_json", process=True)
def returns_no_json() -> Any:
    return object()


@ls.job("process_sets_context", process=True)
def sets_context() -> str:
    before = seen.get()
    seen.set("a secret of another tenant")
    return before


@ls.job("process_signals", process=True)
def signals() -> int:
    """How a program that a handler starts reacts to SIGTERM."""
    program = subprocess.Popen(["sleep", "120"])  # ends with 0, if it ignores the signal
    program.terminate()
    return program.wait()


@ls.job("process_ignores", process=True)
def ignores(path: str) -> None:
    """Does not react to anything, and says that it lives."""
    while True:
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.05)


@ls.job("process_reports_too_much", process=True)
def reports_too_much(ctx: SyncContext) -> None:
    ctx.progress("x" * 100_000)
