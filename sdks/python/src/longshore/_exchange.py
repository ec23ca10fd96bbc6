"""The worker's calls to the server: leases, reports and renewals. `_backend.py` has the calls of handlers.

Every call runs on a thread of its own with its own connection, so that a handler that blocks the event loop loses
no lease. Two threads exchange results for jobs (`POST /leases`), one waits for cancels while all slots are in use,
and one renews the leases. The limit of every open call counts as used slots, so the worker never gets more jobs than
it can start.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from . import _wire
from ._attempt import Attempt, Reason, limited
from ._codec import Json
from ._enqueue import to_json
from ._errors import Fail, LeaseLost, LongshoreError, ValidationError, error_from_reply
from ._http import ConnectFailed, Connection, Reply, Request, Server, unreachable
from ._version import VERSION

log = logging.getLogger("longshore.worker")
T = TypeVar("T")

#: How long a call without reports waits for work.
WAIT = 20.0
#: How long a call waits for cancels while the worker drains.
DRAIN_WAIT = 1.0
#: After a lost reply, calls wait only this long. The reply may have contained jobs, and the server releases them when
#: a call does not list them two seconds after it granted them.
AFTER_LOST_REPLY = 2.2
MAX_LIMIT = 500
#: The server accepts this many leases and reports per call.
MAX_ITEMS = 1000
#: How many cancels are kept for jobs that have not been delivered. Most of them are for attempts that have ended.
MAX_EARLY_CANCELS = 100
MAX_REPORT_BYTES = 4 << 20
MAX_PROGRESS = 64 << 10
#: The body of a renewal may have 1.25 MiB.
MAX_PROGRESS_BYTES = 512 << 10
#: Reports of short jobs wait this long for others, if more jobs are about to end.
LINGER = 0.002
#: The worker repeats its calls while the server cannot be reached, and logs it this often.
WARN_EVERY = 10.0
_PROGRESS_INTERVAL = 0.5
_MIN_DELAY, _MAX_DELAY = 0.05, 2.0
#: The longest `Retry-After` that the worker follows. Reports and renewals have to go on.
_MAX_RETRY_AFTER = 10.0
#: When a report is sent again that the server could not store.
_UNAVAILABLE_PAUSE = 1.0


@dataclass
class Registration:
    """What the first call says about the worker."""

    name: str | None
    queues: list[str]
    kinds: list[str]
    announce: list[dict[str, Any]]
    stale_after: float


@dataclass
class _Stored:
    """A step or a checkpoint that is stored with the next call."""

    attempt: Attempt
    text: str
    future: Future[None]
    what: str


@dataclass
class _Reports:
    """What one call reports."""

    settles: list[tuple[Attempt, str]]
    steps: list[_Stored]
    checkpoints: list[_Stored]
    progress: dict[str, tuple[Attempt, str]]

    def __bool__(self) -> bool:
        return bool(self.settles or self.steps or self.checkpoints)

    def __len__(self) -> int:
        return len(self.settles) + len(self.steps) + len(self.checkpoints)

    def halves(self) -> tuple[_Reports, _Reports]:
        """Two parts, without the progress. Only for two reports or more."""
        middle = len(self) // 2
        first, second = _Reports([], [], [], {}), _Reports([], [], [], {})
        for index, settle in enumerate(self.settles):
            (first if index < middle else second).settles.append(settle)
        for index, step in enumerate(self.steps, len(self.settles)):
            (first if index < middle else second).steps.append(step)
        for index, checkpoint in enumerate(self.checkpoints, len(self.settles) + len(self.steps)):
            (first if index < middle else second).checkpoints.append(checkpoint)
        return first, second


@dataclass
class _Call:
    """A call of `POST /leases`. Without a `worker_id` it registers the worker, and then it has no reports."""

    worker_id: str | None
    limit: int
    wait: float
    reports: _Reports


class Refused(Exception):
    """The server refuses this worker; repeating the call does not help."""


class Exchange:
    """Leases jobs and reports their ends. `on_jobs` receives leased jobs, `free_slots` says how many to lease."""

    def __init__(
        self,
        server: Server,
        registration: Registration,
        free_slots: Callable[[], int],
        on_jobs: Callable[[list[_wire.LeasedJob]], None],
    ) -> None:
        self.server = server
        self.registration = registration
        self._free_slots = free_slots
        self._on_jobs = on_jobs
        self.worker_id: str | None = None
        self.renew_within = registration.stale_after / 4
        #: Leases whose attempts have not ended, and leases whose reports are not acknowledged.
        self.active: dict[str, Attempt] = {}
        self._settling: dict[str, Attempt] = {}
        #: Cancels of leases whose jobs another call has not delivered yet. The server reports each cancel once.
        self._early_cancels: dict[str, int] = {}
        self._outbox: deque[tuple[Attempt, str]] = deque()
        self._steps: deque[_Stored] = deque()
        self._checkpoints: deque[_Stored] = deque()
        self._progress: dict[str, tuple[Attempt, str]] = {}
        self._changed = threading.Condition()
        self._idle_threads = 0
        self._open_limit = 0
        #: The limit of the newest call that waits for work; -1 if none does.
        self._waiting_limit = -1
        self._waiting_thread = 0
        self._waiting_connections: dict[int, Connection] = {}
        self._registering_thread = 0
        #: Parts of a batch that the server refused as a whole. Each is sent alone, to find the refused report.
        self._refused_parts: deque[_Reports] = deque()
        self._lost_reply_at = float("-inf")
        #: No call waits for work before this time: too many calls wait for the server already.
        self._no_wait_until = 0.0
        self._warned_at = float("-inf")
        self._is_draining = False
        self.is_closed = False
        self._renew_now = threading.Event()
        self._last_acknowledged = time.monotonic()
        self.is_hurried: Callable[[], bool] = lambda: True
        self.fatal: Refused | None = None
        self.on_fatal: Callable[[], None] = lambda: None
        self.registered = threading.Event()
        self._threads: list[threading.Thread] = []

    # --- Lifecycle ---

    def start(self) -> None:
        targets = [
            ("exchange-1", self._exchange_loop),
            ("exchange-2", self._exchange_loop),
            ("cancels", self._cancel_loop),
            ("renew", self._renew_loop),
        ]
        for name, target in targets:
            thread = threading.Thread(target=target, name=f"longshore-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def drain(self) -> None:
        """Leases nothing more. Reports and renewals continue."""
        with self._changed:
            self._is_draining = True
            self._abort_waits()
            self._changed.notify_all()

    def _abort_waits(self) -> None:
        """Ends the calls that wait for work or cancels."""
        for connection in list(self._waiting_connections.values()):
            connection.abort()

    def flush(self, timeout: float) -> bool:
        """Waits until every report is acknowledged."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._settling and time.monotonic() < deadline:
                self._changed.wait(min(0.1, deadline - time.monotonic()))
            return not self._settling

    def close(self) -> None:
        """Ends the threads and signs off, which releases the leases that are left."""
        with self._changed:
            self.is_closed = self._is_draining = True
            self._abort_waits()
            self._changed.notify_all()
        self._renew_now.set()
        # A call that arrives after the sign-off would be refused.
        for thread in self._threads:
            thread.join(1.0)
        worker_id, self.worker_id = self.worker_id, None
        if worker_id is not None:
            try:
                Connection(self.server).send(Request("DELETE", f"/leases/{worker_id}"), timeout=5.0)
            except (OSError, http.client.HTTPException) as error:
                log.warning("could not sign off; the server recovers the worker's leases: %s", error)

    def wake(self) -> None:
        """Lets an idle thread check whether there is something to report or a slot is free."""
        if self._idle_threads:
            with self._changed:
                self._changed.notify()

    # --- Attempts ---

    def settle(self, attempt: Attempt, text: str) -> None:
        """Reports the end of an attempt. Only the first report of an attempt counts."""
        if attempt.is_settled:
            return
        attempt.is_settled = True
        if attempt.is_lost:
            self.forget(attempt)
            return
        self._settling[attempt.id] = attempt
        if self.active.get(attempt.id) is attempt:
            self.active.pop(attempt.id, None)
        # Progress that is not sent yet goes with the same call, and is stored first.
        self._outbox.append((attempt, text))
        self.wake()

    def hold(self, attempt: Attempt) -> None:
        """Adds an attempt whose job was delivered. Its cancel may have come before it."""
        with self._changed:
            self.active[attempt.id] = attempt
            is_cancelled = self._early_cancels.pop(attempt.id, None) == attempt.lease_no
        if is_cancelled:
            self.stop_attempt(attempt, "cancel")

    def forget(self, attempt: Attempt) -> None:
        """Drops an attempt whose lease has ended without a report."""
        attempt.is_settled = True
        self._progress.pop(attempt.id, None)
        if self.active.get(attempt.id) is attempt:
            self.active.pop(attempt.id, None)
        self.wake()

    def lose(self, attempt: Attempt) -> None:
        """Stops an attempt whose lease belongs to another worker now."""
        attempt.is_lost = True
        if self.active.get(attempt.id) is attempt:
            self.active.pop(attempt.id, None)
        self.stop_attempt(attempt, "lease_lost")

    def stop_attempt(self, attempt: Attempt, reason: Reason) -> None:
        if attempt.cancellation.reason is None:
            attempt.cancellation.set(reason)
            if attempt.stop is not None:
                attempt.stop()

    def check_contact(self) -> None:
        """Stops all handlers if the server may give their leases to others: no call was acknowledged for 3/4 of
        the time after which the server declares the worker dead."""
        silent = time.monotonic() - self._last_acknowledged
        if not self.active or silent <= 0.75 * self.registration.stale_after:
            return
        log.error("no contact with the server for %.1f s; stopping %d jobs", silent, len(self.active))
        # Reports of jobs that have ended are kept: the server accepts them unless it has declared the worker dead.
        for attempt in list(self.active.values()):
            self.lose(attempt)
        with self._changed:
            self._abort_waits()

    def _start_over(self, worker_id: str) -> None:
        """The server has declared this worker dead: its leases are lost. Registers again."""
        with self._changed:
            if self.worker_id != worker_id:
                return
            self.worker_id = None
            self.registered.clear()
            lost = list(self.active.values())
            stored = [*self._steps, *self._checkpoints]
            for part in self._refused_parts:
                stored += [*part.steps, *part.checkpoints]
            for reports in (self._settling, self._outbox, self._steps, self._checkpoints, self._progress):
                reports.clear()
            self._refused_parts.clear()
            self._last_acknowledged = time.monotonic()
            self._abort_waits()  # they belong to the old registration
            self._changed.notify_all()
        for attempt in lost:
            self.lose(attempt)
        self._fail_stored(stored, LeaseLost("the worker was declared dead"))

    # --- The exchange ---

    def _exchange_loop(self) -> None:
        connection = Connection(self.server)
        delay = _MIN_DELAY
        while (call := self._next_call()) is not None:
            pause: float | None = 0.0
            try:
                pause = self._send(connection, call)
            except Refused as error:
                self.fatal = error
                self.registered.set()
                self.on_fatal()
            except Exception:
                log.exception("unexpected error in the exchange with the server")
                self._give_back(call)
            finally:
                with self._changed:
                    self._open_limit -= call.limit
                    if self._registering_thread == threading.get_ident():
                        self._registering_thread = 0
                    self._end_wait(connection)
                    if self._waiting_thread == threading.get_ident():
                        self._waiting_limit, self._waiting_thread = -1, 0
                    self._changed.notify_all()
            if pause is None:
                delay = _MIN_DELAY
            elif not self.is_closed:
                delay = min(_MAX_DELAY, random.uniform(_MIN_DELAY, delay * 3))
                time.sleep(max(delay, pause))
        connection.close()

    def _next_call(self) -> _Call | None:
        """Waits until there is something to report or to lease. None ends the thread."""
        while True:
            if self._outbox and not self.is_hurried() and len(self._outbox) < MAX_LIMIT // 4:
                time.sleep(LINGER)  # more jobs are about to end; one call for all of them is cheaper
            with self._changed:
                self._idle_threads += 1
                try:
                    while not (plan := self._plan()):
                        if self.is_closed:
                            return None
                        until_wait = self._no_wait_until - time.monotonic()
                        self._changed.wait(until_wait if 0 < until_wait < 1 else 1.0)
                finally:
                    self._idle_threads -= 1
                limit, wait = plan
                worker_id = self.worker_id
                if worker_id is None:
                    # The server refuses reports of a worker that it does not know.
                    self._registering_thread = threading.get_ident()
                    return _Call(None, 0, wait, _Reports([], [], [], {}))
                reports = self._take_reports()
                if reports:
                    wait = 0.0
                elif wait == 0.0:
                    continue
                self._open_limit += limit
                return _Call(worker_id, limit, wait, reports)

    def _plan(self) -> tuple[int, float] | None:
        """The limit and the wait of the next call, or None if no call is needed."""
        if self.is_closed or self.fatal is not None or self._registering_thread:
            return None
        if self.worker_id is None:
            return (0, 0.01) if not self._is_draining else None
        free = 0 if self._is_draining else max(0, min(MAX_LIMIT, self._free_slots() - self._open_limit))
        if self._outbox or self._steps or self._checkpoints or self._refused_parts:
            return free, 0.0
        # The limit of a call that waits does not grow. If more slots are free than it counts, another call takes
        # its place: the server ends the wait of the first one.
        if free > max(0, self._waiting_limit) and time.monotonic() >= self._no_wait_until:
            self._waiting_limit, self._waiting_thread = free, threading.get_ident()
            return free, WAIT if time.monotonic() > self._lost_reply_at + WAIT else AFTER_LOST_REPLY
        return None

    def _begin_wait(self, connection: Connection, worker_id: str) -> bool:
        """Makes the wait of a call abortable. False if it should not start."""
        with self._changed:
            if self._is_draining or self.worker_id != worker_id:
                return False
            connection.is_aborted = False
            self._waiting_connections[threading.get_ident()] = connection
            return True

    def _end_wait(self, connection: Connection) -> None:
        self._waiting_connections.pop(threading.get_ident(), None)
        connection.is_aborted = False

    def _take_reports(self) -> _Reports:
        if self._refused_parts:
            return self._refused_parts.popleft()
        cap, size = MAX_ITEMS, 0
        settles: list[tuple[Attempt, str]] = []
        while self._outbox and len(settles) < cap and size < MAX_REPORT_BYTES:
            entry = self._outbox.popleft()
            size += len(entry[1])
            settles.append(entry)
        cap -= len(settles)
        steps: list[_Stored] = []
        while self._steps and len(steps) < cap and size < MAX_REPORT_BYTES:
            size += len(self._steps[0].text)
            steps.append(self._steps.popleft())
        cap -= len(steps)
        checkpoints: list[_Stored] = []
        while self._checkpoints and len(checkpoints) < cap and size < MAX_REPORT_BYTES:
            size += len(self._checkpoints[0].text)
            checkpoints.append(self._checkpoints.popleft())
        progress = self._take_progress() if settles or steps or checkpoints else {}
        return _Reports(settles, steps, checkpoints, progress)

    def _take_progress(self) -> dict[str, tuple[Attempt, str]]:
        taken: dict[str, tuple[Attempt, str]] = {}
        size = 0
        for id in list(self._progress):  # handlers add entries meanwhile
            if len(taken) == MAX_ITEMS or size > MAX_PROGRESS_BYTES:
                break
            entry = self._progress.pop(id, None)
            if entry is not None:
                taken[id] = entry
                size += len(entry[1])
        return taken

    def _give_back_progress(self, progress: dict[str, tuple[Attempt, str]]) -> None:
        for id, entry in progress.items():
            if not entry[0].is_settled:
                self._progress.setdefault(id, entry)

    def _give_back(self, call: _Call) -> None:
        """The reply was lost. The reports are sent again; the server counts each of them once."""
        reports = call.reports
        with self._changed:
            is_ours = self.worker_id == call.worker_id
            if is_ours:
                self._outbox.extendleft(reversed(reports.settles))
                self._steps.extendleft(reversed(reports.steps))
                self._checkpoints.extendleft(reversed(reports.checkpoints))
                self._give_back_progress(reports.progress)
        if not is_ours:  # declared dead meanwhile: its leases are lost
            self._fail_stored([*reports.steps, *reports.checkpoints], LeaseLost("the worker was declared dead"))

    def _send(self, connection: Connection, call: _Call) -> float | None:
        """One call of `POST /leases`. Returns None if the server accepted it, otherwise the minimum pause."""
        worker_id, wait = call.worker_id, call.wait
        body = self._body(call)
        if wait and worker_id is not None and not self._begin_wait(connection, worker_id):
            return None
        sent = time.monotonic()
        try:
            # Not repeated here: the lost reply may have contained jobs, which the next call has to give back.
            request = Request("POST", "/leases", body, wait=wait, repeatable=False)
            reply = connection.send(request, timeout=max(5.0, self.renew_within))
        except (OSError, http.client.HTTPException) as error:
            self._give_back(call)
            if self.worker_id != worker_id:
                return None
            if call.limit and not isinstance(error, ConnectFailed):
                self._lost_reply_at = time.monotonic()
            if not self._is_draining and time.monotonic() > self._warned_at + WARN_EVERY:
                self._warned_at = time.monotonic()
                log.warning("%s", unreachable(self.server, error))
            return 0.0
        if reply.status == 200:
            self._last_acknowledged = max(self._last_acknowledged, sent)
            if call.wait:
                self._no_wait_until = time.monotonic() + _pause_of(reply)
            self._accept(worker_id, json.loads(reply.body), call.reports)
            return None
        return self._refused(call, reply)

    def _body(self, call: _Call) -> bytes:
        registration, worker_id, reports = self.registration, call.worker_id, call.reports
        head: dict[str, Any] = {
            "queues": registration.queues,
            "kinds": registration.kinds,
            "limit": call.limit,
            "wait_seconds": call.wait if worker_id is not None else 0,
        }
        if worker_id is None:
            head |= {
                "name": registration.name,
                "stale_after_seconds": registration.stale_after,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "version": f"longshore-python {VERSION}",
                "announce": registration.announce,
            }
        else:
            head["worker_id"] = worker_id
        parts = [json.dumps(head)[:-1], ',"held":[', self._held(), "]"]
        if reports.settles:
            parts += [',"settle":[', ",".join(text for _, text in reports.settles), "]"]
        if reports.steps:
            parts += [',"steps":[', ",".join(step.text for step in reports.steps), "]"]
        if reports.checkpoints:
            parts += [',"checkpoints":[', ",".join(entry.text for entry in reports.checkpoints), "]"]
        if reports.progress:
            parts += [',"progress":[', ",".join(text for _, text in reports.progress.values()), "]"]
        parts.append("}")
        return "".join(parts).encode()

    def _held(self) -> str:
        """All leases. An unacknowledged report does not end a lease, so its lease is still named."""
        refs = [attempt.ref for attempt in list(self.active.values())]
        refs += [attempt.ref for attempt in list(self._settling.values())]
        del refs[MAX_ITEMS:]
        return ",".join(f"{ref}}}" for ref in refs)

    def _accept(self, worker_id: str | None, reply: _wire.LeaseResponse, reports: _Reports) -> None:
        protocol = reply.get("protocol")
        if protocol is None or tuple(map(int, protocol.split("."))) < (1, 1):
            raise Refused("the server speaks protocol 1.0, but this SDK needs 1.1; upgrade the server")
        if worker_id is None:
            with self._changed:
                self.worker_id = reply["worker_id"]
                self.renew_within = reply["renew_within_seconds"]
                self._last_acknowledged = time.monotonic()
                self._changed.notify_all()
            self.registered.set()
            log.info("registered as worker %s", self.worker_id)
        elif self.worker_id != worker_id:
            # Declared dead while this call was open. Its jobs belong to the old registration.
            self._fail_stored([*reports.steps, *reports.checkpoints], LeaseLost("the worker was declared dead"))
            return
        jobs = reply["jobs"]
        for (attempt, text), result in zip(reports.settles, reply["settled"], strict=True):
            self._settled(attempt, text, result["settled"], result["message"])
        for stored, saved in zip(reports.steps, reply["saved_steps"], strict=True):
            self._stored(stored, saved, self._steps)
        for stored, saved in zip(reports.checkpoints, reply["saved_checkpoints"], strict=True):
            self._stored(stored, saved, self._checkpoints)
        self._handle_lost_and_cancelled(reply)
        if jobs:
            self._on_jobs(jobs)

    def _settled(self, attempt: Attempt, text: str, outcome: _wire.ReportResult, message: str | None) -> None:
        if outcome == "rejected":
            log.error("job %s: the server rejected its report: %s", attempt.id, message)
            # The worker still holds the lease. Without another end, the server would release the job and
            # run it again, uncharged, time after time.
            instead = attempt.instead_of(text, str(message))
            if instead is not None:
                self._outbox.append((attempt, instead))
                return
        elif outcome == "unavailable":
            log.warning("job %s: the server cannot store its end now; trying again: %s", attempt.id, message)
            self._report_again(self._outbox, (attempt, text))
            return
        elif outcome == "lease_lost":
            log.warning("job %s: lost the lease; its result is not stored", attempt.id)
        if self._settling.get(attempt.id) is attempt:
            self._settling.pop(attempt.id, None)

    def _stored(self, stored: _Stored, result: _wire.SavedReport, reports: deque[_Stored]) -> None:
        if result["saved"] == "stored":
            _resolve(stored.future, None)
        elif result["saved"] == "unavailable":
            self._report_again(reports, stored)
        elif result["saved"] == "lease_lost":
            self.lose(stored.attempt)
            _fail(stored.future, lease_lost(stored.attempt))
        else:
            _fail(stored.future, Fail(f"{stored.what}: {result.get('message')}"))

    def _report_again(self, reports: deque[T], report: T) -> None:
        """Sends a report again after a pause. Another client has locked its job, or a queue is full."""

        worker_id = self.worker_id

        def send() -> None:
            with self._changed:
                if self.worker_id == worker_id:
                    reports.append(report)
                    self._changed.notify_all()
                    return
            # Declared dead meanwhile: the lease is lost.
            if isinstance(report, _Stored):
                _fail(report.future, lease_lost(report.attempt))

        timer = threading.Timer(_UNAVAILABLE_PAUSE, send)
        timer.daemon = True
        timer.start()

    def _fail_stored(self, entries: list[_Stored], error: BaseException) -> None:
        for stored in entries:
            _fail(stored.future, error)

    def _handle_lost_and_cancelled(self, reply: _wire.LeaseResponse | _wire.RenewResponse) -> None:
        for ref in reply["lost"]:
            attempt = self.active.get(ref["id"])
            if attempt is None or attempt.lease_no != ref["lease_no"]:
                continue
            # A suspended job has no lease either; the reply of its wait says so.
            if not attempt.waits and not attempt.is_suspended:
                log.warning("job %s: lost the lease; another worker owns the job", attempt.id)
                self.lose(attempt)
        for ref in reply["cancel"]:
            with self._changed:
                attempt = self.active.get(ref["id"])
                if attempt is None or attempt.lease_no < ref["lease_no"]:
                    self._early_cancels[ref["id"]] = ref["lease_no"]
                    if len(self._early_cancels) > MAX_EARLY_CANCELS:
                        del self._early_cancels[next(iter(self._early_cancels))]
            if attempt is not None and attempt.lease_no == ref["lease_no"]:
                self.stop_attempt(attempt, "cancel")

    def _refused(self, call: _Call, reply: Reply) -> float | None:
        error, reports = error_of(reply), call.reports
        if reply.status == 409 and call.worker_id is not None:
            log.warning("the server declared this worker dead; registering again")
            self._start_over(call.worker_id)
            self._fail_stored([*reports.steps, *reports.checkpoints], LeaseLost("the worker was declared dead"))
            return None
        if call.worker_id is None and reply.status in (400, 401, 403, 404, 421, 422):
            if reply.status == 403 and self.registration.announce:
                log.warning("the server does not let this worker describe its kinds: %s", error)
                self.registration.announce = []
                return None
            raise Refused(f"the server refuses this worker: {error}")
        if reply.status in (400, 413, 422) and reports:
            self._isolate(reports, error)
            return None
        self._give_back(call)
        log.warning("the server replied with status %d: %s", reply.status, error)
        return _pause_of(reply)

    def _isolate(self, reports: _Reports, error: LongshoreError) -> None:
        """The server refuses the whole call. Sends its reports in parts, until the one that it refuses is alone."""
        if len(reports) > 1:
            with self._changed:
                self._refused_parts.extend(reports.halves())
                self._give_back_progress(reports.progress)
            return
        for attempt, text in reports.settles:
            self._settled(attempt, text, "rejected", str(error))
        self._fail_stored([*reports.steps, *reports.checkpoints], Fail(str(error)))

    # --- Cancels ---

    def _cancel_loop(self) -> None:
        """Waits for cancels while no call waits for work. Such a call claims nothing."""
        connection = Connection(self.server)
        delay = _MIN_DELAY
        while not self.is_closed:
            worker_id = self.worker_id
            with self._changed:
                is_needed = worker_id is not None and self.active and self._waiting_limit < 0
                if not is_needed:
                    self._changed.wait(0.1 if self.active else 1.0)
                    continue
                connection.is_aborted = False
                self._waiting_connections[threading.get_ident()] = connection
            pause: float | None = None
            try:
                pause = self._await_cancels(connection, str(worker_id))
            except (OSError, http.client.HTTPException):
                pass  # the exchange and the renewals report errors
            except Exception:
                log.exception("unexpected error while waiting for cancels")
            finally:
                with self._changed:
                    self._end_wait(connection)
            # A server that replies at once, for example with an error, is not called again at once.
            is_ok = pause is not None
            delay = _MIN_DELAY if is_ok else min(_MAX_DELAY, random.uniform(_MIN_DELAY, delay * 3))
            if not self.is_closed:
                time.sleep(max(delay, pause or 0.0))
        connection.close()

    def _await_cancels(self, connection: Connection, worker_id: str) -> float | None:
        """One call that waits for cancels. Returns the minimum pause until the next one; None if the server
        refused it."""
        wait = DRAIN_WAIT if self._is_draining else WAIT
        body: dict[str, Any] = {"worker_id": worker_id, "limit": 0, "wait_seconds": wait}
        body |= {"queues": self.registration.queues, "kinds": self.registration.kinds}
        sent = time.monotonic()
        reply = connection.send(Request("POST", "/leases", to_json(body), wait=wait))
        if reply.status == 200:
            self._last_acknowledged = max(self._last_acknowledged, sent)
            if self.worker_id == worker_id:
                self._handle_lost_and_cancelled(json.loads(reply.body))
            return _pause_of(reply)
        if reply.status == 409 and not self.is_closed:
            self._start_over(worker_id)
        return None

    # --- Renewals ---

    def _renew_loop(self) -> None:
        connection = Connection(self.server)
        last_sent = 0.0
        while not self.is_closed:
            pause = max(0.02, last_sent + self.renew_within / 3 - time.monotonic())
            if self._progress:
                pause = min(pause, max(0.0, last_sent + _PROGRESS_INTERVAL - time.monotonic()))
            self._renew_now.wait(pause)
            self._renew_now.clear()
            is_due = time.monotonic() >= last_sent + self.renew_within / 3
            has_news = self._progress and time.monotonic() >= last_sent + _PROGRESS_INTERVAL
            worker_id = self.worker_id
            if worker_id is None or not (is_due or has_news) or self.is_closed:
                continue
            last_sent = time.monotonic()
            try:
                self._renew(connection, worker_id, self._take_progress())
            except Exception:  # without this thread, the worker would lose its leases
                log.exception("could not renew the leases")
        connection.close()

    def _renew(self, connection: Connection, worker_id: str, progress: dict[str, tuple[Attempt, str]]) -> None:
        body = f'{{"worker_id":"{worker_id}","leases":[{self._held()}]'
        if progress:
            body += ',"progress":[' + ",".join(text for _, text in progress.values()) + "]"
        request = Request("POST", "/leases/renew", (body + "}").encode())
        sent = time.monotonic()
        try:
            reply = connection.send(request, timeout=max(1.0, self.renew_within))
        except (OSError, http.client.HTTPException) as error:
            log.warning("could not renew the leases: %s", error)
            self._give_back_progress(progress)
            return
        if reply.status == 200:
            self._last_acknowledged = max(self._last_acknowledged, sent)
            if self.worker_id == worker_id:
                self._handle_lost_and_cancelled(json.loads(reply.body))
        elif reply.status == 409:
            if not self.is_closed:
                log.warning("the server declared this worker dead; registering again")
            self._start_over(worker_id)
        elif reply.status in (400, 413, 422) and progress:
            # One invalid report refuses the whole renewal.
            log.error("the server refuses the progress of a job: %s", error_of(reply))
            self._renew(connection, worker_id, {})
        else:
            log.warning("could not renew the leases: %s", error_of(reply))
            self._give_back_progress(progress)

    # --- What handlers store ---

    def save_step(self, attempt: Attempt, name: str, value: Json) -> Future[None]:
        encoded = limited(f"step `{name}`", to_json(value))
        step = f'[{{"name":{json.dumps(name)},"value":{encoded}}}]'
        return self._store(self._steps, attempt, f'{attempt.ref},"steps":{step}}}', f"step `{name}`")

    def save_checkpoint(self, attempt: Attempt, value: Json) -> Future[None]:
        text = f'{attempt.ref},"checkpoint":{limited("checkpoint", to_json(value))}}}'
        return self._store(self._checkpoints, attempt, text, "checkpoint")

    def _store(self, outbox: deque[_Stored], attempt: Attempt, text: str, what: str) -> Future[None]:
        future: Future[None] = Future()
        if attempt.is_lost:
            future.set_exception(lease_lost(attempt))
            return future
        outbox.append(_Stored(attempt, text, future, what))
        self.wake()
        return future

    def report_progress(self, attempt: Attempt, value: Json) -> None:
        if attempt.is_lost or attempt.is_settled:
            return
        text = to_json(value)
        if len(text) > MAX_PROGRESS:
            raise ValidationError(f"progress: {len(text)} bytes of JSON are too many; use at most {MAX_PROGRESS}")
        is_first = not self._progress  # otherwise the thread knows already
        self._progress[attempt.id] = (attempt, f'{attempt.ref},"progress":{text.decode()}}}')
        if is_first:
            self._renew_now.set()


def _pause_of(reply: Reply) -> float:
    """The pause that the server asks for, as far as the worker follows it."""
    return min(_MAX_RETRY_AFTER, reply.retry_after())


def error_of(reply: Reply) -> LongshoreError:
    try:
        problem = json.loads(reply.body)
    except ValueError:
        problem = None
    return error_from_reply(reply.status, problem, reply.body)


def lease_lost(attempt: Attempt) -> LeaseLost:
    return LeaseLost(f"lease {attempt.lease_no} of job {attempt.id} is lost; another worker owns the job")


def _resolve(future: Future[T], value: T) -> None:
    with suppress(Exception):  # a handler that was cancelled has cancelled its future
        future.set_result(value)


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(Exception):
        future.set_exception(error)
