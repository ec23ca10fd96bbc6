"""Checks and corrections that the OpenAPI document cannot express."""

import os
import time
import uuid

import schemathesis

# The maximum of `wait_seconds`.
LONGEST_WAIT = 20


@schemathesis.check
def nothing_without_a_token(ctx, response, case):
    """Without a token, only the health check and the start page may succeed, and logging out."""
    has_token = "LONGSHORE_TOKEN" in os.environ
    is_logout = case.operation.path == "/session" and case.method.upper() == "DELETE"
    if not has_token and not is_logout and case.operation.path not in ("/health", "/"):
        assert response.status_code >= 400, f"{response.status_code} without a token"


@schemathesis.hook
def before_call(context, case, kwargs):
    """Makes valid requests obey rules that JSON Schema cannot express. Otherwise
    the server would refuse almost all jobs and all schedules, and what happens to
    accepted ones would not be tested."""
    # Also in requests that are invalid for another reason: the server may answer before it notices.
    for values in (case.query, case.body):
        if isinstance(values, dict):
            shorten_wait(values)
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    for values in (case.query, case.path_parameters):
        remove_nul(values or {})
    shorten(case.path_parameters or {})
    if not isinstance(case.body, dict):
        return
    if case.operation.path == "/jobs" and "id" in case.body:
        case.body["id"] = new_id()
    if case.operation.path == "/cron/{name}":
        case.body.update(cron="*/5 * * * *", zone=None, missed=None)
        case.body.pop("name", None)
        for field in ("id", "run_at", "delay_seconds", "idempotency_key"):
            case.body["job"].pop(field, None)
    for job in (case.body, case.body.get("job"), *follow_ups(case.body)):
        if isinstance(job, dict):
            resolve_contradictions(job)


def remove_nul(values):
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = value.replace("\0", "0")


def shorten_wait(values):
    """A test of a call that waits takes as long as the wait. Waits that the server refuses stay as they are, and so
    does the type: values of the query may be numbers or texts."""
    wait = values.get("wait_seconds")
    if isinstance(wait, bool) or not isinstance(wait, (int, float, str)):
        return
    try:
        seconds = float(wait)
    except ValueError:
        return
    if 0.01 < seconds <= LONGEST_WAIT:
        values["wait_seconds"] = "0.01" if isinstance(wait, str) else 0.01


def new_id():
    """A UUID v7: JSON Schema has no format for the version, and the time must be about now."""
    random = int.from_bytes(os.urandom(10), "big")
    millis = int(time.time() * 1000)
    number = millis << 80 | random & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62
    return str(uuid.UUID(int=number))


def shorten(names):
    """Names have at most 128 bytes; JSON Schema counts characters."""
    for name, value in names.items():
        if isinstance(value, str):
            names[name] = value.encode("utf-8", "ignore")[:128].decode("utf-8", "ignore")


def follow_ups(body):
    for item in [*(body.get("items") or ()), *(body.get("settle") or ())]:
        for job in item.get("follow_ups") or ():
            job.pop("id", None)
            yield job


def resolve_contradictions(job):
    if job.get("kind") == "summarize_text":
        job["payload"] = {"text": "Ships come. Ships go."}
    if job.get("run_at") is not None:
        job.pop("delay_seconds", None)
    if job.get("unique_key") is None:
        job.pop("unique_mode", None)
    retry = job.get("retry") or {}
    if retry.get("policy") == "jitter":
        retry["cap_ms"] = max(retry["base_ms"], retry["cap_ms"])
