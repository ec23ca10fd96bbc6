"""Errors of the client, and the exceptions with which a handler ends an attempt."""

from __future__ import annotations

from datetime import timedelta


class LongshoreError(Exception):
    """The base of all errors of this package.

    `slug` is the machine-readable reason (`not_found`, `validation`, …), and `status` is the HTTP
    status, if the server replied.
    """

    slug = "error"

    def __init__(self, message: str, *, slug: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        if slug is not None:
            self.slug = slug


class BadRequest(LongshoreError):
    """The request is malformed, too large, or not allowed for this path."""

    slug = "bad_request"


class ValidationError(LongshoreError):
    """A field is invalid; the message names it."""

    slug = "validation"


class Unauthorized(LongshoreError):
    """The server needs a token, or a token with another scope or queue."""

    slug = "unauthorized"


class NotFound(LongshoreError):
    """The object does not exist, or is no longer kept."""

    slug = "not_found"


class Conflict(LongshoreError):
    """The state of the object does not allow the operation; `job_status` is the job's status."""

    slug = "conflict"
    job_status: str | None = None


class RateLimited(LongshoreError):
    """The server refused the request because of a limit, until the deadline for retries."""

    slug = "rate_limited"


class Unavailable(LongshoreError):
    """The server or its database could not be reached until the deadline for retries."""

    slug = "unavailable"


class ServerError(LongshoreError):
    """The server replied with an unexpected error."""

    slug = "internal"


class JobFailed(LongshoreError):
    """The job whose result was requested has failed permanently or was cancelled."""

    slug = "job_failed"

    def __init__(self, message: str, *, job_id: str = "", job_status: str = "") -> None:
        # The defaults let it be pickled, which calls the class with the message only.
        super().__init__(message)
        self.job_id = job_id
        self.job_status = job_status


class WaitTimeout(LongshoreError, TimeoutError):
    """The job did not end in time. It continues."""

    slug = "wait_timeout"


class DecodeError(LongshoreError):
    """A JSON value does not fit its type. `path` names the field."""

    slug = "decode"

    def __init__(self, problem: str, path: tuple[str, ...] = ()) -> None:
        self.problem = problem
        self.path = path
        super().__init__(self._text())

    def inside(self, segment: str) -> DecodeError:
        """The same error, seen from the value that contains this one."""
        return DecodeError(self.problem, (segment, *self.path))

    def _text(self) -> str:
        if not self.path:
            return self.problem
        name = self.path[0] + "".join(part if part.startswith("[") else f".{part}" for part in self.path[1:])
        return f"{name}: {self.problem}"


class PayloadMismatch(DecodeError):
    """A payload does not fit the parameters of its handler, so that no retry helps."""

    def inside(self, segment: str) -> PayloadMismatch:
        return PayloadMismatch(self.problem, (segment, *self.path))


class LeaseLost(LongshoreError):
    """Another worker owns the job now. Nothing that this attempt does is stored any more."""

    slug = "lease_lost"


class Cancelled(LongshoreError):
    """Raised by `ctx.raise_if_cancelled()`. `reason` says why the attempt has to stop."""

    slug = "cancelled"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the attempt was stopped: {reason}")
        self.reason = reason


class Retry(Exception):
    """Raise this in a handler to fail the attempt and choose when the next one starts.

    Without `after`, the retry policy of the job decides.
    """

    def __init__(self, message: str = "the handler requested a retry", *, after: float | timedelta | None = None):
        super().__init__(message)
        self.after = after.total_seconds() if isinstance(after, timedelta) else after


class Fail(Exception):
    """Raise this in a handler to fail the job permanently."""


class Cancel(Exception):
    """Raise this in a handler to end the job as cancelled."""


class Snooze(Exception):
    """Raise this in a handler to run the job later. The attempt is not charged."""

    def __init__(self, seconds: float | timedelta) -> None:
        self.seconds = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
        super().__init__(self.seconds)

    def __str__(self) -> str:
        return f"snoozed for {self.seconds:g} s"


class Suspended(BaseException):
    """Ends the attempt of a job that waits without a worker.

    Not an `Exception`, so that `except Exception` in a handler does not swallow it. Do not catch it.
    """


_BY_SLUG: dict[str, type[LongshoreError]] = {
    "bad_request": BadRequest,
    "too_large": BadRequest,
    "method_not_allowed": BadRequest,
    "unsupported_media_type": BadRequest,
    "misdirected": BadRequest,
    "validation": ValidationError,
    "unauthorized": Unauthorized,
    "forbidden": Unauthorized,
    "not_found": NotFound,
    "conflict": Conflict,
    "rate_limited": RateLimited,
    "timeout": Unavailable,
    "unavailable": Unavailable,
}


def error_from_reply(status: int, problem: object, raw: bytes) -> LongshoreError:
    """The error for a reply whose status is not a success."""
    if isinstance(problem, dict) and isinstance(problem.get("error"), str):
        slug = problem["error"]
        error = _BY_SLUG.get(slug, ServerError)(str(problem.get("message", "")), slug=slug, status=status)
        if isinstance(error, Conflict):
            error.job_status = problem.get("job_status")
        return error
    text = raw[:300].decode("utf-8", "replace")
    message = f"the server replied with status {status} and no problem description: {text}"
    return (Unavailable if status >= 500 else ServerError)(message, status=status)
