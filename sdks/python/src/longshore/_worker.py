"""The worker: settings, signals, and the order of start and shutdown."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypedDict, cast

from . import _wire
from ._attempt import BUFFERED, STARTED, Attempt
from ._backend import WorkerBackend
from ._enqueue import check_strings
from ._errors import LongshoreError
from ._exchange import Exchange, Registration
from ._execute import MAX_BUFFER_TIME, STOP_GRACE, Executor

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._app import Longshore
    from ._job import Job

log = logging.getLogger("longshore.worker")
#: How long handlers may take to react to the end of the grace period.
_CANCEL_GRACE = 2.0
_FLUSH_TIMEOUT = 10.0
#: How long a shutdown hook may take. It cannot run at all while a handler blocks the event loop.
_HOOK_TIMEOUT = 10.0
_TICK = 0.05


class WorkerSettings(TypedDict, total=False):
    """Settings of a worker."""

    #: How many jobs run at once; 10 by default.
    concurrency: int
    #: The queues to lease from; by default those of the registered jobs. `*` means every queue.
    queues: Iterable[str]
    #: The kinds to run; by default all that are registered.
    kinds: Iterable[str]
    #: A display name.
    name: str
    #: How long running jobs may continue after a signal; 30 s by default.
    grace: float
    #: Without a call for this long, the server declares the worker dead; 60 s by default.
    stale_after: float


class Worker:
    """Runs the jobs of an application.

    `run()` returns after SIGTERM or SIGINT. `start()` and `stop()`, or `with`, run it in the background.
    """

    def __init__(
        self,
        app: Longshore,
        *,
        concurrency: int = 10,
        queues: Iterable[str] | None = None,
        kinds: Iterable[str] | None = None,
        name: str | None = None,
        grace: float = 30.0,
        stale_after: float = 60.0,
    ) -> None:
        if not 1 <= concurrency <= 400:
            raise ValueError(f"concurrency: {concurrency} is out of range; use 1 to 400 and start more workers")
        if grace < 0:
            raise ValueError(f"grace: {grace} is out of range; use 0 or more seconds")
        check_strings("queues", queues)
        check_strings("kinds", kinds)
        jobs = _selected(app, kinds)
        self.app = app
        self.grace = grace
        self._jobs = jobs
        self.queues = (
            sorted({str(job.defaults["queue"]) for job in jobs.values()}) if queues is None else list(queues)
        )
        self._executor = Executor(app, concurrency)
        self._registration = Registration(
            name=name,
            queues=self.queues,
            kinds=sorted(jobs),
            announce=[job.announcement() for job in jobs.values()],
            stale_after=stale_after,
        )
        self._exchange = Exchange(app._server, self._registration, self._free_slots, self._leased)
        self._exchange.is_hurried = self._executor.is_hurried
        self._exchange.on_fatal = self.request_stop
        self._backend = WorkerBackend(self._exchange)
        self._executor.exchange, self._executor.backend = self._exchange, self._backend
        self._stop_requested = threading.Event()
        self._hurry = threading.Event()
        self._is_stopping = False
        self._is_ended = threading.Event()
        self._was_started = False

    @property
    def id(self) -> str | None:
        """The id that the server gave this worker."""
        return self._exchange.worker_id

    # --- Lifecycle ---

    def run(self) -> None:
        """Runs until SIGTERM or SIGINT, then drains. A second signal ends the grace period."""
        # Threads that talk to the server get their turn sooner while handlers compute.
        sys.setswitchinterval(0.001)
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.start()
            while not self._stop_requested.wait(1.0):
                pass
            self.stop()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._exchange.fatal is not None:
            raise LongshoreError(str(self._exchange.fatal), slug="refused")

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._stop_requested.is_set():
            self._hurry.set()
        self._stop_requested.set()

    def request_stop(self) -> None:
        """Lets `run` drain and return. Callable from any thread."""
        self._stop_requested.set()

    def start(self) -> None:
        """Starts the worker in the background."""
        if self._was_started:
            raise RuntimeError("a worker starts once; create another one")
        self._was_started = True
        self._executor.start()
        for hook in self.app.startup_hooks:
            self._call_hook(hook)
        log.info(
            "worker for %s on %s: %d slots, kinds %s",
            ", ".join(self.queues),
            self.app.server,
            self._executor.concurrency,
            ", ".join(self._registration.kinds),
        )
        self._exchange.start()
        threading.Thread(target=self._watch, name="longshore-watch", daemon=True).start()
        if self.app.declared_schedules:
            threading.Thread(target=self._put_schedules, name="longshore-schedules", daemon=True).start()

    def _put_schedules(self) -> None:
        # The server refuses schedules of kinds that it does not know, so the kinds are registered first.
        while not self._exchange.registered.wait(_TICK):
            if self._is_ended.is_set():
                return
        for name, (kind, operation) in self.app.declared_schedules.items():
            if kind not in self._jobs:
                continue
            try:
                self.app.send_sync(operation)
            except LongshoreError as error:
                log.error("the schedule `%s` is not stored: %s", name, error)

    def wait_until_registered(self, timeout: float = 10.0) -> bool:
        """Waits until the server knows this worker and its kinds."""
        is_registered = self._exchange.registered.wait(timeout)
        if self._exchange.fatal is not None:
            raise LongshoreError(str(self._exchange.fatal), slug="refused")
        return is_registered

    def stop(self) -> None:
        """Stops leasing, lets running jobs finish within the grace period, and releases the rest uncharged."""
        if not self._was_started or self._is_stopping:
            return
        exchange = self._exchange
        self._is_stopping = True
        exchange.drain()
        self._release(list(exchange.active.values()))
        running = len(exchange.active)
        if running:
            log.info("draining: %d jobs are running; they may continue for %g s", running, self.grace)
        self._await_end(self.grace, self._hurry)
        if exchange.active:
            for attempt in list(exchange.active.values()):
                exchange.stop_attempt(attempt, "shutdown")
            self._await_end(_CANCEL_GRACE)
        for attempt in list(exchange.active.values()):
            self._executor.report_unresponsive(attempt)
        if not exchange.flush(_FLUSH_TIMEOUT):
            log.error("some results could not be reported; the server recovers their jobs")
        exchange.close()
        self._backend.close()
        self._is_ended.set()
        for hook in self.app.shutdown_hooks:
            try:
                self._call_hook(hook, _HOOK_TIMEOUT)
            except concurrent.futures.TimeoutError:
                log.error("a shutdown hook did not end in %g s; does a handler block the event loop?", _HOOK_TIMEOUT)
        self._executor.close()
        log.info("stopped")

    def _await_end(self, seconds: float, hurry: threading.Event | None = None) -> None:
        deadline = time.monotonic() + seconds
        while self._exchange.active and time.monotonic() < deadline and not (hurry and hurry.is_set()):
            time.sleep(0.01)

    def _call_hook(self, hook: Callable[[], Any], timeout: float | None = None) -> None:
        result = hook()
        if inspect.isawaitable(result):

            async def finish() -> None:
                await result

            self._executor.run_on_loop(finish(), timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    # --- Leases ---

    def _free_slots(self) -> int:
        return self._executor.capacity() - self._executor.used()

    def _leased(self, jobs: list[_wire.LeasedJob]) -> None:
        attempts = []
        for job in jobs:
            attempt = Attempt(cast("dict[str, Any]", job), self._jobs[job["kind"]])
            former = self._exchange.active.get(attempt.id)
            if former is not None:  # this worker got the job again, so its earlier lease is lost
                self._exchange.lose(former)
            # A lease of the same job whose report is in flight keeps its own entry among those to settle.
            self._exchange.hold(attempt)
            attempts.append(attempt)
        if self._is_stopping:
            for attempt in attempts:
                self._exchange.settle(attempt, attempt.not_started())
            return
        self._executor.accept(attempts)

    def _release(self, attempts: list[Attempt]) -> None:
        """Releases those that have not started."""
        for attempt in self._executor.withdraw(attempts):
            self._exchange.settle(attempt, attempt.not_started())

    def _watch(self) -> None:
        """Enforces deadlines that a blocked event loop cannot: timeouts, the buffer time, and lost contact."""
        while not self._is_ended.wait(_TICK):
            try:
                self._exchange.check_contact()
                self._check_attempts()
            except Exception:  # without this thread, no timeout would be enforced
                log.exception("could not check the running jobs")

    def _check_attempts(self) -> None:
        now = time.monotonic()
        late = []
        for attempt in list(self._exchange.active.values()):
            if attempt.state == BUFFERED:
                if now - attempt.granted_at > MAX_BUFFER_TIME:
                    late.append(attempt)
            elif attempt.state == STARTED:
                self._check_deadline(attempt, now)
        if late:
            self._release(late)

    def _check_deadline(self, attempt: Attempt, now: float) -> None:
        if attempt.deadline is None or now <= attempt.deadline:
            return
        if attempt.report_by is None:
            attempt.report_by = now + STOP_GRACE
            self._exchange.stop_attempt(attempt, "timeout")
        elif now > attempt.report_by and attempt.cancellation.reason != "shutdown":
            self._executor.report_unresponsive(attempt)


def _selected(app: Longshore, kinds: Iterable[str] | None) -> dict[str, Job[Any, Any]]:
    if not app.registry:
        raise LongshoreError(
            "no job is registered; decorate a function with `@ls.job()`, and import the modules that do so before "
            "the worker starts, for example in the module that you name to longshore-worker",
            slug="validation",
        )
    if kinds is None:
        return dict(app.registry)
    selected = {}
    for kind in kinds:
        if kind not in app.registry:
            known = ", ".join(sorted(app.registry))
            raise LongshoreError(f"kinds: `{kind}` is not registered; known kinds are {known}", slug="validation")
        selected[kind] = app.registry[kind]
    return selected
