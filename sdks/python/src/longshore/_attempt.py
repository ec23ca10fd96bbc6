"""One attempt of a leased job: its lease, its cancellation, and how it ends.

Does not talk to the server (`_exchange.py`) and does not run handlers (`_execute.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from ._enqueue import NewJob, to_json
from ._errors import Cancel, Cancelled, Fail, LeaseLost, PayloadMismatch, Retry, Snooze

if TYPE_CHECKING:
    from ._app import Longshore
    from ._context import Backend
    from ._job import Job

log = logging.getLogger("longshore.worker")
#: Why an attempt has to stop.
Reason = Literal["cancel", "timeout", "lease_lost", "shutdown"]

BUFFERED, STARTED, ENDED = 0, 1, 2
_waiters_lock = threading.Lock()
_MAX_ERROR = 8_000
#: The largest result, step and checkpoint that the server stores, in bytes of JSON.
MAX_VALUE = 1 << 20
#: The largest end of an attempt with its follow-up jobs. The body of a call may have 16 MiB.
_MAX_END = 8 << 20


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
            try:
                callback()
            except Exception:  # must not end the thread that talks to the server
                log.exception("a callback of a cancellation failed")

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

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish)

        self.on_set(wake)
        try:
            await done
        finally:
            with _waiters_lock:
                if self._callbacks is not None and wake in self._callbacks:
                    self._callbacks.remove(wake)

    def on_set(self, callback: Callable[[], Any]) -> None:
        """Calls a function when the attempt has to stop, on the thread that learns of it."""
        with _waiters_lock:
            if self.reason is None:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def raise_if_set(self) -> None:
        if self.reason is not None:
            raise Cancelled(self.reason)


class FailedElsewhere(Exception):
    """An error of a child process. The message has its type and place already."""


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
        "was_rejected",
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
        #: Whether the server rejected the outcome, and another one was reported instead.
        self.was_rejected = False
        self.is_lost = False
        self.is_suspended = False
        #: Calls that may suspend the job and have no reply yet. See `waiting`.
        self.waits = 0
        #: Interrupts the handler; set by the executor.
        self.stop: Callable[[], None] | None = None

    def begin(self) -> None:
        self.started_at = time.monotonic()
        seconds = self.job.get("timeout_seconds")
        if seconds is not None:
            self.deadline = self.started_at + seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A call that may suspend the job. Meanwhile, the end of its lease is no reason to stop the handler."""
        with _waiters_lock:
            self.waits += 1
        try:
            yield
        finally:
            with _waiters_lock:
                self.waits -= 1

    def arguments(self, context: Any, app: Longshore, backend: Backend) -> dict[str, Any]:
        """The arguments for the handler. Raises `PayloadMismatch`."""
        signature = self.kind.signature
        arguments = signature.decode(self.payload)
        if signature.context_parameter is not None:
            arguments[signature.context_parameter] = context(app, self, backend)
        return arguments

    # --- How it ends, as the JSON text of an item of `settle` ---

    def ended(self, result: Any, error: BaseException | None) -> str:
        """The outcome of a handler that returned a result or raised an error."""
        try:
            if error is not None:
                return self.ended_with(error)
            if self.cancellation.reason == "timeout":
                return self.timed_out()
            return self.succeeded(result)
        except Exception as problem:
            log.exception("job %s: its end cannot be reported", self.id)
            return self.outcome("failed", error=f"its end cannot be reported: {describe(problem)}")

    def succeeded(self, result: Any) -> str:
        if result is None:
            end = "null"
        else:
            try:
                end = limited("result", self._encode(result))
            except Fail as problem:
                return self.outcome("failed", error=str(problem), permanent=True)
            except Exception as problem:  # raised by the user's types too
                return self.outcome("failed", error=f"the result is not JSON: {problem}", permanent=True)
        if not self.follow_ups:
            return f'{self.ref},"outcome":"succeeded","result":{end}}}'
        try:
            follow_ups = to_json([job.to_follow_up() for job in self.follow_ups]).decode()
        except (TypeError, ValueError) as problem:
            return self.outcome("failed", error=f"a follow-up job is not JSON: {problem}", permanent=True)
        if len(end) + len(follow_ups) > _MAX_END:
            message = (
                f"the follow-up jobs have {len(follow_ups)} bytes of JSON; use fewer, or enqueue them in batches"
            )
            return self.outcome("failed", error=message, permanent=True)
        return f'{self.ref},"outcome":"succeeded","result":{end},"follow_ups":{follow_ups}}}'

    def _encode(self, result: Any) -> bytes:
        if isinstance(result, EncodedResult):
            return result.encode()
        return to_json(self.kind.signature.result.encode(result))

    def instead_of(self, text: str, message: str) -> str | None:
        """The outcome to report after the server rejected one. None if it rejected this one too."""
        if self.was_rejected:
            return None
        self.was_rejected = True
        if not text.startswith(f'{self.ref},"outcome":"succeeded"'):
            return self.outcome("failed", error=f"the end of the attempt was rejected: {message}")
        if self.follow_ups:
            # The reason may pass, for example if the queue of a follow-up job is full.
            return self.outcome("failed", error=f"the follow-up jobs cannot be stored: {message}")
        return self.outcome("failed", error=f"the result cannot be stored: {message}", permanent=True)

    def ended_with(self, error: BaseException) -> str:
        """The outcome for an exception of the handler."""
        error = _without_group(error)
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
            fields["error"] = _storable(fields["error"])
        rest = json.dumps({"outcome": name, **fields}, allow_nan=False)[1:]
        return f"{self.ref},{rest}"


def describe(error: BaseException) -> str:
    """The error as it is stored with the job: its type, its message and where it was raised."""
    if isinstance(error, (asyncio.CancelledError, Cancelled, LeaseLost)) and not error.args:
        return "the handler was cancelled"
    if isinstance(error, FailedElsewhere):
        return str(error)
    try:
        message = str(error)
    except Exception:  # the user's class may have any `__str__`
        message = ""
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return text
    code = place.tb_frame.f_code
    return f"{text} (in {code.co_name}, {code.co_filename.rsplit('/', 1)[-1]}:{place.tb_lineno})"


def _without_group(error: BaseException) -> BaseException:
    """The only error in a group, as a TaskGroup raises it, so that `Retry`, `Fail` and the others also work there."""
    nested = getattr(error, "exceptions", None)
    if isinstance(nested, tuple) and len(nested) == 1 and isinstance(nested[0], BaseException):
        return _without_group(nested[0])
    return error


def limited(what: str, encoded: bytes) -> str:
    """The JSON of a value, unless the server would refuse it."""
    if len(encoded) > MAX_VALUE:
        raise Fail(
            f"{what}: {len(encoded)} bytes of JSON exceed the limit of {MAX_VALUE}; store the data elsewhere and "
            "keep a reference"
        )
    return encoded.decode()


def _storable(text: str) -> str:
    """The text without what databases and JSON do not have: NUL, and halves of surrogate pairs."""
    text = text.replace("\x00", "")
    text = text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + "…"
    return text.encode(errors="backslashreplace").decode()
