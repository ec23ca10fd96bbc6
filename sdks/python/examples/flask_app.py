"""Flask: enqueue in a request, with a worker in another process.

export LONGSHORE_SERVER=http://127.0.0.1:8080
longshore-worker flask_app:ls &                # in the folder examples
flask --app flask_app run
"""

from __future__ import annotations

from flask import Flask, request
from flask.typing import ResponseReturnValue

from longshore import Longshore, NotFound, SyncContext

ls = Longshore()
app = Flask(__name__)


@ls.job(queue="reports", timeout=300)
def build_report(month: str, *, ctx: SyncContext) -> dict[str, int]:
    rows = 0
    for part in range(10):
        ctx.raise_if_cancelled()
        rows += part
        ctx.progress({"done": part + 1, "of": 10})
    return {"rows": rows}


@app.post("/reports")
def request_report() -> ResponseReturnValue:
    month = request.get_json()["month"]
    handle = build_report.options(unique_key=f"report-{month}").enqueue_sync(month=month)
    return {"job": handle.id, "how": handle.how}, 202


@app.get("/reports/<id>")
def report(id: str) -> ResponseReturnValue:
    try:
        job = ls.sync.get(id)
    except NotFound:
        return {"error": "no such job"}, 404
    return {"status": job["status"], "progress": job["progress"], "result": job["result"]}
