"""Tests without a server, and a server for tests.

    from longshore import testing

    def test_signup(ls):
        with testing.manual(ls) as queue:
            sign_up("ada@example.com")
            queue.assert_enqueued(send_report, to="ada@example.com")
            queue.run_pending()

`manual` keeps jobs until `run_pending`; `inline` runs each job when it is enqueued. Payloads and results are
always converted to JSON and back. The clock stands still until `advance`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from ._app import Interception, Longshore
from ._attempt import Attempt
from ._codec import Json
from ._context import Child, Context, DoneWait, Input, SyncContext
from ._dev_server import DevServer
from ._enqueue import NewJob, to_json
from ._errors import DecodeError, Fail, LongshoreError, Suspended, ValidationError
from ._http import Reply, Request
from ._ids import new_id
from ._job import Job
from ._operations import Enqueued

__all__ = ["DevServer", "Queue", "TestJob", "inline", "manual"]

T = TypeVar("T")
_ENDED = ("succeeded", "failed_permanent", "cancelled")
_MAX_RUNS = 10_000


@dataclass
class TestJob:
    """A job of a test queue."""

    __test__ = False

    id: str
    kind: str
    payload: Json
    options: dict[str, Any]
    run_at: datetime
    status: str = "queued"
    attempts: int = 0
    leases: int = 0
    result: Json = None
    last_error: str | None = None
    progress: Json = None
    checkpoint: Json = None
    steps: dict[str, Json] = field(default_factory=dict)
    #: The waits of a suspended job: name → deadline and events.
    waits: dict[str, tuple[datetime | None, list[str]]] = field(default_factory=dict)
    children: dict[str, list[str]] = field(default_factory=dict)
    flow: str | None = None
    task: str | None = None
    after: list[tuple[str, str]] = field(default_factory=list)
    cancel_requested: bool = False
    #: Whether it is a task of a flow that can never start.
    is_skipped: bool = False
    #: Whether its unique key moved to another job, so that it is not retried.
    is_superseded: bool = False

    @property
    def has_ended(self) -> bool:
        return self.status in _ENDED

    def wait_again(self) -> None:
        self.status = "retrying" if self.attempts else "queued"

    def to_wire(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "queue": self.options.get("queue", "default"),
            "status": self.status,
            "priority": self.options.get("priority", 0),
            "attempts": self.attempts,
            "max_attempts": self.options.get("max_attempts", 3),
            "payload": self.payload,
            "result": self.result,
            "last_error": self.last_error,
            "progress": self.progress,
            "tags": self.options.get("tags", []),
            "flags": self.options.get("flags", []),
            "context": self.options.get("context"),
            "metadata": self.options.get("metadata"),
            "unique_key": self.options.get("unique_key"),
            "idempotency_key": self.options.get("idempotency_key"),
            "run_at": self.run_at.isoformat(),
            "flow": self.flow,
            "task": self.task,
            "cancel_requested": self.cancel_requested,
            "errors": [],
        }


class Queue(Interception):
    """Jobs in memory. Use `manual(ls)` or `inline(ls)` to get one."""

    def __init__(self, app: Longshore, *, is_inline: bool) -> None:
        self.app = app
        self.is_inline = is_inline
        self.now = datetime.now(timezone.utc)
        self.jobs: list[TestJob] = []
        self.events: dict[str, tuple[Json, datetime]] = {}
        self._flows: dict[str, _Flow] = {}
        self._lock = threading.RLock()
        self._is_running = False

    # --- What tests call ---

    def advance(self, time: float | timedelta) -> None:
        """Moves the clock. Call `run_pending` to run what is due then."""
        self.now += time if isinstance(time, timedelta) else timedelta(seconds=time)

    def emit(self, name: str, payload: Json = None) -> None:
        """Emits an event. The first event with a name wins."""
        self.events.setdefault(name, (_round_trip(payload), self.now))

    def enqueued(self, job: Job[Any, Any] | str | None = None) -> list[TestJob]:
        """The jobs that were enqueued, in order, of one kind or all."""
        name = job.name if isinstance(job, Job) else job
        return [entry for entry in self.jobs if name is None or entry.kind == name]

    def get(self, id: str) -> TestJob:
        for entry in self.jobs:
            if entry.id == id:
                return entry
        raise LookupError(f"job {id} does not exist")

    def assert_enqueued(self, job: Job[Any, Any] | str, **payload: Any) -> TestJob:
        """Asserts that a job was enqueued whose payload has at least these fields. Returns it."""
        expected = payload
        if isinstance(job, Job):
            codecs = job.signature.parameters
            expected = {
                name: codecs[name].encode(value) if name in codecs else value for name, value in payload.items()
            }
        expected = _round_trip(expected)
        candidates = self.enqueued(job)
        for entry in candidates:
            if isinstance(entry.payload, dict) and expected.items() <= _Comparable(entry.payload).items():
                return entry
        name = job.name if isinstance(job, Job) else job
        found = [json.dumps(entry.payload) for entry in candidates] or ["none"]
        raise AssertionError(f"no job `{name}` with {json.dumps(expected)} was enqueued; found: {', '.join(found)}")

    def assert_not_enqueued(self, job: Job[Any, Any] | str) -> None:
        found = self.enqueued(job)
        if found:
            raise AssertionError(f"{len(found)} jobs `{found[0].kind}` were enqueued")

    def run_pending(self) -> int:
        """Runs jobs that are due, and those that they enqueue, until no job is due. Returns how many attempts ran."""
        runs = 0
        while (entry := self._next_due()) is not None:
            self._run(entry)
            runs += 1
            if runs > _MAX_RUNS:
                raise AssertionError(f"{_MAX_RUNS} attempts ran and jobs are still due; does a job enqueue itself?")
        return runs

    async def run_pending_async(self) -> int:
        """Like `run_pending`, on the current event loop."""
        runs = 0
        while (entry := self._next_due()) is not None:
            await self._run_async(entry)
            runs += 1
            if runs > _MAX_RUNS:
                raise AssertionError(f"{_MAX_RUNS} attempts ran and jobs are still due; does a job enqueue itself?")
        return runs

    def run_to_end(self, time: float | timedelta = timedelta(days=365)) -> int:
        """Runs jobs and moves the clock to the next due time, again and again, until nothing is due within `time`."""
        end = self.now + (time if isinstance(time, timedelta) else timedelta(seconds=time))
        runs = 0
        while True:
            runs += self.run_pending()
            moments = [moment for entry in self.jobs if (moment := self._due_at(entry)) is not None]
            if not moments or min(moments) > end:
                return runs
            self.now = max(self.now, min(moments))

    # --- When jobs run ---

    def _next_due(self) -> TestJob | None:
        self._end_flows()
        due = [
            (-entry.options.get("priority", 0), moment, index)
            for index, entry in enumerate(self.jobs)
            if (moment := self._due_at(entry)) is not None and moment <= self.now
        ]
        return self.jobs[min(due)[2]] if due else None

    def _due_at(self, entry: TestJob) -> datetime | None:
        """When the job can start; None if it has ended or waits for something else than time."""
        if entry.status not in ("queued", "retrying"):
            return None
        if entry.after and not self._is_ready(entry):
            return None
        if not entry.waits:
            return entry.run_at
        moments = []
        for until, events in entry.waits.values():
            if any(self._has_happened(name) for name in events):
                return self.now
            if until is not None:
                moments.append(until)
        return min(moments) if moments else None

    def _has_happened(self, event: str) -> bool:
        if event.startswith("children:"):
            parent = self.get(event.removeprefix("children:"))
            return all(self.get(id).has_ended for ids in parent.children.values() for id in ids)
        return event in self.events

    def _is_ready(self, entry: TestJob) -> bool:
        """Whether the tasks before this one have ended. A task whose condition cannot be met is skipped."""
        for task, condition in entry.after:
            other = next(job for job in self.jobs if job.flow == entry.flow and job.task == task)
            if not other.has_ended:
                self._due_at(other)
                if not other.has_ended:
                    return False
            is_met = condition == "ended" or (condition == "succeeded") == (other.status == "succeeded")
            if not is_met:
                entry.status, entry.is_skipped = "cancelled", True
                entry.last_error = f"skipped: task `{task}` ended as {other.status}"
                return False
        return True

    def _end_flows(self) -> None:
        """Enqueues the callbacks of flows whose tasks have all ended."""
        for id, flow in self._flows.items():
            members = [entry for entry in self.jobs if entry.flow == id]
            for entry in members:
                self._due_at(entry)  # skips it if it can never start
            if flow.has_ended or not flow.is_sealed or not all(entry.has_ended for entry in members):
                continue
            flow.has_ended = True
            has_failed = any(entry.status != "succeeded" and not entry.is_skipped for entry in members)
            for body in flow.callbacks["on_failure" if has_failed else "on_success"] + flow.callbacks["on_end"]:
                self._store(body)

    # --- Running ---

    def _run(self, entry: TestJob) -> None:
        job, attempt, arguments, error = self._prepare(entry)
        result = None
        if error is None:
            try:
                result = job.function(**arguments)
                if inspect.isawaitable(result):
                    result = _run_coroutine(result)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as problem:
                error = problem
        self._settle(entry, attempt, result, error)

    async def _run_async(self, entry: TestJob) -> None:
        job, attempt, arguments, error = self._prepare(entry)
        result = None
        if error is None:
            try:
                result = job.function(**arguments)
                if inspect.isawaitable(result):
                    result = await result
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as problem:
                error = problem
        self._settle(entry, attempt, result, error)

    def _prepare(self, entry: TestJob) -> tuple[Job[Any, Any], Attempt, dict[str, Any], BaseException | None]:
        job = self.app.registry.get(entry.kind)
        if job is None:
            raise LongshoreError(f"kind `{entry.kind}` has no handler; decorate a function with @ls.job()")
        entry.status = "running"
        entry.attempts += 1
        entry.leases += 1
        lease = {
            **entry.to_wire(),
            "lease_no": entry.leases,
            "attempt": entry.attempts,
            "steps": [{"name": name, "status": "done", "value": value} for name, value in entry.steps.items()],
            "checkpoint": entry.checkpoint,
            "timeout_seconds": None,
            "traceparent": None,
        }
        attempt = Attempt(_round_trip(lease), job)
        context = Context if job.is_async else SyncContext
        try:
            return job, attempt, attempt.arguments(context, self.app, _QueueBackend(self, entry)), None
        except LongshoreError as error:
            return job, attempt, {}, error

    def _settle(self, entry: TestJob, attempt: Attempt, result: Any, error: BaseException | None) -> None:
        if attempt.is_suspended:
            entry.attempts -= 1
            entry.wait_again()
            if entry.cancel_requested:
                entry.status = "cancelled"
            return
        report = json.loads(attempt.ended(result, error))
        entry.waits.clear()
        outcome = report["outcome"]
        if "error" in report:
            entry.last_error = report["error"]
        if outcome == "succeeded":
            entry.status, entry.result = "succeeded", report["result"]
            for body in report.get("follow_ups", []):
                self._store(body)
        elif outcome == "cancelled" or entry.cancel_requested:
            entry.status = "cancelled"
        elif outcome == "snoozed":
            entry.attempts -= 1
            entry.wait_again()
            entry.run_at = self.now + timedelta(seconds=report["delay_seconds"])
        else:
            delay = report.get("retry_after_seconds")
            if delay is None:
                delay = _backoff(entry)
            is_last = entry.attempts >= entry.options.get("max_attempts", 3) or entry.is_superseded
            if report.get("permanent") or delay is None or is_last:
                entry.status = "failed_permanent"
            else:
                entry.wait_again()
                entry.run_at = self.now + timedelta(seconds=delay)

    # --- In place of the server ---

    def send(self, request: Request) -> Reply:
        reply = self._handle(request)
        if not self._is_running and (self.is_inline or _waits_for_job(request, reply)):
            with self._running():
                self.run_pending()
            reply = self._after_run(request, reply)
        return reply

    async def send_async(self, request: Request) -> Reply:
        reply = self._handle(request)
        if not self._is_running and (self.is_inline or _waits_for_job(request, reply)):
            with self._running():
                await self.run_pending_async()
            reply = self._after_run(request, reply)
        return reply

    def _after_run(self, request: Request, reply: Reply) -> Reply:
        """The reply to a request that waits for a job, after all jobs that are due have run."""
        if not request.wait:
            return reply
        reply = self._handle(request)
        if _waits_for_job(request, reply):
            job = json.loads(reply.body)
            # The client would ask again and again.
            raise AssertionError(
                f"job {job['id']} ({job['kind']}) is {job['status']} and does not end while the clock stands still "
                f"(last error: {job['last_error']}); use `advance`, `emit` or `run_to_end`"
            )
        return reply

    def enqueue_in(self, connection: Any, job: NewJob) -> Any:
        """The job is stored at once: this queue has no part in the transaction."""
        entry, how = self._store(job.to_wire())
        done = Enqueued(entry.id, how)
        module = type(connection).__module__
        execute = getattr(connection, "execute", None)
        if module.startswith(("asyncpg", "sqlalchemy.ext.asyncio")) or inspect.iscoroutinefunction(execute):

            async def finish() -> Enqueued:
                return done

            return finish()
        return done

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        # A job that enqueues another one does not run it inside itself, but after it.
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _store(self, body: dict[str, Any]) -> tuple[TestJob, str]:
        body = _round_trip(body)
        _check(body, self.app.registry.get(body["kind"]))
        run_at = self.now + timedelta(seconds=body.get("delay_seconds") or 0)
        if body.get("run_at"):
            run_at = datetime.fromisoformat(body["run_at"].replace("Z", "+00:00"))
        options = {name: value for name, value in body.items() if name not in ("id", "kind", "payload")}
        key, unique = body.get("idempotency_key"), body.get("unique_key")
        with self._lock:
            for entry in self.jobs:
                if entry.id == body.get("id") or (key and entry.options.get("idempotency_key") == key):
                    return entry, "existing"
            live = [entry for entry in self.jobs if unique and not entry.has_ended]
            holder = next((entry for entry in live if entry.options.get("unique_key") == unique), None)
            mode = body.get("unique_mode") or "dedupe"
            if holder is not None and mode == "dedupe" and not holder.cancel_requested:
                return holder, "existing"
            if holder is not None and holder.status == "running":
                holder.options["unique_key"], holder.is_superseded = None, True
            elif holder is not None:
                holder.kind, holder.payload, holder.options = body["kind"], body["payload"], options
                holder.status, holder.attempts, holder.checkpoint = "queued", 0, None
                if mode == "replace":
                    holder.run_at = run_at
                return holder, "replaced"
            entry = TestJob(body.get("id") or new_id(), body["kind"], body["payload"], options, run_at)
            self.jobs.append(entry)
            return entry, "created"

    def _handle(self, request: Request) -> Reply:
        url = urlsplit(request.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        body = json.loads(request.body) if request.body else None
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        try:
            return self._route(request.method, parts, body, query)
        except LookupError as error:
            return _reply(404, {"error": "not_found", "message": str(error)})
        except ValidationError as error:
            return _reply(422, {"error": "validation", "message": error.message})

    def _route(self, method: str, parts: list[str], body: Any, query: dict[str, str]) -> Reply:
        if (method, parts) == ("POST", ["jobs"]):
            entry, how = self._store(body)
            return _reply(201 if how == "created" else 200, entry.to_wire(), {"enqueued-as": how})
        if (method, parts) == ("POST", ["jobs", "batch"]):
            return _reply(200, {"items": [self._store_item(job) for job in body]})
        if (method, parts) == ("GET", ["jobs"]):
            matching = [
                entry.to_wire()
                for entry in reversed(self.jobs)
                if query.get("kind") in (None, entry.kind)
                and ("status" not in query or entry.status in query["status"].split(","))
            ]
            return _reply(200, matching)
        if (method, parts) == ("POST", ["events"]):
            self.emit(body["name"], body.get("payload"))
            payload, at = self.events[body["name"]]
            return _reply(201, {"name": body["name"], "payload": payload, "emitted_at": at.isoformat()})
        if (method, parts) == ("POST", ["flows"]):
            return self._start_flow(body)
        if parts[0] == "jobs" and len(parts) >= 2:
            entry = self.get(parts[1])
            action = parts[2] if len(parts) > 2 else None
            if (method, action) == ("GET", None):
                return _reply(200, entry.to_wire())
            if (method, action) == ("POST", "cancel"):
                if entry.has_ended:
                    return _conflict("the job has ended", entry)
                entry.cancel_requested = True
                if entry.status == "running":
                    return _reply(202, {"status": "pending", "job_id": entry.id})
                entry.status = "cancelled"
                return _reply(200, {"status": "cancelled", "job_id": entry.id})
            if (method, action) == ("POST", "retry"):
                return self._retry(entry, body or {})
            if (method, action) == ("DELETE", None):
                self.jobs.remove(entry)
                return _reply(204, None)
        raise NotImplementedError(
            f"{method} /{'/'.join(parts)}: the test queue does not support this; use the fixture `longshore_server`"
        )

    def _store_item(self, body: dict[str, Any]) -> dict[str, Any]:
        """One item of a batch. An invalid one does not affect the others."""
        try:
            entry, how = self._store(body)
        except ValidationError as error:
            return {"outcome": "refused", "id": body.get("id"), "error": "validation", "message": error.message}
        return {"outcome": how, "id": entry.id}

    def _retry(self, entry: TestJob, edit: dict[str, Any]) -> Reply:
        if entry.status == "running":
            return _conflict("the job is running", entry)
        entry.status, entry.attempts, entry.run_at = "queued", 0, self.now
        entry.cancel_requested = entry.is_skipped = entry.is_superseded = False
        if "payload" in edit:
            entry.payload, entry.checkpoint = edit["payload"], None
        if edit.get("priority") is not None:
            entry.options["priority"] = edit["priority"]
        if edit.get("delay_seconds"):
            entry.run_at = self.now + timedelta(seconds=edit["delay_seconds"])
        if edit.get("run_at"):
            entry.run_at = datetime.fromisoformat(edit["run_at"].replace("Z", "+00:00"))
        return _reply(200, entry.to_wire())

    def _start_flow(self, body: dict[str, Any]) -> Reply:
        key = body.get("idempotency_key")
        id = next((known for known, flow in self._flows.items() if key and flow.key == key), None)
        if id is None:
            id = body["id"]
            callbacks = {when: body.get(when, []) for when in ("on_success", "on_failure", "on_end")}
            self._flows[id] = _Flow(key, callbacks, body["sealed"])
            for index, task in enumerate(body["tasks"]):
                rest = {name: value for name, value in task.items() if name not in ("task", "after")}
                entry, _ = self._store(rest)
                entry.flow, entry.task = id, task.get("task") or str(index)
                for link in task.get("after", []):
                    link = {"task": link, "condition": "succeeded"} if isinstance(link, str) else link
                    entry.after.append((link["task"], link["condition"]))
        members = sum(entry.flow == id for entry in self.jobs)
        status = {"id": id, "name": body["name"], "status": "running", "members": members, "sealed": body["sealed"]}
        return _reply(201, status)


@dataclass
class _Flow:
    key: str | None
    callbacks: dict[str, list[dict[str, Any]]]
    is_sealed: bool
    has_ended: bool = False


def _check(body: dict[str, Any], job: Job[Any, Any] | None) -> None:
    """The checks of the server that tests should meet before production does."""

    def refuse(field: str, problem: str) -> None:
        raise ValidationError(f"{field}: {problem}")

    for name, limit in (("kind", 128), ("queue", 128), ("idempotency_key", 512), ("unique_key", 512)):
        value = body.get(name)
        if value is not None and not (isinstance(value, str) and 1 <= len(value.encode()) <= limit):
            refuse(name, f"must be a string of 1 to {limit} bytes")
    if body.get("queue") == "*":
        refuse("queue", "`*` means every queue, and only a worker can use it; name one queue")
    for name, low, high in (("priority", -32768, 32767), ("max_attempts", 1, 32767), ("delay_seconds", 0, 315360000)):
        value = body.get(name)
        if value is not None and not low <= value <= high:
            refuse(name, f"{value} is out of range; use {low} to {high}")
    for name in ("tags", "flags"):
        if len(body.get(name, [])) > 64 or not all(1 <= len(label.encode()) <= 128 for label in body.get(name, [])):
            refuse(name, "use at most 64, each of 1 to 128 bytes")
    size = len(to_json(body["payload"]))
    if size > 1 << 20:
        refuse("payload", f"{size} bytes of JSON exceed the limit of {1 << 20}; store the data elsewhere")
    if job is not None:
        try:
            job.signature.decode(body["payload"])
        except DecodeError as error:
            raise ValidationError(str(error)) from None


def _backoff(entry: TestJob) -> float | None:
    """When the next attempt starts: without randomness, as early as the policy allows. None for no retry."""
    policy = entry.options.get("retry") or {"policy": "jitter"}
    match policy["policy"]:
        case "none":
            return None
        case "fixed":
            delay = policy["delay_ms"]
        case "list":
            delays = policy["delays_ms"]
            delay = delays[min(entry.attempts, len(delays)) - 1]
        case "exponential":
            delay = min(policy.get("cap_ms") or 1000 << 20, 1000 << (entry.attempts + 1))
        case _:
            delay = policy.get("base_ms") or 1000
    return float(delay) / 1000


def _waits_for_job(request: Request, reply: Reply) -> bool:
    return bool(request.wait) and reply.status == 200 and json.loads(reply.body)["status"] not in _ENDED


def _conflict(message: str, entry: TestJob) -> Reply:
    return _reply(409, {"error": "conflict", "message": message, "job_status": entry.status})


class _Comparable(dict[str, Any]):
    """Lets unhashable values be compared as items."""

    def items(self) -> Any:
        return _Items(super().items())


class _Items:
    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __ge__(self, other: Any) -> bool:
        return all(name in self._items and self._items[name] == value for name, value in other)


def _reply(status: int, body: Any, headers: dict[str, str] | None = None) -> Reply:
    return Reply(status, headers or {}, b"" if body is None else json.dumps(body).encode())


def _round_trip(value: Any) -> Json:
    return json.loads(json.dumps(value, allow_nan=False))


def _run_coroutine(work: Any) -> Any:
    async def run() -> Any:
        return await work

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    # This thread has a running event loop, which cannot be entered again.
    outcome: list[Any] = []

    def other() -> None:
        try:
            outcome.append((asyncio.run(run()), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


class _QueueBackend:
    """Implements `Backend` for a job of a test queue."""

    def __init__(self, queue: Queue, entry: TestJob) -> None:
        self.queue, self.entry = queue, entry

    def save_step(self, attempt: Attempt, name: str, value: Json) -> Future[None]:
        self.entry.steps[name] = _round_trip(value)
        self.entry.attempts = 1
        return _done(None)

    def save_checkpoint(self, attempt: Attempt, value: Json) -> Future[None]:
        self.entry.checkpoint = _round_trip(value)
        return _done(None)

    def report_progress(self, attempt: Attempt, value: Json) -> None:
        self.entry.progress = _round_trip(value)

    def journal(self, attempt: Attempt) -> Future[list[dict[str, Any]]]:
        return _done([{"name": name, "status": "done", "value": value} for name, value in self.entry.steps.items()])

    def wait(self, attempt: Attempt, waits: list[dict[str, Any]]) -> Future[list[DoneWait]]:
        entry, queue = self.entry, self.queue
        over = []
        for wait in waits:
            name, events = wait["name"], wait.get("events", [])
            if name in entry.steps:
                over.append(DoneWait(name, entry.steps[name]["event"], entry.steps[name]["payload"]))
                continue
            until, _ = entry.waits.get(name, (None, []))
            within = wait.get("within_seconds")
            if until is None and within is not None:
                until = queue.now + timedelta(seconds=within)
            entry.waits[name] = (until, events)
            happened = [e for e in events if e in queue.events and (until is None or queue.events[e][1] <= until)]
            if happened:
                over.append(DoneWait(name, happened[0], queue.events[happened[0]][0]))
            elif until is not None and until <= queue.now:
                over.append(DoneWait(name, None, None))
        if not over:
            return _raised(Suspended())
        for done in over:
            entry.waits.pop(done.name, None)
            entry.steps[done.name] = {"event": done.event, "payload": done.payload}
        return _done(over)

    def spawn(self, attempt: Attempt, name: str, jobs: list[dict[str, Any]]) -> Future[None]:
        self.entry.children[name] = [self.queue._store(job)[0].id for job in jobs]
        self.entry.steps[name] = {"spawned": len(jobs)}
        return _done(None)

    def join(self, attempt: Attempt, name: str) -> Future[list[Child]]:
        if not self.entry.children:
            return _raised(Fail(f"join `{name}`: this job has no children; a job joins those that it has spawned"))
        children = [(task, self.queue.get(id)) for task, ids in self.entry.children.items() for id in ids]
        if not all(child.has_ended for _, child in children):
            self.entry.waits[name] = (None, [f"children:{self.entry.id}"])
            return _raised(Suspended())
        self.entry.waits.pop(name, None)
        return _done([Child(job.id, task, job.status, job.result, job.last_error) for task, job in children])

    def inputs(self, attempt: Attempt) -> Future[list[Input]]:
        inputs = []
        for task, _ in self.entry.after:
            other = next(job for job in self.queue.jobs if job.flow == self.entry.flow and job.task == task)
            inputs.append(Input(task, other.id, other.status, other.result))
        return _done(inputs)


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _raised(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


@contextlib.contextmanager
def manual(app: Longshore) -> Iterator[Queue]:
    """Replaces the server by a queue whose jobs run when the test calls `run_pending`."""
    yield from _replace(app, Queue(app, is_inline=False))


@contextlib.contextmanager
def inline(app: Longshore) -> Iterator[Queue]:
    """Replaces the server by a queue whose jobs run as soon as they are enqueued."""
    yield from _replace(app, Queue(app, is_inline=True))


def _replace(app: Longshore, queue: Queue) -> Iterator[Queue]:
    before, app.interception = app.interception, queue
    try:
        yield queue
    finally:
        app.interception = before
