"""Background jobs: a typed client and a worker for Longshore servers.

    from longshore import Context, Longshore

    ls = Longshore()

    @ls.job(queue="mail", max_attempts=5, timeout=60)
    async def send_report(to: str, *, ctx: Context) -> dict[str, str]:
        return {"sent": to}

    await send_report.enqueue(to="ada@example.com")

`longshore-worker app:ls` runs the jobs.
"""

from . import _wire as wire
from ._app import Longshore
from ._attempt import Cancellation
from ._binary import find_binary
from ._client import Client, SyncClient
from ._context import INJECTED, Child, Children, Context, First, Input, SyncContext, Wait
from ._enqueue import EnqueueOptions, Flow, JobOptions, NewJob, chain, fan_out
from ._errors import (
    BadRequest,
    Cancel,
    Cancelled,
    Conflict,
    DecodeError,
    Fail,
    JobFailed,
    LeaseLost,
    LongshoreError,
    NotFound,
    RateLimited,
    Retry,
    ServerError,
    Snooze,
    Suspended,
    Unauthorized,
    Unavailable,
    ValidationError,
    WaitTimeout,
)
from ._ids import new_id
from ._job import ConfiguredJob, Handle, Job
from ._operations import Enqueued, Page
from ._version import VERSION as __version__
from ._worker import Worker, WorkerSettings

__all__ = [
    "INJECTED",
    "BadRequest",
    "Cancel",
    "Cancellation",
    "Cancelled",
    "Child",
    "Children",
    "Client",
    "ConfiguredJob",
    "Conflict",
    "Context",
    "DecodeError",
    "EnqueueOptions",
    "Enqueued",
    "Fail",
    "First",
    "Flow",
    "Handle",
    "Input",
    "Job",
    "JobFailed",
    "JobOptions",
    "LeaseLost",
    "Longshore",
    "LongshoreError",
    "NewJob",
    "NotFound",
    "Page",
    "RateLimited",
    "Retry",
    "ServerError",
    "Snooze",
    "Suspended",
    "SyncClient",
    "SyncContext",
    "Unauthorized",
    "Unavailable",
    "ValidationError",
    "Wait",
    "WaitTimeout",
    "Worker",
    "WorkerSettings",
    "__version__",
    "chain",
    "fan_out",
    "find_binary",
    "new_id",
    "wire",
]
