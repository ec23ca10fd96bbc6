"""`Longshore`: the client, the registry of jobs, and the entry to workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import _operations as operations
from ._client import Client, SyncClient
from ._enqueue import JobOptions, NewJob, Seconds
from ._http import AsyncPool, Pool, Reply, Request, Server
from ._job import Job, JobDecorator
from ._operations import Enqueued, Operation

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from . import _wire
    from ._worker import Worker, WorkerSettings

T = TypeVar("T")
Hook = TypeVar("Hook", bound=Callable[[], Any])


class Interception:
    """Replaces the server in tests. See `longshore.testing`."""

    def send(self, request: Request) -> Reply:
        raise NotImplementedError

    async def send_async(self, request: Request) -> Reply:
        raise NotImplementedError

    def enqueue_in(self, connection: Any, job: NewJob) -> Any:
        raise NotImplementedError


class Longshore(Client):
    """A client of a Longshore server, and the jobs of an application.

    `server` and `token` default to LONGSHORE_SERVER and LONGSHORE_TOKEN (or the file LONGSHORE_TOKEN_FILE). The
    methods are coroutines; `sync` has the same methods for code without an event loop.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        retry_for: float = 30.0,
        schema: str = "longshore",
    ) -> None:
        #: How long a request is repeated if the server cannot be reached or is overloaded.
        self.retry_for = retry_for
        #: The Postgres schema of the queue, for `enqueue_in`.
        self.schema = schema
        self.sync = SyncClient(self)
        self.registry: dict[str, Job[Any, Any]] = {}
        #: The schedules that workers store: name → the kind of the job, and the request.
        self.declared_schedules: dict[str, tuple[str, Operation[_wire.Schedule]]] = {}
        self.startup_hooks: list[Callable[[], Any]] = []
        self.shutdown_hooks: list[Callable[[], Any]] = []
        self.interception: Interception | None = None
        self.configure(server, token)

    def configure(self, server: str | None = None, token: str | None = None) -> None:
        """Changes the server. For applications that know it only after their modules are imported."""
        url = server or os.environ.get("LONGSHORE_SERVER") or "http://127.0.0.1:8080"
        self._server = Server(url, token or _token())
        self._pool = Pool(self._server)
        self._async_pool = AsyncPool(self._server)

    @property
    def server(self) -> str:
        return self._server.url

    def job(
        self,
        name: str | None = None,
        *,
        process: bool = False,
        bare: bool = False,
        queue: str = "default",
        priority: int | None = None,
        max_attempts: int | None = None,
        timeout: Seconds | None = 7200.0,
        retry: _wire.Retry | None = None,
    ) -> JobDecorator:
        """Registers a handler. Async functions run on the worker's event loop, others on threads, or with
        `process=True` in a process of their own. The name of the kind is the name of the function.

        The payload is an object of the parameters. With `bare=True` it is the value of the only parameter, for kinds
        whose jobs other programs enqueue."""
        if callable(name):
            raise TypeError("write `@ls.job()` with parentheses")
        defaults: JobOptions = {"queue": queue, "timeout": timeout}
        if priority is not None:
            defaults["priority"] = priority
        if max_attempts is not None:
            defaults["max_attempts"] = max_attempts
        if retry is not None:
            defaults["retry"] = retry
        return JobDecorator(self, name, defaults, process=process, bare=bare)

    def register(self, job: Job[Any, Any]) -> None:
        if job.name in self.registry:
            raise ValueError(f"the kind `{job.name}` is registered twice; give one of the functions another name")
        self.registry[job.name] = job

    def cron(self, name: str, cron: str, job: NewJob, *, zone: str | None = None, missed: str | None = None) -> None:
        """Declares a schedule. A worker that runs the job's kind stores it when it starts, as `put_schedule` does.

        With tokens, this needs the scope `operate` for all queues. A worker that may not store a schedule logs an
        error and works. A schedule that you remove from the code stays in the server; use `delete_schedule`."""
        if name in self.declared_schedules:
            raise ValueError(f"the schedule `{name}` is declared twice; give one of them another name")
        self.declared_schedules[name] = job.kind, operations.put_schedule(name, cron, job, zone, missed)

    def on_startup(self, hook: Hook) -> Hook:
        """A function that a worker calls before its first job, on its event loop if it is async."""
        self.startup_hooks.append(hook)
        return hook

    def on_shutdown(self, hook: Hook) -> Hook:
        """A function that a worker calls after its last job."""
        self.shutdown_hooks.append(hook)
        return hook

    def worker(self, **settings: Unpack[WorkerSettings]) -> Worker:
        """A worker for the jobs of this application. `with ls.worker(): …` runs it in the background."""
        from ._worker import Worker

        return Worker(self, **settings)

    def work(self, **settings: Unpack[WorkerSettings]) -> None:
        """Runs a worker until SIGTERM or SIGINT."""
        self.worker(**settings).run()

    async def send(self, operation: Operation[T]) -> T:
        if self.interception is not None:
            return operation.result(await self.interception.send_async(operation.request))
        return operation.result(await self._async_pool.send(operation.request, self.retry_for))

    def send_sync(self, operation: Operation[T]) -> T:
        if self.interception is not None:
            return operation.result(self.interception.send(operation.request))
        return operation.result(self._pool.send(operation.request, self.retry_for))

    def enqueue_in_transaction(
        self, enqueue_in: Callable[[Any, NewJob, str], Any], connection: Any, job: NewJob
    ) -> Any:
        if self.interception is not None:
            return self.interception.enqueue_in(connection, job)
        return enqueue_in(connection, job, self.schema)

    async def enqueue_new_in(self, connection: Any, job: NewJob) -> Enqueued:
        """Enqueues a job by the name of its kind in a transaction. `job.enqueue_in(…)` is the typed way."""
        from ._transaction import enqueue_in

        enqueued = self.enqueue_in_transaction(enqueue_in, connection, job)
        done: Enqueued = enqueued if isinstance(enqueued, Enqueued) else await enqueued
        return done

    async def aclose(self) -> None:
        """Closes the idle connections of this event loop and of threads."""
        await self._async_pool.close()
        self._pool.close()

    def close(self) -> None:
        """Closes the idle connections of threads."""
        self._pool.close()


def _token() -> str | None:
    token = os.environ.get("LONGSHORE_TOKEN")
    file = os.environ.get("LONGSHORE_TOKEN_FILE")
    if token or not file:
        return token
    return Path(file).read_text().strip()
