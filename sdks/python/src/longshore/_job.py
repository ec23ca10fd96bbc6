"""Kinds of jobs: a handler, its options, and typed ways to enqueue it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, overload

from . import _operations as operations
from ._client import result_of
from ._context import Context, SyncContext
from ._enqueue import EnqueueOptions, JobOptions, NewJob, check_options, seconds
from ._signature import Signature
from ._transaction import AsyncConnection, enqueue_in

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from . import _wire
    from ._app import Longshore

P = ParamSpec("P")
R = TypeVar("R")


class Handle(Generic[R]):
    """An enqueued job. `how` says whether it was `created`, `existing` or `replaced`."""

    def __init__(self, app: Longshore, job: Job[Any, R], id: str, how: str) -> None:
        self._app = app
        self._job = job
        self.id = id
        self.how = how

    async def result(self, timeout: float | None = None) -> R:
        """Waits until the job has ended. Raises `JobFailed` if it failed, `WaitTimeout` after `timeout` seconds."""
        return self._decode(await self._app.wait(self.id, timeout))

    def result_sync(self, timeout: float | None = None) -> R:
        return self._decode(self._app.sync.wait(self.id, timeout))

    def _decode(self, job: _wire.Job) -> R:
        return cast(R, self._job.signature.result.decode(result_of(job)))

    async def get(self) -> _wire.Job:
        return await self._app.get(self.id)

    def get_sync(self) -> _wire.Job:
        return self._app.sync.get(self.id)

    async def cancel(self) -> _wire.CancelResponse:
        return await self._app.cancel(self.id)

    def cancel_sync(self) -> _wire.CancelResponse:
        return self._app.sync.cancel(self.id)

    def __repr__(self) -> str:
        return f"<Handle {self._job.name} {self.id} ({self.how})>"


class _Enqueues(Generic[P, R]):
    """How a job is enqueued, with the options that were set so far."""

    _app: Longshore
    _definition: Job[P, R]
    _options: dict[str, Any]

    def new(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """The job for a batch, a flow, a schedule, a follow-up or a child. Nothing is enqueued."""
        definition = self._definition
        return NewJob(definition.name, definition.signature.encode(args, kwargs), self._options)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueues the job. When this returns, it is committed."""
        enqueued = await self._app.send(operations.enqueue(self.new(*args, **kwargs)))
        return Handle(self._app, self._definition, enqueued.id, enqueued.how)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Like `enqueue`, for code without an event loop."""
        enqueued = self._app.send_sync(operations.enqueue(self.new(*args, **kwargs)))
        return Handle(self._app, self._definition, enqueued.id, enqueued.how)

    @overload
    def enqueue_in(
        self, connection: AsyncConnection, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, Handle[R]]: ...
    @overload
    def enqueue_in(self, connection: Any, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...
    def enqueue_in(self, connection: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Enqueues the job in the transaction of a Postgres connection: psycopg, asyncpg, SQLAlchemy or Django.

        The job exists if and only if the transaction is committed. Await the call if the connection is async.
        """
        enqueued = self._app.enqueue_in_transaction(enqueue_in, connection, self.new(*args, **kwargs))
        if inspect.isawaitable(enqueued):

            async def handle() -> Handle[R]:
                done = await enqueued
                return Handle(self._app, self._definition, done.id, done.how)

            return handle()
        return Handle(self._app, self._definition, enqueued.id, enqueued.how)


class ConfiguredJob(_Enqueues[P, R]):
    """A job with options for the next enqueue."""

    def __init__(self, definition: Job[P, R], options: dict[str, Any]) -> None:
        self._app, self._definition, self._options = definition._app, definition, options

    def options(self, **options: Unpack[EnqueueOptions]) -> ConfiguredJob[P, R]:
        check_options(options)
        return ConfiguredJob(self._definition, {**self._options, **options})


class Job(_Enqueues[P, R]):
    """A kind of job: what `@ls.job` returns. Calling it calls the function."""

    def __init__(
        self,
        app: Longshore,
        function: Callable[..., Any],
        name: str,
        defaults: JobOptions,
        *,
        process: bool,
        bare: bool,
    ) -> None:
        self._app, self._definition, self._options = app, self, dict(defaults)
        self.function = function
        self.name = name
        self.defaults = defaults
        self.process = process
        self.is_async = inspect.iscoroutinefunction(function)
        self.signature = Signature(function, (Context, SyncContext), is_bare=bare)
        self.__name__ = getattr(function, "__name__", name)
        self.__qualname__ = getattr(function, "__qualname__", name)
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__wrapped__ = function
        self._check()

    def _check(self) -> None:
        wanted = Context if self.is_async else SyncContext
        given = self.signature.context_type
        if given is not None and given is not wanted:
            how = "async" if self.is_async else "not async"
            raise TypeError(
                f"{self.__qualname__}: the function is {how}, so annotate "
                f"`{self.signature.context_parameter}` with {wanted.__name__} instead of {given.__name__}"
            )
        if self.process and self.is_async:
            raise TypeError(f"{self.__qualname__}: process=True needs a function that is not async")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def options(self, **options: Unpack[EnqueueOptions]) -> ConfiguredJob[P, R]:
        """Options for one enqueue: `await job.options(delay=60).enqueue(…)`."""
        check_options(options)
        return ConfiguredJob(self, {**self._options, **options})

    def announcement(self) -> dict[str, Any]:
        """What a worker publishes about this kind."""
        defaults: dict[str, Any] = {}
        for name, value in self.defaults.items():
            if name == "timeout":
                defaults["timeout_seconds"] = "none" if value is None else seconds(cast(float, value))
            elif value is not None:
                defaults[name] = value
        return {"name": self.name, "schema": self.signature.schema, "defaults": defaults or None}

    def __repr__(self) -> str:
        return f"<Job {self.name}>"


class JobDecorator:
    """The decorator that `ls.job(…)` returns. A class, so that the mypy plugin can recognise it."""

    def __init__(self, app: Longshore, name: str | None, defaults: JobOptions, *, process: bool, bare: bool) -> None:
        self._app, self._name, self._defaults = app, name, defaults
        self._process, self._bare = process, bare

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Job[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> Job[P, R]: ...
    def __call__(self, function: Callable[..., Any]) -> Any:
        name = self._name or getattr(function, "__name__", None)
        if not name:
            raise TypeError("the function has no name; pass one: @ls.job(name=…)")
        job: Job[Any, Any] = Job(self._app, function, name, self._defaults, process=self._process, bare=self._bare)
        self._app.register(job)
        return job
