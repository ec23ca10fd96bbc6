"""One attempt of a leased job: its lease, its cancellation, and how it ends.

Does not talk to the server (`_exchange.py`) and does not run handlers (`_execute.py`).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ._enqueue import NewJob, to_json
from ._errors import Cancel, Cancelled, Fail, LeaseLost, PayloadMismatch, Retry, Snooze

if TYPE_CHECKING:
    from ._job import Job

#: Why an attempt has to stop.
Reason = Literal["cancel", "timeout", "lease_lost", "shutdown"]

BUFFERED, STARTED, ENDED = 0, 1, 2
_waiters_lock = threading.Lock()
_MAX_ERROR = 8_000


class Cancellation:
    """Whether an attempt has to stop, and why. For threads and event loops."""

    __slots__ = ("_callbacks", "_event", "reason")

    def __init__(self) -> None:
        #: `cancel`, `timeout`, `lease_lost` or `shutdown`; None while the attempt may continue.
        self.reason: Reason | None = None
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    def is_set(self) -> bool:
        return self.reason is not None

    def __bool__(self) -> bool:
        return self.reason is not None

    def set(self, reason: Reason) -> None:
        with _waiters_lock:
            if self.reason is not None:
                return
            self.reason = reason
            event, callbacks = self._event, self._callbacks
            self._callbacks = None
        if event is not None:
            event.set()
        for callback in callbacks or ():
            callback()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks the thread until the attempt has to stop, or the time is up. Returns whether it has to stop."""
        with _waiters_lock:
            if self.reason is not None:
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(timeout)

    async def wait_async(self) -> None:
        """Waits until the attempt has to stop."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not done.done():
                done.set_result(None)

        self.on_set(lambda: loop.call_soon_threadsafe(finish))
        await done

    def on_set(self, callback: Callable[[], Any]) -> None:
        with _waiters_lock:
            if self.reason is None:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        callback()

    def raise_if_set(self) -> None:
        if self.reason is not None:
            raise Cancelled(self.reason)


class EncodedResult(str):
    """A result that is JSON text already."""


class Attempt:
    """A leased job. The exchange creates it, the executor runs it."""

    __slots__ = (
        "cancellation",
        "deadline",
        "follow_ups",
        "granted_at",
        "id",
        "is_lost",
        "is_settled",
        "is_suspended",
        "job",
        "kind",
        "lease_no",
        "payload",
        "ref",
        "report_by",
        "started_at",
        "state",
        "stop",
        "waits",
    )

    def __init__(self, job: dict[str, Any], kind: Job[Any, Any]) -> None:
        self.job = job
        self.kind = kind
        self.id: str = job["id"]
        self.lease_no: int = job["lease_no"]
        self.payload = job["payload"]
        #: The lease as the beginning of a JSON object.
        self.ref = f'{{"id":"{self.id}","lease_no":{self.lease_no}'
        self.granted_at = time.monotonic()
        self.started_at = 0.0
        self.deadline: float | None = None
        #: When an attempt that has to stop is reported even if its handler still runs.
        self.report_by: float | None = None
        self.state = BUFFERED
        self.cancellation = Cancellation()
        self.follow_ups: list[NewJob] | None = None
        #: Whether an outcome was reported. Only the first counts.
        self.is_settled = False
        self.is_lost = False
        self.is_suspended = False
        #: Calls that may suspend the job and have no reply yet.
        self.waits = 0
        #: Interrupts the handler; set by the executor.
        self.stop: Callable[[], None] | None = None

    def begin(self) -> None:
        self.started_at = time.monotonic()
        seconds = self.job.get("timeout_seconds")
        if seconds is not None:
            self.deadline = self.started_at + seconds

    # --- How it ends, as the JSON text of an item of `settle` ---

    def succeeded(self, result: Any) -> str:
        """Raises TypeError or ValueError if the result is not JSON."""
        if result is None:
            end = "null"
        elif isinstance(result, EncodedResult):
            end = result
        else:
            end = to_json(self.kind.signature.result.encode(result)).decode()
        if not self.follow_ups:
            return f'{self.ref},"outcome":"succeeded","result":{end}}}'
        follow_ups = to_json([job.to_follow_up() for job in self.follow_ups]).decode()
        return f'{self.ref},"outcome":"succeeded","result":{end},"follow_ups":{follow_ups}}}'

    def ended_with(self, error: BaseException) -> str:
        """The outcome for an exception of the handler."""
        reason = self.cancellation.reason
        if reason == "shutdown" and not isinstance(error, (Retry, Fail, Snooze, Cancel)):
            return self.released()
        if reason == "timeout":
            return self.timed_out()
        if reason == "cancel":
            return self.outcome("cancelled", error=describe(error))
        if isinstance(error, Retry):
            if error.after is None:
                return self.outcome("failed", error=str(error))
            return self.outcome("failed", error=str(error), retry_after_seconds=error.after)
        if isinstance(error, Snooze):
            return self.outcome("snoozed", delay_seconds=error.seconds)
        if isinstance(error, Cancel):
            return self.outcome("cancelled", error=str(error))
        if isinstance(error, Fail):
            return self.outcome("failed", error=str(error) or "the handler failed", permanent=True)
        if isinstance(error, PayloadMismatch):
            return self.outcome("failed", error=str(error), permanent=True)
        return self.outcome("failed", error=describe(error))

    def timed_out(self) -> str:
        return self.outcome("failed", error=f"timed out after {self.job.get('timeout_seconds'):g} s")

    def released(self) -> str:
        return f'{self.ref},"outcome":"released"}}'

    def not_started(self) -> str:
        """Released before its handler was called. Leaves no entry in the history of the job."""
        return f'{self.ref},"outcome":"not_started"}}'

    def outcome(self, name: str, **fields: Any) -> str:
        if "error" in fields:
            fields["error"] = _shorten(fields["error"])
        rest = json.dumps({"outcome": name, **fields}, allow_nan=False)[1:]
        return f"{self.ref},{rest}"


def describe(error: BaseException) -> str:
    """The error as it is stored with the job: its type, its message and where it was raised."""
    if isinstance(error, (asyncio.CancelledError, Cancelled, LeaseLost)) and not error.args:
        return "the handler was cancelled"
    if type(error).__name__ in ("HandlerFailed", "ProcessDied"):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return text
    code = place.tb_frame.f_code
    return f"{text} (in {code.co_name}, {code.co_filename.rsplit('/', 1)[-1]}:{place.tb_lineno})"


def _shorten(text: str) -> str:
    text = text.replace("\x00", "")
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + "…"
