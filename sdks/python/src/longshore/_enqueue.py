"""A job that is to be enqueued, its options, and graphs of such jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, TypedDict
from uuid import UUID

from . import _wire
from ._codec import Json
from ._errors import ValidationError
from ._ids import new_id

Seconds = float | timedelta
JobId = str | UUID


class JobOptions(TypedDict, total=False):
    """What a kind sets for all of its jobs, and an enqueue can change."""

    queue: str
    priority: int
    max_attempts: int
    #: How long an attempt may take; None means no limit.
    timeout: Seconds | None
    retry: _wire.Retry


class EnqueueOptions(JobOptions, total=False):
    """Options of one enqueue."""

    #: A UUID v7. By default, every enqueue chooses its own, so that a repeated request creates one job.
    id: JobId
    delay: Seconds
    run_at: datetime
    idempotency_key: str
    unique_key: str
    unique_mode: _wire.UniqueMode
    tags: Iterable[str]
    flags: Iterable[str]
    group: str
    #: Why the job was enqueued.
    context: str
    metadata: Json


_OPTION_NAMES = EnqueueOptions.__annotations__.keys() | JobOptions.__annotations__.keys()


def seconds(value: Seconds) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def check_options(options: Mapping[str, Any]) -> None:
    unknown = options.keys() - _OPTION_NAMES
    if unknown:
        raise TypeError(f"{', '.join(sorted(unknown))}: no such option; use {', '.join(sorted(_OPTION_NAMES))}")
    check_strings("tags", options.get("tags"))
    check_strings("flags", options.get("flags"))


def check_strings(field: str, values: Iterable[str] | None) -> None:
    """Refuses a string where a list of strings is expected. Type checkers accept it, as an iterable of characters."""
    if isinstance(values, str):
        raise TypeError(f"{field}: this is one string; pass a list: [{values!r}]")


#: Made once: `json.dumps` with options makes an encoder for every call.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def to_json(value: Json) -> bytes:
    """Compact JSON. Refuses NaN and infinity, which JSON does not have."""
    return _ENCODER.encode(value).encode()


@dataclass(frozen=True)
class NewJob:
    """A job to enqueue: what `job.new(…)` returns. Use it in batches, flows, follow-ups and schedules."""

    kind: str
    payload: Json
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> NewJob:
        check_options(options)
        return NewJob(self.kind, self.payload, {**self.options, **options})

    def to_wire(self, *, with_id: bool = True) -> dict[str, Any]:
        """The request for the HTTP API."""
        body: dict[str, Any] = {"kind": self.kind, "payload": self.payload}
        for name, value in self.options.items():
            if name == "id":
                continue
            if name == "timeout":
                body["timeout_seconds"] = "none" if value is None else seconds(value)
            elif value is None:
                continue
            elif name == "delay":
                body["delay_seconds"] = seconds(value)
            elif name == "run_at":
                body["run_at"] = to_utc(value).isoformat().replace("+00:00", "Z")
            elif name in ("tags", "flags"):
                body[name] = list(value)
            else:
                body[name] = value
        if with_id:
            body["id"] = str(self.options.get("id") or new_id())
        return body

    def to_follow_up(self) -> dict[str, Any]:
        return self.to_wire(with_id=False)


def to_utc(value: datetime) -> datetime:
    """A time without a zone is local time, as everywhere in Python."""
    return value.astimezone(timezone.utc)


@dataclass
class Flow:
    """A graph of jobs, enqueued in one commit.

    flow = (
        Flow("import")
        .task("fetch", fetch.new(url="…"))
        .task("parse", parse.new(), after=["fetch"])
        .on_failure(alert.new(text="the import failed"))
    )
    await ls.start_flow(flow)
    """

    name: str
    idempotency_key: str | None = None
    deadline: Seconds | None = None
    #: Whether the flow is complete. One that is not sealed accepts more jobs (`add_to_flow`).
    sealed: bool = True
    id: str = field(default_factory=new_id)
    _tasks: list[dict[str, Any]] = field(default_factory=list)
    _callbacks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def task(
        self,
        name: str | None,
        job: NewJob,
        *,
        after: Iterable[str] = (),
        after_end: Iterable[str] = (),
        after_failure: Iterable[str] = (),
    ) -> Flow:
        """Adds a task. It starts when the tasks in `after` have succeeded, those in `after_end` have ended, and
        those in `after_failure` have failed."""
        for link, names in (("after", after), ("after_end", after_end), ("after_failure", after_failure)):
            check_strings(link, names)
        body = _member(job)
        if name is not None:
            body["task"] = name
        links: list[Any] = list(after)
        links += [{"task": other, "condition": "ended"} for other in after_end]
        links += [{"task": other, "condition": "failed"} for other in after_failure]
        if links:
            body["after"] = links
        self._tasks.append(body)
        return self

    def on_success(self, job: NewJob) -> Flow:
        return self._callback("on_success", job)

    def on_failure(self, job: NewJob) -> Flow:
        return self._callback("on_failure", job)

    def on_end(self, job: NewJob) -> Flow:
        return self._callback("on_end", job)

    def _callback(self, when: str, job: NewJob) -> Flow:
        self._callbacks.setdefault(when, []).append(_member(job))
        return self

    def to_wire(self) -> dict[str, Any]:
        body: dict[str, Any] = {"id": self.id, "name": self.name, "tasks": self._tasks, "sealed": self.sealed}
        body.update(self._callbacks)
        if self.idempotency_key is not None:
            body["idempotency_key"] = self.idempotency_key
        if self.deadline is not None:
            body["deadline_seconds"] = seconds(self.deadline)
        return body


def chain(*jobs: NewJob, name: str = "chain") -> Flow:
    """A flow whose jobs run one after the other."""
    flow = Flow(name)
    for number, job in enumerate(jobs, 1):
        flow.task(str(number), job, after=[str(number - 1)] if number > 1 else [])
    return flow


def fan_out(jobs: Iterable[NewJob], *, then: NewJob | None = None, name: str = "fan-out") -> Flow:
    """A flow whose jobs run in parallel, and one more that starts when all have succeeded."""
    flow = Flow(name)
    names = []
    for number, job in enumerate(jobs, 1):
        names.append(str(number))
        flow.task(str(number), job)
    if then is not None:
        flow.task("then", then, after=names)
    return flow


def _member(job: NewJob) -> dict[str, Any]:
    for key in ("idempotency_key", "unique_key"):
        if job.options.get(key):
            raise ValidationError(f"{key}: tasks of a flow cannot have keys; give the flow an idempotency key")
    return job.to_wire(with_id=False)
