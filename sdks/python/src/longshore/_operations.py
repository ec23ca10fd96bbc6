"""Every operation of the API that the client offers, as a request and how to read its reply.

Nothing here sends a request: `_client.py` does that, for threads and for event loops.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote, urlencode

from . import _trace, _wire
from ._codec import Json
from ._enqueue import Flow, JobId, NewJob, to_json
from ._errors import LongshoreError, ValidationError, error_from_reply
from ._http import Reply, Request
from ._ids import new_id

T = TypeVar("T")
#: The longest time that the server lets a request wait for a job.
MAX_WAIT = 20.0
MAX_BATCH = 10_000
MAX_BATCH_BYTES = 8 << 20
#: The largest request.
MAX_BODY_BYTES = 16 << 20
#: The largest request that enqueues one job: a payload of 1 MiB, and its options.
MAX_JOB_BYTES = (1 << 20) + (256 << 10)


@dataclass
class Operation(Generic[T]):
    request: Request
    read: Callable[[Any, Reply], T]

    def result(self, reply: Reply) -> T:
        """The result, or the error that the server replied with."""
        try:
            value = json.loads(reply.body) if reply.body else None
        except ValueError:
            value = None
        if reply.status >= 400:
            raise error_from_reply(reply.status, value, reply.body)
        if value is None and reply.status != 204:
            raise LongshoreError(f"the reply with status {reply.status} is not JSON", status=reply.status)
        return self.read(value, reply)


@dataclass(frozen=True)
class Enqueued:
    """The job of an enqueue, and whether it was `created`, `existing` or `replaced`."""

    id: str
    how: str


def _value(value: Any, _: Reply) -> Any:
    return value


def _nothing(_: Any, __: Reply) -> None:
    return None


def _path(*parts: JobId | str) -> str:
    return "".join("/" + quote(str(part), safe="") for part in parts)


def _query(path: str, parameters: Mapping[str, Any]) -> str:
    pairs = {}
    for name, value in parameters.items():
        if value is None:
            continue
        if isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, (list, tuple, set)):
            value = ",".join(map(str, value))
        elif hasattr(value, "isoformat"):
            value = value.isoformat()
        pairs[name] = value
    return f"{path}?{urlencode(pairs)}" if pairs else path


def _get(path: str, parameters: Mapping[str, Any] | None = None, wait: float = 0.0) -> Request:
    return Request("GET", _query(path, parameters or {}), wait=wait)


def _post(path: str, body: Any = None, *, repeatable: bool = True, headers: dict[str, str] | None = None) -> Request:
    content = None if body is None else to_json(body)
    if content is not None and len(content) > MAX_BODY_BYTES:
        # The server closes the connection instead of reading it.
        raise ValidationError(
            f"{path}: {len(content)} bytes of JSON exceed the limit of {MAX_BODY_BYTES}; send it in parts",
            slug="too_large",
        )
    return Request("POST", path, content, headers or {}, repeatable=repeatable)


def enqueue(job: NewJob) -> Operation[Enqueued]:
    def read(value: Any, reply: Reply) -> Enqueued:
        return Enqueued(value["id"], reply.headers.get("enqueued-as", "created"))

    body = _job_body(job, f"job `{job.kind}`")
    return Operation(Request("POST", "/jobs", body, _trace.outgoing_headers()), read)


def _job_body(job: NewJob, which: str) -> bytes:
    """The JSON of a job. Refuses what the server would refuse, because it does not read a body that is too large."""
    try:
        body = to_json(job.to_wire())
    except (TypeError, ValueError) as error:
        raise ValidationError(f"{which}: its payload and options are not JSON: {error}") from None
    if len(body) > MAX_JOB_BYTES:
        raise ValidationError(
            f"{which}: {len(body)} bytes of JSON exceed the limit of {MAX_JOB_BYTES}; store the data elsewhere and "
            "enqueue a reference",
            slug="too_large",
        )
    return body


def enqueue_many(jobs: Iterable[NewJob]) -> list[Operation[list[Enqueued]]]:
    """One operation per batch. The ids are chosen here, so a batch can be repeated."""
    operations: list[Operation[list[Enqueued]]] = []
    part: list[bytes] = []
    size = start = 0

    def finish() -> None:
        nonlocal size, start
        if part:
            request = Request("POST", "/jobs/batch", b"[" + b",".join(part) + b"]")
            operations.append(Operation(request, functools.partial(_read_batch, start)))
            start += len(part)
            size = 0
            part.clear()

    for index, job in enumerate(jobs):
        body = _job_body(job, f"jobs[{index}]")
        if len(part) == MAX_BATCH or size + len(body) > MAX_BATCH_BYTES:
            finish()
        part.append(body)
        size += len(body)
    finish()
    return operations


def _read_batch(start: int, value: Any, _: Reply) -> list[Enqueued]:
    for index, item in enumerate(value["items"], start):
        if item["outcome"] == "refused":
            message = f"jobs[{index}]: {item.get('message')}; the valid jobs are enqueued"
            raise ValidationError(message, slug=item.get("error"))
    return [Enqueued(item["id"], item["outcome"]) for item in value["items"]]


def get(id: JobId) -> Operation[_wire.Job]:
    return Operation(_get(_path("jobs", id)), _value)


def await_end(id: JobId, wait: float) -> Operation[tuple[_wire.Job, float]]:
    """The job when it has ended, or after `wait` seconds; and the pause that the server asks for if too many calls
    wait."""
    parameters = {"wait_seconds": min(wait, MAX_WAIT)} if wait > 0 else {}
    return Operation(_get(_path("jobs", id), parameters, wait), lambda job, reply: (job, reply.retry_after()))


@dataclass(frozen=True)
class Page:
    """One page of a list of jobs. `cursor` continues the list; None means that this page is the last one."""

    jobs: list[_wire.Job]
    cursor: str | None


def list_jobs(filters: Mapping[str, Any]) -> Operation[Page]:
    def read(value: Any, reply: Reply) -> Page:
        link = reply.headers.get("link", "")
        cursor = None
        if 'rel="next"' in link and "cursor=" in link:
            cursor = link.split("cursor=", 1)[1].split(">", 1)[0].split("&", 1)[0]
        return Page(value, cursor)

    return Operation(_get("/jobs", filters), read)


def cancel(id: JobId) -> Operation[_wire.CancelResponse]:
    # After a lost reply, the repeated cancel finds a job that has ended and is refused. The job is cancelled all
    # the same, but the caller sees a conflict; so the request is not repeated.
    return Operation(_post(_path("jobs", id, "cancel"), repeatable=False), _value)


def retry(id: JobId, edit: Mapping[str, Any] | None = None) -> Operation[_wire.Job]:
    return Operation(_post(_path("jobs", id, "retry"), dict(edit) if edit else None, repeatable=False), _value)


def delete(id: JobId) -> Operation[None]:
    return Operation(Request("DELETE", _path("jobs", id), repeatable=False), _nothing)


def explain(id: JobId) -> Operation[_wire.Explanation]:
    return Operation(_get(_path("jobs", id, "explain")), _value)


def steps(id: JobId) -> Operation[list[_wire.Step]]:
    return Operation(_get(_path("jobs", id, "steps")), _value)


def emit(name: str, payload: Json) -> Operation[_wire.Event]:
    return Operation(_post("/events", {"name": name, "payload": payload}), _value)


def start_flow(flow: Flow) -> Operation[_wire.Flow]:
    return Operation(_post("/flows", flow.to_wire(), headers=_trace.outgoing_headers()), _value)


def get_flow(id: JobId) -> Operation[_wire.Flow]:
    return Operation(_get(_path("flows", id)), _value)


def flow_tasks(id: JobId, cursor: str | None = None) -> Operation[list[_wire.FlowTask]]:
    return Operation(_get(_path("flows", id, "tasks"), {"cursor": cursor}), _value)


def add_to_flow(id: JobId, jobs: Iterable[NewJob]) -> Operation[_wire.Flow]:
    body = {"jobs": [job.to_wire(with_id=False) for job in jobs]}
    headers = {"idempotency-key": new_id(), **_trace.outgoing_headers()}
    return Operation(_post(_path("flows", id, "jobs"), body, headers=headers), _value)


def seal_flow(id: JobId) -> Operation[_wire.Flow]:
    return Operation(_post(_path("flows", id, "seal")), _value)


def cancel_flow(id: JobId) -> Operation[_wire.CancelledFlow]:
    return Operation(_post(_path("flows", id, "cancel"), repeatable=False), _value)


def retry_flow(id: JobId) -> Operation[_wire.RetriedFlow]:
    return Operation(_post(_path("flows", id, "retry"), repeatable=False), _value)


def queues() -> Operation[list[_wire.Queue]]:
    return Operation(_get("/queues"), _value)


def pause_queue(name: str) -> Operation[_wire.Queue]:
    return Operation(_post(_path("queues", name, "pause")), _value)


def resume_queue(name: str) -> Operation[_wire.Queue]:
    return Operation(_post(_path("queues", name, "resume")), _value)


def put_schedule(
    name: str, cron: str, job: NewJob, zone: str | None, missed: str | None
) -> Operation[_wire.Schedule]:
    body: dict[str, Any] = {"cron": cron, "job": job.to_wire(with_id=False)}
    if zone is not None:
        body["zone"] = zone
    if missed is not None:
        body["missed"] = missed
    return Operation(Request("PUT", _path("cron", name), to_json(body)), _value)


def schedules() -> Operation[list[_wire.Schedule]]:
    return Operation(_get("/cron"), _value)


def delete_schedule(name: str) -> Operation[None]:
    return Operation(Request("DELETE", _path("cron", name), repeatable=False), _nothing)


def workers() -> Operation[list[_wire.Worker]]:
    return Operation(_get("/workers"), _value)


def health() -> Operation[_wire.Health]:
    return Operation(_get("/health"), lambda value, _: cast(_wire.Health, value))
