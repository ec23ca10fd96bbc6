"""What a handler can do: durable steps, waits, children, progress, checkpoints and follow-up jobs.

`Context` is for async handlers, `SyncContext` for the others. Both use a `Backend`: a worker (`_backend.py`) or a
test (`testing.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, overload

from ._attempt import Attempt, Cancellation
from ._codec import Codec, Json, codec_for
from ._enqueue import NewJob, Seconds, seconds, to_json
from ._errors import DecodeError, Fail, LeaseLost, Suspended

if TYPE_CHECKING:
    from ._app import Longshore

T = TypeVar("T")
#: The default of a context parameter, for type checkers without the mypy plugin: `ctx: Context = INJECTED`.
INJECTED: Any = object()


@dataclass(frozen=True)
class Wait:
    """One of the things that `ctx.any` waits for."""

    event_name: str | None = None
    seconds: float | None = None

    @staticmethod
    def event(name: str) -> Wait:
        return Wait(event_name=name)

    @staticmethod
    def sleep(time: Seconds) -> Wait:
        return Wait(seconds=seconds(time))


@dataclass(frozen=True)
class First:
    """What came first: its position, and the event and its payload, if it is one."""

    index: int
    event: str | None
    payload: Json


@dataclass(frozen=True)
class Child:
    """A child that has ended."""

    id: str
    task: str | None
    outcome: str
    result: Json
    error: str | None


class Children:
    """The children that `ctx.join` waited for."""

    def __init__(self, children: list[Child]) -> None:
        self._children = children

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Child]:
        return iter(self._children)

    @property
    def failed(self) -> list[Child]:
        return [child for child in self._children if child.outcome != "succeeded"]

    def results(self) -> list[Json]:
        """The results of all children. Fails the job if one of them has not succeeded."""
        for child in self.failed:
            raise Fail(f"child {child.id} ended as {child.outcome}: {child.error}")
        return [child.result for child in self._children]


@dataclass(frozen=True)
class Input:
    """The result of a task that this one waited for."""

    task: str | None
    id: str
    outcome: str
    result: Json


@dataclass
class DoneWait:
    name: str
    event: str | None
    payload: Json


class Backend(Protocol):
    """Stores what handlers do. The futures end with `LeaseLost`, `Suspended` or a `LongshoreError`."""

    def save_step(self, attempt: Attempt, name: str, value: Json) -> Future[None]: ...
    def save_checkpoint(self, attempt: Attempt, value: Json) -> Future[None]: ...
    def report_progress(self, attempt: Attempt, value: Json) -> None: ...
    def journal(self, attempt: Attempt) -> Future[list[dict[str, Any]]]: ...
    def wait(self, attempt: Attempt, waits: list[dict[str, Any]]) -> Future[list[DoneWait]]: ...
    def spawn(self, attempt: Attempt, name: str, jobs: list[dict[str, Any]]) -> Future[None]: ...
    def join(self, attempt: Attempt, name: str) -> Future[list[Child]]: ...
    def inputs(self, attempt: Attempt) -> Future[list[Input]]: ...


class _BaseContext:
    """What async and sync handlers have in common."""

    def __init__(self, app: Longshore, attempt: Attempt, backend: Backend) -> None:
        self.app = app
        self._attempt = attempt
        self._backend = backend
        self._used_names: set[str] = set()
        self._steps: dict[str, dict[str, Any]] | None = None
        steps = attempt.job.get("steps")
        if steps is not None:
            self._read_journal(steps)
        elif attempt.lease_no == 1:
            self._steps = {}

    @property
    def id(self) -> str:
        """The id of the job. Send it to other systems as an idempotency key."""
        return self._attempt.id

    @property
    def kind(self) -> str:
        return self._attempt.kind.name

    @property
    def queue(self) -> str:
        return str(self._attempt.job["queue"])

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return int(self._attempt.job["attempt"])

    @property
    def max_attempts(self) -> int:
        return int(self._attempt.job["max_attempts"])

    @property
    def lease_no(self) -> int:
        return self._attempt.lease_no

    @property
    def tags(self) -> list[str]:
        return list(self._attempt.job.get("tags") or [])

    @property
    def flags(self) -> list[str]:
        return list(self._attempt.job.get("flags") or [])

    @property
    def flow(self) -> str | None:
        return cast("str | None", self._attempt.job.get("flow"))

    @property
    def metadata(self) -> Json:
        return self._attempt.job.get("metadata")

    @property
    def why(self) -> str | None:
        """The `context` of the enqueue: why the job was enqueued."""
        return cast("str | None", self._attempt.job.get("context"))

    @property
    def checkpoint(self) -> Json:
        """What an earlier attempt, or this one, stored with `save_checkpoint`."""
        return self._attempt.job.get("checkpoint")

    @property
    def cancelled(self) -> Cancellation:
        """Whether this attempt has to stop, and why."""
        return self._attempt.cancellation

    def raise_if_cancelled(self) -> None:
        """Raises `Cancelled` if this attempt has to stop. Call it in loops of sync handlers."""
        self._attempt.cancellation.raise_if_set()

    def progress(self, value: Json) -> None:
        """Reports progress, at most 64 KiB of JSON. The newest report is sent within a second."""
        self._backend.report_progress(self._attempt, _round_trip(value))

    def enqueue(self, job: NewJob) -> None:
        """Enqueues a follow-up job. It is stored together with the success of this job, or not at all."""
        if self._attempt.follow_ups is None:
            self._attempt.follow_ups = []
        self._attempt.follow_ups.append(job)

    # --- The journal ---

    def _read_journal(self, steps: list[dict[str, Any]]) -> None:
        self._steps = {step["name"]: step for step in steps}

    def _use(self, what: str, name: str, key: str) -> None:
        if key in self._used_names:
            raise Fail(
                f"{what} `{name}`: the name is used twice in this attempt; give each step its own name, for example "
                "with a number"
            )
        self._used_names.add(key)

    def _stored(self, what: str, name: str) -> tuple[bool, Json]:
        """Whether an earlier attempt stored this step, and its value."""
        step = (self._steps or {}).get(name)
        if step is None:
            return False, None
        if (step.get("status") or step.get("state")) == "waiting":
            raise Fail(f"{what} `{name}`: an earlier version of this job waited under this name; use another name")
        return True, step.get("value")

    def _check_lease(self) -> None:
        """Refuses work that could not be stored: the lease is lost, or the end of the attempt was reported."""
        attempt = self._attempt
        if attempt.is_lost or attempt.is_settled or attempt.cancellation.reason == "lease_lost":
            raise LeaseLost(f"lease {self.lease_no} of job {self.id} has ended; stop, nothing more is stored")

    def _suspended(self) -> Suspended:
        self._attempt.is_suspended = True
        return Suspended(f"job {self.id} waits without a worker")


def _round_trip(value: Any) -> Json:
    """The value as it looks after it was stored, so that a first run and a repetition see the same."""
    return json.loads(to_json(_ANY.encode(value)))


_ANY: Codec = codec_for(Any)


def _codec_of(work: Callable[..., Any], returns: Any) -> Codec:
    if returns is not None:
        return codec_for(returns)
    try:
        hint = typing.get_type_hints(work).get("return")
    except (NameError, TypeError):
        hint = None
    if hint is None:
        return _ANY
    try:
        return codec_for(hint)
    except TypeError:
        return _ANY


def _encode_step(name: str, codec: Codec, value: Any) -> Json:
    try:
        return json.loads(to_json(codec.encode(value)))
    except (TypeError, ValueError, AttributeError) as error:
        raise Fail(f"step `{name}`: its value is not JSON: {error}") from None


def _decode_step(name: str, codec: Codec, value: Json) -> Any:
    try:
        return codec.decode(value)
    except DecodeError as error:
        raise Fail(
            f"step `{name}`: the stored value does not fit the type: {error}; give the changed step a new name"
        ) from None


def _wait_body(name: str, waits: Iterable[Wait]) -> dict[str, Any]:
    waits = list(waits)
    if not waits:
        raise Fail(f"any `{name}`: name at least one thing to wait for")
    body: dict[str, Any] = {"name": name}
    events = [wait.event_name for wait in waits if wait.event_name is not None]
    sleeps = [wait.seconds for wait in waits if wait.seconds is not None]
    if events:
        body["events"] = events
    if sleeps:
        body["within_seconds"] = min(sleeps)
    return body


def _first(name: str, waits: list[Wait], done: DoneWait) -> First:
    if done.event is None:
        sleeps = [(wait.seconds, index) for index, wait in enumerate(waits) if wait.seconds is not None]
        index = min(sleeps)[1] if sleeps else -1
    else:
        index = next((i for i, wait in enumerate(waits) if wait.event_name == done.event), -1)
    if index < 0:
        what = "the end of a sleep" if done.event is None else f"the event `{done.event}`"
        raise Fail(
            f"`{name}`: {what} came first, but the job no longer waits for it; give the changed wait a new name"
        )
    return First(index, done.event, done.payload)


def _event_waits(name: str, within: Seconds | None) -> list[Wait]:
    return [Wait.event(name)] + ([] if within is None else [Wait.sleep(within)])


def _decode_event(name: str, done: DoneWait, kind: Any) -> Any:
    if done.event is None:
        return None
    if kind is None:
        return done.payload
    try:
        return codec_for(kind).decode(done.payload)
    except DecodeError as error:
        raise Fail(f"event `{name}`: its payload does not fit the type: {error}") from None


def _children_body(name: str, jobs: Iterable[NewJob]) -> list[dict[str, Any]]:
    bodies = []
    for job in jobs:
        if not isinstance(job, NewJob):
            raise TypeError(f"spawn `{name}`: pass jobs made with `job.new(…)`, not {type(job).__name__}")
        bodies.append(job.to_wire(with_id=False))
    return bodies


def _input(task: str, inputs: list[Input]) -> Json:
    for entry in inputs:
        if entry.task == task:
            if entry.outcome != "succeeded":
                raise Fail(f"input `{task}`: the task has no result, because it ended as {entry.outcome}")
            return entry.result
    known = ", ".join(f"`{entry.task}`" for entry in inputs if entry.task) or "no other task"
    raise Fail(f"input `{task}`: this job does not wait for a task of this name; it waits for {known}")


class Context(_BaseContext):
    """The context of an async handler."""

    def __init__(self, app: Longshore, attempt: Attempt, backend: Backend) -> None:
        super().__init__(app, attempt, backend)
        self._working = 0
        self._pending: list[tuple[dict[str, Any], asyncio.Future[DoneWait]]] = []
        self._flush: asyncio.Task[None] | None = None
        #: Set when the last step in progress ends.
        self._idle: asyncio.Event | None = None
        #: Calls in flight that may suspend the job.
        self._suspensions: set[asyncio.Future[Any]] = set()
        self._journal_lock: asyncio.Lock | None = None

    async def save_checkpoint(self, value: Json) -> None:
        """Stores a value with the job, at most 1 MiB. Later attempts read it with `checkpoint`."""
        value = _round_trip(value)
        with self._work():
            await asyncio.wrap_future(self._backend.save_checkpoint(self._attempt, value))
        self._attempt.job["checkpoint"] = value

    @overload
    async def step(self, name: str, work: Callable[[], Awaitable[T]], *, returns: Any = None) -> T: ...
    @overload
    async def step(self, name: str, work: Callable[[], T], *, returns: Any = None) -> T: ...
    async def step(self, name: str, work: Callable[[], Any], *, returns: Any = None) -> Any:
        """Does a piece of work once. If the job runs again, the stored value is returned.

        The value is stored as JSON. Its type is the return annotation of `work`, or `returns`.
        """
        await self._load()
        self._use("step", name, name)
        codec = _codec_of(work, returns)
        with self._work():
            is_stored, value = self._stored("step", name)
            if not is_stored:
                await self._not_suspending()
                self._check_lease()
                value = work()
                if inspect.isawaitable(value):
                    value = await value
                value = _encode_step(name, codec, value)
                await asyncio.wrap_future(self._backend.save_step(self._attempt, name, value))
            return _decode_step(name, codec, value)

    async def sleep(self, name: str, time: Seconds) -> None:
        """Waits without a worker. The time counts from the first time that the job gets here."""
        self._use("sleep", name, name)
        await self._wait(_wait_body(name, [Wait.sleep(time)]))

    @overload
    async def event(self, name: str, *, within: Seconds | None = None, type: type[T]) -> T | None: ...
    @overload
    async def event(self, name: str, *, within: Seconds | None = None, type: None = None) -> Any: ...
    async def event(self, name: str, *, within: Seconds | None = None, type: Any = None) -> Any:
        """Waits for an event without a worker, and returns its payload; None if it did not come in time."""
        key = f"event:{name}"
        self._use("event", name, key)
        return _decode_event(name, await self._wait(_wait_body(key, _event_waits(name, within))), type)

    async def any(self, name: str, waits: Iterable[Wait]) -> First:
        """Waits for the first of several things without a worker. What came first is stored."""
        waits = list(waits)
        self._use("any", name, name)
        return _first(name, waits, await self._wait(_wait_body(name, waits)))

    async def spawn(self, name: str, jobs: Iterable[NewJob]) -> None:
        """Enqueues children of this job, once, as a durable step. `join` waits for them."""
        await self._load()
        self._use("spawn", name, name)
        if self._stored("spawn", name)[0]:
            return
        bodies = _children_body(name, jobs)
        with self._work():
            await asyncio.wrap_future(self._backend.spawn(self._attempt, name, bodies))

    async def join(self, name: str) -> Children:
        """Waits, without a worker, until all children have ended."""
        self._use("join", name, name)
        await asyncio.sleep(0)  # sibling tasks that were created in the same moment reach their first step
        while self._working:  # no step of a concurrent task is cut short
            self._idle = self._idle or asyncio.Event()
            self._idle.clear()
            await self._idle.wait()
        try:
            return Children(await self._suspending(self._backend.join(self._attempt, name)))
        except Suspended:
            raise self._suspended() from None

    async def inputs(self) -> list[Input]:
        """The tasks of the flow that this one waited for, with their results."""
        return await asyncio.wrap_future(self._backend.inputs(self._attempt))

    async def input(self, task: str) -> Json:
        """The result of a task of the flow that this one waited for."""
        return _input(task, await self.inputs())

    async def _load(self) -> None:
        if self._steps is None:
            self._journal_lock = self._journal_lock or asyncio.Lock()
            async with self._journal_lock:
                if self._steps is None:
                    self._read_journal(await asyncio.wrap_future(self._backend.journal(self._attempt)))

    async def _suspending(self, call: Future[T]) -> T:
        """The reply of a call that may suspend the job."""
        future = asyncio.wrap_future(call)
        self._suspensions.add(future)
        try:
            return await future
        finally:
            self._suspensions.discard(future)

    async def _not_suspending(self) -> None:
        """Waits for calls in flight that may suspend the job: the work of a step must not start just before."""
        while self._suspensions:
            await asyncio.wait(set(self._suspensions))
            if self._attempt.is_suspended:
                raise self._suspended()

    def _work(self) -> _Working:
        return _Working(self)

    async def _wait(self, body: dict[str, Any]) -> DoneWait:
        """Suspends the job when no step of a concurrent task is in progress, so that no work is cut short."""
        done: asyncio.Future[DoneWait] = asyncio.get_running_loop().create_future()
        self._pending.append((body, done))
        self._schedule_flush()
        return await done

    def _schedule_flush(self) -> None:
        if self._pending and self._working == 0 and self._flush is None:
            # A task, so that sibling tasks that were created in the same moment reach their first step before it.
            self._flush = asyncio.get_running_loop().create_task(self._flush_waits())

    async def _flush_waits(self) -> None:
        try:
            if self._working:
                return
            pending, self._pending = self._pending, []
            try:
                bodies = [body for body, _ in pending]
                over = await self._suspending(self._backend.wait(self._attempt, bodies))
            except BaseException as error:
                if isinstance(error, Suspended):
                    error = self._suspended()
                for _, done in pending:
                    if not done.done():
                        done.set_exception(error)
                        done.exception()  # a task that was cancelled meanwhile never reads it
                return
            by_name = {wait.name: wait for wait in over}
            for body, done in pending:
                if body["name"] in by_name:
                    if not done.done():
                        done.set_result(by_name[body["name"]])
                else:
                    self._pending.append((body, done))
            await asyncio.sleep(0)  # the tasks that continue may start a step now
        finally:
            self._flush = None
            self._schedule_flush()


class _Working:
    """Counts a step in progress, which delays the suspension of its job."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context

    def __enter__(self) -> None:
        self.context._working += 1

    def __exit__(self, *_: object) -> None:
        self.context._working -= 1
        if self.context._working == 0 and self.context._idle is not None:
            self.context._idle.set()
        self.context._schedule_flush()


