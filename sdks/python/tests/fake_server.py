"""A server whose replies to a worker the test decides: for refusals that a real server makes only in trouble."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from longshore import new_id

#: A status and a body, or None for the reply of a server without trouble.
Answer = tuple[int, dict[str, Any]] | None
UNAVAILABLE = (503, {"error": "unavailable", "message": "the database does not answer"})
DEAD = (409, {"error": "conflict", "message": "the worker was declared dead"})
INVALID = (422, {"error": "validation", "message": "the call is invalid"})


class FakeServer:
    """Grants `jobs` to the first call with free slots. `answer(path, body)` replaces replies."""

    def __init__(self, jobs: list[dict[str, Any]] | None = None) -> None:
        self.jobs = list(jobs or [])
        self.answer: Callable[[str, dict[str, Any]], Answer] = lambda path, body: None
        #: Whether too many calls wait already: a call returns at once, and asks for a long pause.
        self.refuses_waits = False
        #: Every request: its path and its body.
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet per reply

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, reply = fake._reply(self.path, json.loads(content))
                body = json.dumps(reply).encode()
                self.send_response(status)
                if fake.refuses_waits:
                    self.send_header("retry-after", "3600")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_DELETE(self) -> None:
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        class Listener(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None: ...  # a worker that ends its wait closes the connection

        self._http = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    def registrations(self) -> list[dict[str, Any]]:
        return [body for path, body in self.calls if path == "/leases" and "worker_id" not in body]

    def _reply(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append((path, body))
        if (answer := self.answer(path, body)) is not None:
            return answer
        if path != "/leases":
            return 200, {"lost": [], "cancel": [], "status": "stored"}
        has_reports = any(body.get(name) for name in ("settle", "steps", "checkpoints", "progress"))
        if has_reports and "worker_id" not in body:
            return INVALID
        with self._lock:
            granted, self.jobs = self.jobs[: body["limit"]], self.jobs[body["limit"] :]
        if not granted and not has_reports and "worker_id" in body and not self.refuses_waits:
            threading.Event().wait(min(body["wait_seconds"], 1.0))  # a long poll
        return 200, {
            "protocol": "1.1",
            "worker_id": body.get("worker_id") or new_id(),
            "renew_within_seconds": 15,
            "jobs": granted,
            "cancel": [],
            "lost": [],
            "settled": [{"settled": "stored", "message": None} for _ in body.get("settle", [])],
            "saved_steps": [{"saved": "stored"} for _ in body.get("steps", [])],
            "saved_checkpoints": [{"saved": "stored"} for _ in body.get("checkpoints", [])],
            "saved_progress": [{"saved": "stored"} for _ in body.get("progress", [])],
        }


def leased_job(kind: str, payload: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A job as a lease call returns it."""
    job: dict[str, Any] = {"id": new_id(), "lease_no": 1, "kind": kind, "payload": payload or {}, "attempt": 1}
    job |= {"max_attempts": 3, "queue": "default", "timeout_seconds": None, "steps": [], "traceparent": None}
    return {**job, **fields}
