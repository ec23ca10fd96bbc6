"""Runs handlers in child processes (`process=True`). Each child runs one job at a time; if it dies, the attempt
has failed and a new child starts.

A child has no connection to the server. Its context sends every call through a pipe to the thread that owns it.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ._attempt import Attempt, EncodedResult, FailedElsewhere, Reason, describe
from ._codec import Json
from ._context import Backend, SyncContext
from ._enqueue import to_json
from ._errors import Cancel, Fail, LeaseLost, PayloadMismatch, Retry, Snooze, Suspended

if TYPE_CHECKING:
    from ._execute import Executor
    from ._job import Job

_POLL = 0.1
#: How long a child may take to stop after its attempt was cancelled.
_KILL_AFTER = 5.0
#: How long an idle child stays.
_MAX_IDLE = 60.0


class ProcessDied(FailedElsewhere):
    """The process that ran the handler ended before the handler did."""


class ProcessLane:
    """Threads that each own one child process."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._work: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        #: Attempts that run or wait for a thread.
        self._attempts = 0
        self._children: set[_Child] = set()
        self._is_closed = False

    def submit(self, attempt: Attempt) -> None:
        with self._lock:
            self._attempts += 1
            self._work.put(attempt)
            if self._threads >= self._attempts:
                return
            self._threads += 1
        threading.Thread(target=self._own_child, name="longshore-process", daemon=True).start()

    def close(self) -> None:
        """Ends the children. One that still runs a handler is killed: its job was released, and may run elsewhere."""
        with self._lock:
            self._is_closed = True
            children = list(self._children)
            for _ in range(self._threads):
                self._work.put(None)
        for child in children:
            if child.is_busy:
                child.kill()

    def _own_child(self) -> None:
        child: _Child | None = None
        while (attempt := self._next()) is not None:
            result, error = None, None
            try:
                if self._executor.begin(attempt):
                    if child is None or not child.process.is_alive():
                        self._forget(child)
                        child = self._new_child()
                    result = child.run(self._executor, attempt)
            except BaseException as problem:
                error = problem
                if isinstance(problem, ProcessDied):
                    self._forget(child)
                    child = None
            with self._lock:
                self._attempts -= 1
            self._executor.finish(attempt, result, error)
        if child is not None:
            child.stop()
            self._forget(child)

    def _next(self) -> Attempt | None:
        """The next attempt for a thread. None ends the thread."""
        while True:
            try:
                attempt = self._work.get(timeout=_MAX_IDLE)
            except queue.Empty:
                attempt = None
            with self._lock:
                if attempt is None and not self._is_closed and self._threads <= self._attempts:
                    continue  # an attempt arrived meanwhile
                if attempt is None:
                    self._threads -= 1
            return attempt

    def _new_child(self) -> _Child:
        child = _Child()
        with self._lock:
            self._children.add(child)
        return child

    def _forget(self, child: _Child | None) -> None:
        with self._lock:
            if child is not None:
                self._children.discard(child)