class SyncContext(_BaseContext):
    """The context of a handler that is not async. Use it in one thread at a time."""

    def save_checkpoint(self, value: Json) -> None:
        """Stores a value with the job, at most 1 MiB. Later attempts read it with `checkpoint`."""
        value = _round_trip(value)
        self._backend.save_checkpoint(self._attempt, value).result()
        self._attempt.job["checkpoint"] = value

    def step(self, name: str, work: Callable[[], T], *, returns: Any = None) -> T:
        """Does a piece of work once. If the job runs again, the stored value is returned."""
        self._load()
        self._use("step", name, name)
        codec = _codec_of(work, returns)
        is_stored, value = self._stored("step", name)
        if not is_stored:
            self._check_lease()
            value = _encode_step(name, codec, work())
            self._backend.save_step(self._attempt, name, value).result()
        return cast(T, _decode_step(name, codec, value))

    def sleep(self, name: str, time: Seconds) -> None:
        """Waits without a worker. The time counts from the first time that the job gets here."""
        self._use("sleep", name, name)
        self._wait(_wait_body(name, [Wait.sleep(time)]))

    @overload
    def event(self, name: str, *, within: Seconds | None = None, type: type[T]) -> T | None: ...
    @overload
    def event(self, name: str, *, within: Seconds | None = None, type: None = None) -> Any: ...
    def event(self, name: str, *, within: Seconds | None = None, type: Any = None) -> Any:
        """Waits for an event without a worker, and returns its payload; None if it did not come in time."""
        key = f"event:{name}"
        self._use("event", name, key)
        return _decode_event(name, self._wait(_wait_body(key, _event_waits(name, within))), type)

    def any(self, name: str, waits: Iterable[Wait]) -> First:
        """Waits for the first of several things without a worker. What came first is stored."""
        waits = list(waits)
        self._use("any", name, name)
        return _first(name, waits, self._wait(_wait_body(name, waits)))

    def spawn(self, name: str, jobs: Iterable[NewJob]) -> None:
        """Enqueues children of this job, once, as a durable step. `join` waits for them."""
        self._load()
        self._use("spawn", name, name)
        if self._stored("spawn", name)[0]:
            return
        self._backend.spawn(self._attempt, name, _children_body(name, jobs)).result()

    def join(self, name: str) -> Children:
        """Waits, without a worker, until all children have ended."""
        self._use("join", name, name)
        try:
            return Children(self._backend.join(self._attempt, name).result())
        except Suspended:
            raise self._suspended() from None

    def inputs(self) -> list[Input]:
        """The tasks of the flow that this one waited for, with their results."""
        return self._backend.inputs(self._attempt).result()

    def input(self, task: str) -> Json:
        """The result of a task of the flow that this one waited for."""
        return _input(task, self.inputs())

    def _load(self) -> None:
        if self._steps is None:
            self._read_journal(self._backend.journal(self._attempt).result())

    def _wait(self, body: dict[str, Any]) -> DoneWait:
        try:
            over = self._backend.wait(self._attempt, [body]).result()
        except Suspended:
            raise self._suspended() from None
        if not over:
            raise LeaseLost(f"the server did not say how the wait `{body['name']}` ended")
        return over[0]
