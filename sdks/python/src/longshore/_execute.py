"""Runs attempts: async handlers on one event loop, others on threads, and `process=True` in child processes.

Owns the slots and the buffer of jobs that were leased ahead. Reports ends through the exchange.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from . import _trace
from ._attempt import BUFFERED, ENDED, STARTED, Attempt, describe
from ._context import Backend, Context, SyncContext
from ._errors import Cancelled
from ._exchange import MAX_LIMIT

if TYPE_CHECKING:
    from ._app import Longshore
    from ._exchange import Exchange
    from ._process import ProcessLane

log = logging.getLogger("longshore.worker")

#: A leased job that has not started after this time is released.
MAX_BUFFER_TIME = 0.25
#: Jobs are leased ahead for this long, if they are short.
AHEAD = 0.1
#: Kinds whose recent attempts took longer are not leased ahead.
MAX_RUN_TIME_AHEAD = 0.05
#: How long the run time of a kind counts after its last attempt.
RUN_TIME_VALID = 10.0
#: How long a handler that cannot be interrupted may take to react to its cancellation.
STOP_GRACE = 5.0


class Executor:
    """Runs up to `concurrency` attempts at once."""

    def __init__(self, app: Longshore, concurrency: int) -> None:
        self.app = app
        self.concurrency = concurrency
        self.exchange: Exchange
        self.backend: Backend
        self._lock = threading.Lock()
        self._buffer: deque[Attempt] = deque()
        self._running = 0
        self.loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._run_loop, name="longshore-loop", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._work: queue.SimpleQueue[Attempt] = queue.SimpleQueue()
        #: Threads for sync handlers, and the attempts that they run or are about to run.
        self._threads = 0
        self._on_threads = 0
        self._processes: ProcessLane | None = None
        self._pace = _Pace()
        self._is_traced = _trace.is_active()

    def start(self) -> None:
        self._loop_thread.start()

    def run_on_loop(self, work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._loop_thread.join(2.0)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        with suppress(RuntimeError):
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    # --- Slots ---

    def capacity(self) -> int:
        """How many jobs may be leased at once: those that run, and short ones that start soon."""
        return self.concurrency + min(MAX_LIMIT - 1, self._pace.ahead())

    def used(self) -> int:
        """Slots in use: attempts that run, also those that were reported because they do not stop, and the buffer."""
        return self._running + len(self._buffer)

    def is_hurried(self) -> bool:
        """Whether a report should not wait for others: no more jobs are about to end."""
        return len(self._buffer) < 8

    def accept(self, attempts: list[Attempt]) -> None:
        with self._lock:
            self._buffer.extend(attempts)
        self._start_next()

    def withdraw(self, candidates: list[Attempt]) -> list[Attempt]:
        """Takes attempts out that have not started, whether they are buffered or wait for a blocked event loop."""
        with self._lock:
            taken = [attempt for attempt in candidates if attempt.state == BUFFERED]
            for attempt in taken:
                attempt.state = ENDED
            if taken:
                self._buffer = deque(attempt for attempt in self._buffer if attempt.state == BUFFERED)
        return taken

    def _start_next(self) -> None:
        """Starts as many attempts as there are slots."""
        on_loop: list[Attempt] = []
        with self._lock:
            while self._buffer and self._running < self.concurrency:
                attempt = self._buffer.popleft()
                self._running += 1
                if attempt.kind.is_async:
                    on_loop.append(attempt)
                elif attempt.kind.process:
                    self._process_lane().submit(attempt)
                else:
                    self._on_threads += 1
                    self._work.put(attempt)
                    if self._threads < self._on_threads:
                        self._threads += 1
                        number = self._threads
                        threading.Thread(target=self._thread, name=f"longshore-job-{number}", daemon=True).start()
        if on_loop:
            if threading.current_thread() is self._loop_thread:
                self._create_tasks(on_loop)
            else:
                self.loop.call_soon_threadsafe(self._create_tasks, on_loop)

    def begin(self, attempt: Attempt) -> bool:
        """Marks an attempt as started, unless it was withdrawn."""
        with self._lock:
            if attempt.state != BUFFERED:
                return False
            attempt.state = STARTED
        attempt.begin()
        if attempt.cancellation.reason is not None:  # cancelled while it was in the buffer
            self._report(attempt, None, Cancelled(attempt.cancellation.reason))
            return False
        return True

    def free(self, attempt: Attempt) -> None:
        """The slot of an attempt that has ended goes to the next one."""
        if attempt.started_at:
            self._pace.ended(attempt.kind.name, time.monotonic() - attempt.started_at)
        with self._lock:
            self._running -= 1
            if not (attempt.kind.is_async or attempt.kind.process):
                self._on_threads -= 1
            has_next = bool(self._buffer)
        if has_next:
            self._start_next()
        else:
            self.exchange.wake()

    def finish(self, attempt: Attempt, result: Any, error: BaseException | None) -> None:
        """Reports how an attempt ended, unless it was withdrawn, and gives its slot to the next one."""
        try:
            if attempt.state == STARTED:
                self._report(attempt, result, error)
        finally:
            self.free(attempt)

    def _report(self, attempt: Attempt, result: Any, error: BaseException | None) -> None:
        attempt.state = ENDED
        if attempt.is_suspended or attempt.is_lost:
            self.exchange.forget(attempt)
            return
        if error is not None and log.isEnabledFor(logging.INFO):
            text = describe(error)
            log.info("job %s (%s), attempt %s: %s", attempt.id, attempt.kind.name, attempt.job["attempt"], text)
        self.exchange.settle(attempt, attempt.ended(result, error))

    def report_unresponsive(self, attempt: Attempt) -> None:
        """Reports an attempt that does not react to its cancellation. Its slot stays in use until it ends."""
        reason = attempt.cancellation.reason
        if reason == "timeout":
            text = attempt.timed_out()
        elif reason == "cancel":
            text = attempt.outcome("cancelled", error="the handler did not react to the cancel")
        else:
            text = attempt.released()
        log.warning("job %s (%s) does not stop (%s); its handler still runs", attempt.id, attempt.kind.name, reason)
        self.exchange.settle(attempt, text)

    # --- Async handlers ---

    def _create_tasks(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            # A context of its own, as for threads. This may run at the end of another handler's task.
            task = contextvars.Context().run(self.loop.create_task, self._run_async(attempt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(task.cancel)

    async def _run_async(self, attempt: Attempt) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            if not self.begin(attempt):
                return
            task = asyncio.current_task()
            assert task is not None
            attempt.stop = lambda: self._cancel(task)
            if attempt.cancellation.reason is not None:
                self._cancel(task)
            arguments = attempt.arguments(Context, self.app, self.backend)
            with self._span(attempt):
                result = await attempt.kind.function(**arguments)
        except BaseException as problem:
            error = problem
        finally:
            self.finish(attempt, result, error)

    # --- Other handlers ---

    def _thread(self) -> None:
        while True:
            # A context of its own: what a handler sets in context variables must not reach the next job.
            contextvars.Context().run(self._run_sync, self._work.get())

    def _run_sync(self, attempt: Attempt) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            if not self.begin(attempt):
                return
            arguments = attempt.arguments(SyncContext, self.app, self.backend)
            with self._span(attempt):
                result = attempt.kind.function(**arguments)
        except BaseException as problem:
            error = problem
        finally:
            self.finish(attempt, result, error)

    def _span(self, attempt: Attempt) -> AbstractContextManager[Any]:
        if not self._is_traced:
            return _NO_SPAN
        return _trace.span(attempt.kind.name, attempt.id, attempt.job["attempt"], attempt.job["traceparent"])

    def _process_lane(self) -> ProcessLane:
        if self._processes is None:
            from ._process import ProcessLane

            self._processes = ProcessLane(self)
        return self._processes


_NO_SPAN: AbstractContextManager[Any] = nullcontext()


class _Pace:
    """How many short jobs to lease ahead: those that start within about 100 ms, by recent run times."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._ended = 0
        self._per_second = 0.0
        self._run_times: dict[str, tuple[float, float]] = {}

    def ended(self, kind: str, took: float) -> None:
        known = self._run_times.get(kind)
        average = took if known is None else known[0] * 0.9 + took * 0.1
        self._run_times[kind] = (average, time.monotonic())
        self._ended += 1

    def ahead(self) -> int:
        now = time.monotonic()
        elapsed = now - self._since
        if elapsed >= 0.02:
            rate = self._ended / elapsed
            # Rises at once, so that a backlog is worked off at full speed soon, and falls slowly.
            self._per_second = rate if rate > self._per_second else (self._per_second * 3 + rate) / 4
            self._since, self._ended = now, 0
        for average, at in list(self._run_times.values()):
            if average > MAX_RUN_TIME_AHEAD and now - at < RUN_TIME_VALID:
                return 0
        return int(self._per_second * AHEAD)
