"""The operations of the API as methods: `Client` for event loops, `SyncClient` for threads.

Both have the same methods. `Longshore` is a `Client`, and `Longshore().sync` is its `SyncClient`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from . import _operations as operations
from . import _wire
from ._codec import Json
from ._enqueue import Flow, JobId, NewJob
from ._errors import JobFailed, WaitTimeout
from ._operations import MAX_WAIT, Enqueued, Operation, Page

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
_ENDED = ("succeeded", "failed_permanent", "cancelled")


class JobFilter(TypedDict, total=False):
    """Which jobs a list contains."""

    status: _wire.Status | list[_wire.Status]
    kind: str
    queue: str
    group: str
    tag: str
    error: str
    failure: str
    id: str
    newer_than: datetime
    older_than: datetime
    ended_after: datetime
    ended_before: datetime
    idempotency_key: str
    unique_key: str
    limit: int
    offset: int
    cursor: str
    payload: bool


class SendsAsync(Protocol):
    async def send(self, operation: Operation[T]) -> T: ...


class SendsSync(Protocol):
    def send_sync(self, operation: Operation[T]) -> T: ...


def has_ended(job: _wire.Job) -> bool:
    return job["status"] in _ENDED


def result_of(job: _wire.Job) -> Json:
    """The result of a job that has ended, or the error that it ended with."""
    if job["status"] == "succeeded":
        return job["result"]
    reason = job["last_error"] or "no reason was given"
    message = f"job {job['id']} ({job['kind']}) ended as {job['status']}: {reason}"
    raise JobFailed(message, job_id=job["id"], job_status=job["status"])


def timed_out(id: JobId, timeout: float | None) -> WaitTimeout:
    return WaitTimeout(f"job {id} has not ended after {timeout} s; it continues, and `explain` says why it waits")


class _Waiting:
    """How long the next request of a wait may take."""

    def __init__(self, timeout: float | None) -> None:
        self.end = None if timeout is None else time.monotonic() + timeout

    def next(self) -> float:
        return self.limit(MAX_WAIT)

    def limit(self, seconds: float) -> float:
        """`seconds`, or less if the wait is over earlier."""
        return seconds if self.end is None else max(0.0, min(seconds, self.end - time.monotonic()))

    def is_over(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end


class Client:
    """The API for event loops."""

    async def send(self, operation: Operation[T]) -> T:
        raise NotImplementedError("`Longshore` implements this")

    async def enqueue(self, job: NewJob) -> Enqueued:
        """Enqueues a job by the name of its kind. `job.enqueue(…)` is the typed way to do this."""
        return await self.send(operations.enqueue(job))

    async def enqueue_many(self, jobs: Iterable[NewJob]) -> list[Enqueued]:
        """Enqueues jobs in batches of up to 10,000, each in one commit."""
        enqueued: list[Enqueued] = []
        for operation in operations.enqueue_many(jobs):
            batch = await self.send(operation)
            enqueued += batch
        return enqueued

    async def get(self, id: JobId) -> _wire.Job:
        return await self.send(operations.get(id))

    async def wait(self, id: JobId, timeout: float | None = None) -> _wire.Job:
        """Waits until the job has ended, and returns it."""
        waiting = _Waiting(timeout)
        while True:
            job, pause = await self.send(operations.await_end(id, waiting.next()))
            if has_ended(job):
                return job
            if waiting.is_over():
                raise timed_out(id, timeout)
            await asyncio.sleep(waiting.limit(pause))

    async def result(self, id: JobId, timeout: float | None = None) -> Json:
        """Waits until the job has ended, and returns its result. Raises `JobFailed` if it has none."""
        return result_of(await self.wait(id, timeout))

    async def list_jobs(self, **filters: Unpack[JobFilter]) -> Page:
        """One page of jobs, newest first."""
        return await self.send(operations.list_jobs(filters))

    async def jobs(self, **filters: Unpack[JobFilter]) -> AsyncIterator[_wire.Job]:
        """All jobs that match, newest first, page by page."""
        while True:
            page = await self.send(operations.list_jobs(filters))
            for job in page.jobs:
                yield job
            if page.cursor is None:
                return
            filters["cursor"] = page.cursor
            filters.pop("offset", None)

    async def cancel(self, id: JobId) -> _wire.CancelResponse:
        return await self.send(operations.cancel(id))

    async def retry(self, id: JobId, **edit: Any) -> _wire.Job:
        """Runs a finished job again. `payload`, `priority`, `delay_seconds` and `run_at` change it first.

        With a token without the scope `read`, the result has only `id` and `status`.
        """
        return await self.send(operations.retry(id, edit))

    async def delete(self, id: JobId) -> None:
        await self.send(operations.delete(id))

    async def explain(self, id: JobId) -> _wire.Explanation:
        """Why a job is not running, and when it will."""
        return await self.send(operations.explain(id))

    async def steps(self, id: JobId) -> list[_wire.Step]:
        return await self.send(operations.steps(id))

    async def emit(self, name: str, payload: Json = None) -> _wire.Event:
        """Emits an event that jobs wait for. The first event with a name wins."""
        return await self.send(operations.emit(name, payload))

    async def start_flow(self, flow: Flow) -> _wire.Flow:
        """Enqueues a flow. A flow with the same key or id is returned unchanged.

        With a token without the scope `read`, the result for a flow that existed has only `id` and `status`.
        """
        return await self.send(operations.start_flow(flow))

    async def get_flow(self, id: JobId) -> _wire.Flow:
        return await self.send(operations.get_flow(id))

    async def flow_tasks(self, id: JobId, cursor: str | None = None) -> list[_wire.FlowTask]:
        return await self.send(operations.flow_tasks(id, cursor))

    async def add_to_flow(self, id: JobId, jobs: Iterable[NewJob]) -> _wire.Flow:
        """Adds jobs to a flow that is not sealed.

        With a token without the scope `read`, the result has only `id` and `status`. The same holds for `seal_flow`.
        """
        return await self.send(operations.add_to_flow(id, jobs))

    async def seal_flow(self, id: JobId) -> _wire.Flow:
        return await self.send(operations.seal_flow(id))

    async def cancel_flow(self, id: JobId) -> _wire.CancelledFlow:
        return await self.send(operations.cancel_flow(id))

    async def retry_flow(self, id: JobId) -> _wire.RetriedFlow:
        return await self.send(operations.retry_flow(id))

    async def queues(self) -> list[_wire.Queue]:
        return await self.send(operations.queues())

    async def pause_queue(self, name: str) -> _wire.Queue:
        return await self.send(operations.pause_queue(name))

    async def resume_queue(self, name: str) -> _wire.Queue:
        return await self.send(operations.resume_queue(name))

    async def put_schedule(
        self, name: str, cron: str, job: NewJob, *, zone: str | None = None, missed: str | None = None
    ) -> _wire.Schedule:
        """Creates or changes a cron schedule. `missed` is `skip`, `one` or `all`."""
        return await self.send(operations.put_schedule(name, cron, job, zone, missed))

    async def schedules(self) -> list[_wire.Schedule]:
        return await self.send(operations.schedules())

    async def delete_schedule(self, name: str) -> None:
        await self.send(operations.delete_schedule(name))

    async def workers(self) -> list[_wire.Worker]:
        return await self.send(operations.workers())

    async def health(self) -> _wire.Health:
        return await self.send(operations.health())


class SyncClient:
    """The API for threads. The methods are those of `Client`."""

    def __init__(self, sender: SendsSync) -> None:
        self._sender = sender

    def send(self, operation: Operation[T]) -> T:
        return self._sender.send_sync(operation)

    def enqueue(self, job: NewJob) -> Enqueued:
        return self.send(operations.enqueue(job))

    def enqueue_many(self, jobs: Iterable[NewJob]) -> list[Enqueued]:
        enqueued: list[Enqueued] = []
        for operation in operations.enqueue_many(jobs):
            batch = self.send(operation)
            enqueued += batch
        return enqueued

    def get(self, id: JobId) -> _wire.Job:
        return self.send(operations.get(id))

    def wait(self, id: JobId, timeout: float | None = None) -> _wire.Job:
        waiting = _Waiting(timeout)
        while True:
            job, pause = self.send(operations.await_end(id, waiting.next()))
            if has_ended(job):
                return job
            if waiting.is_over():
                raise timed_out(id, timeout)
            time.sleep(waiting.limit(pause))

    def result(self, id: JobId, timeout: float | None = None) -> Json:
        return result_of(self.wait(id, timeout))

    def list_jobs(self, **filters: Unpack[JobFilter]) -> Page:
        return self.send(operations.list_jobs(filters))

    def jobs(self, **filters: Unpack[JobFilter]) -> Iterator[_wire.Job]:
        while True:
            page = self.send(operations.list_jobs(filters))
            yield from page.jobs
            if page.cursor is None:
                return
            filters["cursor"] = page.cursor
            filters.pop("offset", None)

    def cancel(self, id: JobId) -> _wire.CancelResponse:
        return self.send(operations.cancel(id))

    def retry(self, id: JobId, **edit: Any) -> _wire.Job:
        return self.send(operations.retry(id, edit))

    def delete(self, id: JobId) -> None:
        self.send(operations.delete(id))

    def explain(self, id: JobId) -> _wire.Explanation:
        return self.send(operations.explain(id))

    def steps(self, id: JobId) -> list[_wire.Step]:
        return self.send(operations.steps(id))

    def emit(self, name: str, payload: Json = None) -> _wire.Event:
        return self.send(operations.emit(name, payload))

    def start_flow(self, flow: Flow) -> _wire.Flow:
        return self.send(operations.start_flow(flow))

    def get_flow(self, id: JobId) -> _wire.Flow:
        return self.send(operations.get_flow(id))

    def flow_tasks(self, id: JobId, cursor: str | None = None) -> list[_wire.FlowTask]:
        return self.send(operations.flow_tasks(id, cursor))

    def add_to_flow(self, id: JobId, jobs: Iterable[NewJob]) -> _wire.Flow:
        return self.send(operations.add_to_flow(id, jobs))

    def seal_flow(self, id: JobId) -> _wire.Flow:
        return self.send(operations.seal_flow(id))

    def cancel_flow(self, id: JobId) -> _wire.CancelledFlow:
        return self.send(operations.cancel_flow(id))

    def retry_flow(self, id: JobId) -> _wire.RetriedFlow:
        return self.send(operations.retry_flow(id))

    def queues(self) -> list[_wire.Queue]:
        return self.send(operations.queues())

    def pause_queue(self, name: str) -> _wire.Queue:
        return self.send(operations.pause_queue(name))

    def resume_queue(self, name: str) -> _wire.Queue:
        return self.send(operations.resume_queue(name))

    def put_schedule(
        self, name: str, cron: str, job: NewJob, *, zone: str | None = None, missed: str | None = None
    ) -> _wire.Schedule:
        return self.send(operations.put_schedule(name, cron, job, zone, missed))

    def schedules(self) -> list[_wire.Schedule]:
        return self.send(operations.schedules())

    def delete_schedule(self, name: str) -> None:
        self.send(operations.delete_schedule(name))

    def workers(self) -> list[_wire.Worker]:
        return self.send(operations.workers())

    def health(self) -> _wire.Health:
        return self.send(operations.health())
