"""The calls that handlers make: the implementation of `Backend` for a worker.

Steps, checkpoints and progress travel with the next exchange. Waits, children and inputs are calls of their own, on
threads of their own, so that a handler that waits for a reply does not block others.
"""

from __future__ import annotations

import http.client
import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ._attempt import Attempt
from ._codec import Json
from ._context import Child, DoneWait, Input
from ._enqueue import to_json
from ._errors import Conflict, Fail, Suspended, ValidationError
from ._exchange import Exchange, error_of, lease_lost
from ._http import Backoff, Connection, Request, unreachable

T = TypeVar("T")


class WorkerBackend:
    """Implements `Backend`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._server = exchange.server
        self._calls = ThreadPoolExecutor(max_workers=8, thread_name_prefix="longshore-call")
        self._idle_connections: deque[Connection] = deque()

    def close(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)

    def save_step(self, attempt: Attempt, name: str, value: Json) -> Future[None]:
        return self._exchange.save_step(attempt, name, value)

    def save_checkpoint(self, attempt: Attempt, value: Json) -> Future[None]:
        return self._exchange.save_checkpoint(attempt, value)

    def report_progress(self, attempt: Attempt, value: Json) -> None:
        self._exchange.report_progress(attempt, value)

    def journal(self, attempt: Attempt) -> Future[list[dict[str, Any]]]:
        return self._submit(attempt, "journal", {}, lambda reply: list(reply["steps"]))

    def wait(self, attempt: Attempt, waits: list[dict[str, Any]]) -> Future[list[DoneWait]]:
        def ask() -> list[DoneWait]:
            with attempt.waiting():
                reply = self._ask(attempt, "wait", {"waits": waits})
                self._check_status(attempt, reply)
                return [DoneWait(done["name"], done["event"], done["payload"]) for done in reply["done"]]

        return self._calls.submit(ask)

    def spawn(self, attempt: Attempt, name: str, jobs: list[dict[str, Any]]) -> Future[None]:
        def read(reply: dict[str, Any]) -> None:
            self._check_status(attempt, reply)

        return self._submit(attempt, "spawn", {"name": name, "jobs": jobs}, read)

    def join(self, attempt: Attempt, name: str) -> Future[list[Child]]:
        def ask() -> list[Child]:
            children: list[Child] = []
            after = None
            with attempt.waiting():
                while True:
                    reply = self._ask(attempt, "join", {"name": name, "after": after, "limit": 1000})
                    self._check_status(attempt, reply)
                    for child in reply["children"]:
                        children.append(
                            Child(child["id"], child["task"], child["outcome"], child["result"], child["error"])
                        )
                    after = reply["next"]
                    if after is None:
                        return children

        return self._calls.submit(ask)

    def inputs(self, attempt: Attempt) -> Future[list[Input]]:
        def read(reply: dict[str, Any]) -> list[Input]:
            return [Input(entry["task"], entry["id"], entry["outcome"], entry["result"]) for entry in reply["inputs"]]

        return self._submit(attempt, "inputs", {}, read)

    def _check_status(self, attempt: Attempt, reply: dict[str, Any]) -> None:
        if reply["status"] == "suspended":
            attempt.is_suspended = True
            raise Suspended
        if reply["status"] == "lease_lost":
            self._exchange.lose(attempt)
            raise lease_lost(attempt)

    def _submit(
        self, attempt: Attempt, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], T]
    ) -> Future[T]:
        return self._calls.submit(lambda: read(self._ask(attempt, path, body)))

    def _ask(self, attempt: Attempt, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A call about one lease. Every one of them can be repeated after a lost reply."""
        worker_id = self._exchange.worker_id
        if attempt.is_lost or worker_id is None:
            raise lease_lost(attempt)
        ref = {"worker_id": worker_id, "id": attempt.id, "lease_no": attempt.lease_no}
        request = Request("POST", f"/leases/{path}", to_json({**ref, **body}))
        backoff = Backoff(request, self._exchange.registration.stale_after)
        while True:
            try:
                connection = self._idle_connections.pop()
            except IndexError:
                connection = Connection(self._server)
            try:
                reply = connection.send(request)
                self._idle_connections.append(connection)
                delay = backoff.after_reply(reply)
            except (OSError, http.client.HTTPException) as error:
                delay = backoff.after_error(error)
                if delay is None:
                    raise unreachable(self._server, error) from error
            else:
                if delay is None:
                    break
            # Not `cancellation.wait`, which returns at once if the attempt has to stop for another reason.
            time.sleep(delay)
            if attempt.is_lost or self._exchange.is_closed:
                raise lease_lost(attempt)
        if reply.status == 200:
            answer: dict[str, Any] = json.loads(reply.body)
            return answer
        refusal = error_of(reply)
        if isinstance(refusal, (Conflict, ValidationError)):
            raise Fail(f"{path}: {refusal.message}")
        raise refusal