class _Child:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_child_main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.is_busy = False

    def run(self, executor: Executor, attempt: Attempt) -> Any:
        """Runs one attempt, and makes the calls of its context."""
        job = attempt.kind
        calls = _Calls(executor.backend, attempt)
        self.is_busy = True
        try:
            self.pipe.send(("run", job.__module__, job.__qualname__, job.name, attempt.job))
            kill_at: float | None = None
            while True:
                if self.pipe.poll(_POLL):
                    message = self.pipe.recv()
                    if message[0] == "call":
                        self._reply(calls, message[1], message[2])
                        continue
                    attempt.follow_ups = message[2] or None
                    if message[0] == "done":
                        return message[1]
                    raise message[1]
                if attempt.cancellation.reason is not None:
                    if kill_at is None:
                        self.pipe.send(("cancel", attempt.cancellation.reason))
                        kill_at = time.monotonic() + _KILL_AFTER
                    elif time.monotonic() > kill_at:
                        self.kill()
                        raise ProcessDied("the process did not react to the cancellation and was killed")
        except (EOFError, OSError):
            self.process.join(1.0)
            raise ProcessDied(self._how_it_died()) from None
        finally:
            self.is_busy = False

    def _reply(self, calls: _Calls, name: str, args: tuple[Any, ...]) -> None:
        try:
            answer = ("ok", getattr(calls, name)(*args))
        except BaseException as error:
            answer = ("error", error)
        self.pipe.send(answer)

    def _how_it_died(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = "unknown"
            return f"the process that ran the handler was killed by signal {-code} ({name})"
        return f"the process that ran the handler exited with code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(1.0)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(("exit",))
        self.process.join(1.0)
        if self.process.is_alive():
            self.kill()


class _Calls:
    """What the context of a child may ask its parent to do."""

    def __init__(self, backend: Backend, attempt: Attempt) -> None:
        self._backend, self._attempt = backend, attempt

    def save_step(self, name: str, value: Json) -> None:
        self._backend.save_step(self._attempt, name, value).result()

    def save_checkpoint(self, value: Json) -> None:
        self._backend.save_checkpoint(self._attempt, value).result()

    def report_progress(self, value: Json) -> None:
        self._backend.report_progress(self._attempt, value)

    def journal(self) -> Any:
        return self._backend.journal(self._attempt).result()

    def wait(self, waits: list[dict[str, Any]]) -> Any:
        return self._backend.wait(self._attempt, waits).result()

    def spawn(self, name: str, jobs: list[dict[str, Any]]) -> None:
        self._backend.spawn(self._attempt, name, jobs).result()

    def join(self, name: str) -> Any:
        return self._backend.join(self._attempt, name).result()

    def inputs(self) -> Any:
        return self._backend.inputs(self._attempt).result()


# --- In the child ---


class _PipeBackend:
    """Implements `Backend` in a child."""

    def __init__(self, pipe: multiprocessing.connection.Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def answer(self, message: tuple[str, Any]) -> None:
        self._answers.put(message)

    def _call(self, name: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._pipe.send(("call", name, args))
            kind, value = self._answers.get()
        if kind == "ok":
            future.set_result(value)
        else:
            future.set_exception(value)
        return future

    def save_step(self, attempt: Attempt, name: str, value: Json) -> Future[None]:
        return self._call("save_step", name, value)

    def save_checkpoint(self, attempt: Attempt, value: Json) -> Future[None]:
        return self._call("save_checkpoint", value)

    def report_progress(self, attempt: Attempt, value: Json) -> None:
        self._call("report_progress", value).result()

    def journal(self, attempt: Attempt) -> Future[list[dict[str, Any]]]:
        return self._call("journal")

    def wait(self, attempt: Attempt, waits: list[dict[str, Any]]) -> Future[Any]:
        return self._call("wait", waits)

    def spawn(self, attempt: Attempt, name: str, jobs: list[dict[str, Any]]) -> Future[None]:
        return self._call("spawn", name, jobs)

    def join(self, attempt: Attempt, name: str) -> Future[Any]:
        return self._call("join", name)

    def inputs(self, attempt: Attempt) -> Future[Any]:
        return self._call("inputs")


def _child_main(pipe: multiprocessing.connection.Connection[Any, Any]) -> None:
    # The parent decides when the child stops. Not SIG_IGN, which programs that a handler starts would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    backend = _PipeBackend(pipe)
    runs: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    current: list[Attempt] = []
    #: Why the last run has to stop, also if its handler has not started yet.
    reasons: list[Reason] = []

    def read() -> None:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                # The worker is gone, and another one may get the job. The handler has a moment to stop.
                for attempt in list(current):
                    attempt.cancellation.set("lease_lost")
                runs.put(None)
                time.sleep(_KILL_AFTER)
                os._exit(1)
            if message[0] == "run":
                reasons.clear()
                runs.put(message)
            elif message[0] == "cancel":
                reasons.append(message[1])
                for attempt in list(current):
                    attempt.cancellation.set(message[1])
            elif message[0] == "exit":
                runs.put(None)
                return
            else:
                backend.answer(message)

    threading.Thread(target=read, daemon=True).start()
    while (run := runs.get()) is not None:
        # A context of its own: what a handler sets in context variables must not reach the next job.
        message = contextvars.Context().run(_run, backend, current, reasons, *run[1:])
        current.clear()
        try:
            pipe.send(message)
        except OSError:  # the worker is gone
            return
        except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
            pipe.send(("raised", Fail(f"the result cannot be sent to the worker: {error}"), None))


def _run(
    backend: _PipeBackend,
    current: list[Attempt],
    reasons: list[Reason],
    module: str,
    qualname: str,
    name: str,
    job_data: dict[str, Any],
) -> tuple[str, Any, Any]:
    """Runs one handler. Returns the message for the parent."""
    try:
        job = _find(module, qualname, name)
        attempt = Attempt(job_data, job)
        current[:] = [attempt]
        for reason in reasons:  # it came while the module of the handler was imported
            attempt.cancellation.set(reason)
        result = job.function(**attempt.arguments(SyncContext, job._app, backend))
        try:
            encoded = EncodedResult(to_json(job.signature.result.encode(result)).decode())
        except Exception as error:  # raised by the user's types too
            raise Fail(f"the result is not JSON: {error}") from None
        return "done", encoded, attempt.follow_ups
    except BaseException as error:
        return "raised", _portable(error), None


def _find(module: str, qualname: str, name: str) -> Job[Any, Any]:
    loaded = sys.modules.get("__mp_main__") if module == "__main__" else None
    target: Any = loaded or importlib.import_module(module)
    from ._job import Job

    with contextlib.suppress(AttributeError):
        for part in qualname.split("."):
            target = getattr(target, part)
        if isinstance(target, Job):
            return target
    raise Fail(f"the process cannot find `{qualname}` in module `{module}`; define the job `{name}` at module level")


def _portable(error: BaseException) -> BaseException:
    """The error as one that the parent can unpickle. Classes of the user may not be known there."""
    if isinstance(error, Retry):
        return Retry(str(error), after=error.after)
    if isinstance(error, Snooze):
        return Snooze(error.seconds)
    if isinstance(error, Cancel):
        return Cancel(str(error))
    if isinstance(error, Suspended):
        return Suspended()
    if isinstance(error, (Fail, PayloadMismatch)):
        return Fail(str(error))
    if isinstance(error, LeaseLost):
        return LeaseLost(str(error))
    return HandlerFailed(describe(error))


class HandlerFailed(FailedElsewhere):
    """The handler raised an error in its process."""
