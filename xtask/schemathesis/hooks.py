"""What schemathesis cannot read from the document."""

import os

import schemathesis


@schemathesis.check
def nothing_without_a_token(ctx, response, case):
    """Everybody is told whether the server is well, and nothing else."""
    has_token = "LONGSHORE_TOKEN" in os.environ
    if not has_token and case.operation.path != "/health":
        assert response.status_code >= 400, f"{response.status_code} without a token"


@schemathesis.hook
def before_call(context, case, kwargs):
    """Keeps rules that JSON Schema has no words for, or hardly a job and no
    schedule would be taken, and what happens to them would go untested."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    for values in (case.query, case.path_parameters):
        remove_nul(values or {})
    if not isinstance(case.body, dict):
        return
    if case.operation.path == "/cron/{name}":
        case.body.update(cron="*/5 * * * *", zone=None, missed=None)
        for field in ("run_at", "delay_seconds", "idempotency_key"):
            case.body["job"].pop(field, None)
    for job in (case.body, case.body.get("job"), *follow_ups(case.body)):
        if isinstance(job, dict):
            settle_contradictions(job)


def remove_nul(values):
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = value.replace("\0", "0")


def follow_ups(body):
    for item in body.get("items") or ():
        yield from item.get("follow_ups") or ()


def settle_contradictions(job):
    if job.get("kind") == "summarize_text":
        job["payload"] = {"text": "Ships come. Ships go."}
    if job.get("run_at") is not None:
        job.pop("delay_seconds", None)
    if job.get("unique_key") is None:
        job.pop("unique_mode", None)
    retry = job.get("retry") or {}
    if retry.get("policy") == "jitter":
        retry["cap_ms"] = max(retry["base_ms"], retry["cap_ms"])
