"""What a worker does when the server refuses a call, or a report in it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from longshore import (
    Context,
    JobFailed,
    LeaseLost,
    Longshore,
    LongshoreError,
    Retry,
    Snooze,
    SyncContext,
    Worker,
    _wire,
)
from longshore._attempt import Attempt
from longshore._backend import WorkerBackend
from longshore._http import Reply

from .conftest import LIMIT, eventually
from .fake_server import DEAD, UNAVAILABLE, Answer, FakeServer, leased_job


def test_a_worker_that_is_declared_dead_during_steps_registers_again() -> None:
    with FakeServer([leased_job("work", {"n": n}) for n in range(3)]) as server:
        app = Longshore(server.url)
        ends: list[BaseException] = []

        @app.job()
        async def work(n: int, *, ctx: Context) -> None:
            # One call for each of the first two. The third step waits, because their calls are open.
            await asyncio.to_thread(eventually, lambda: len(with_steps()) >= n, "the steps before this one are sent")
            try:
                await ctx.step("once", lambda: n)
            except BaseException as error:
                ends.append(error)
                raise

        def with_steps() -> list[dict[str, Any]]:
            return [body for _, body in server.calls if body.get("steps")]

        third_waits = threading.Event()

        def answer(path: str, body: dict[str, Any]) -> Answer:
            if body.get("steps") and "worker_id" in body:
                third_waits.wait(LIMIT)
                return DEAD
            return None

        server.answer = answer
        with app.worker(concurrency=3) as worker:
            first = eventually(lambda: worker.id, "the worker registers")
            eventually(lambda: len(with_steps()) == 2, "two steps are sent")
            eventually(lambda: len(worker._exchange._steps) == 1, "the third step waits")
            third_waits.set()
            eventually(lambda: worker.id not in (None, first), "the worker registers again")
            eventually(lambda: len(ends) == 3, "the handlers end")
            assert worker._exchange.fatal is None
            assert len(with_steps()) == 2, "a step was sent for a lease that is lost"
        assert len(server.registrations()) == 2
        assert not any(body.get("steps") or body.get("settle") for body in server.registrations())


@pytest.mark.parametrize("concurrency", [1, 2], ids=["waiting for cancels", "waiting for work"])
def test_errors_do_not_make_a_worker_call_again_at_once(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    really_sleep = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread().name.startswith(("longshore-exchange", "longshore-cancels")):
            pauses.append(seconds)
        really_sleep(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    with FakeServer([leased_job("work")]) as server:
        app = Longshore(server.url)
        started, done = threading.Event(), threading.Event()

        @app.job()
        def work() -> None:
            started.set()
            done.wait(LIMIT)

        refused: list[str] = []

        def answer(path: str, body: dict[str, Any]) -> Answer:
            if path != "/leases" or not started.is_set():
                return None
            refused.append(path)
            return UNAVAILABLE

        server.answer = answer
        with app.worker(concurrency=concurrency, grace=0.1):
            assert started.wait(LIMIT)
            eventually(lambda: len(refused) >= 6, "it calls again")
            calls = len(refused)
            # Each of the three threads may be about to pause after its last call.
            assert len([pause for pause in pauses if pause >= 0.05]) >= calls - 3
            server.answer = lambda path, body: None
            done.set()


@pytest.mark.parametrize("concurrency", [1, 2], ids=["waiting for cancels", "waiting for work"])
def test_a_worker_whose_calls_may_not_wait_pauses_and_still_reports(concurrency: int) -> None:
    with FakeServer([leased_job("work")]) as server:
        app = Longshore(server.url)
        calls_again = threading.Event()

        @app.job()
        def work() -> None:
            calls_again.wait(0.5)

        def waits() -> list[dict[str, Any]]:
            return [body for path, body in server.calls if path == "/leases" and body["wait_seconds"] > 0]

        def answer(path: str, body: dict[str, Any]) -> Answer:
            server.refuses_waits = path == "/leases" and "worker_id" in body
            if len(waits()) > 2:
                calls_again.set()
            return None

        server.answer = answer
        with app.worker(concurrency=concurrency):
            eventually(lambda: any(body.get("settle") for _, body in server.calls), "the job is settled")
            # One call may wait for cancels, and another one for work.
            assert not calls_again.is_set(), f"the worker calls again at once: {len(waits())} calls"


def test_a_wait_for_a_job_pauses_as_the_server_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    replies = [({"status": "running"}, {"retry-after": "2"}), ({"status": "succeeded"}, {})]

    def send(operation: Any) -> Any:
        body, headers = replies.pop(0)
        return operation.result(Reply(200, headers, json.dumps(body).encode()))

    app = Longshore("http://127.0.0.1:1")
    monkeypatch.setattr(app.sync, "send", send)
    assert app.sync.wait("01990000-0000-7000-8000-000000000001")["status"] == "succeeded"
    assert pauses == [2.0]


def test_a_cancel_that_arrives_before_its_job_is_not_lost() -> None:
    job = leased_job("work")
    with FakeServer([job]) as server:
        app = Longshore(server.url)

        @app.job()
        def work() -> None: ...

        worker = app.worker(concurrency=1)
        # The reply of a call that was sent before the job was delivered. The server reports a cancel once.
        ref: _wire.LeaseRef = {"id": job["id"], "lease_no": job["lease_no"]}
        worker._exchange._handle_lost_and_cancelled({"lost": [], "cancel": [ref]})
        with worker:
            ends = [*eventually(lambda: settled(server), "the end is reported")]
        assert [end["outcome"] for end in ends] == ["cancelled"]


def settled(server: FakeServer) -> list[dict[str, Any]]:
    return [settle for _, body in server.calls for settle in body.get("settle", ())]


class FakeTime:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_a_call_of_a_cancelled_handler_is_repeated_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr("longshore._http.time", clock)
    monkeypatch.setattr("longshore._backend.time", clock)
    with FakeServer() as server:
        app = Longshore(server.url)

        @app.job()
        async def work() -> None: ...

        worker = app.worker(stale_after=60)  # how long calls are repeated
        worker._exchange.worker_id = "w"
        server.answer = lambda path, body: UNAVAILABLE
        attempt = Attempt(leased_job("work"), work)
        attempt.cancellation.set("cancel")
        backend = WorkerBackend(worker._exchange)
        with pytest.raises(LongshoreError, match="the database does not answer"):
            backend.wait(attempt, [{"name": "w", "within_seconds": 1}]).result(LIMIT)
        backend.close()
        assert len(server.calls) == len(clock.pauses) + 1
        assert min(clock.pauses) >= 0.05
        assert 50 < clock.now < 60
        assert attempt.waits == 0, "the loss of the lease would be ignored"


def test_a_report_that_is_rejected_is_replaced_by_a_failure(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    @ls.job(f"snooze-{queue}", queue=queue, max_attempts=1)
    async def snoozes() -> None:
        raise Snooze(-1)

    @ls.job(f"retry-{queue}", queue=queue, max_attempts=1)
    async def retries() -> None:
        raise Retry("later", after=1e12)

    @ls.job(f"nul-{queue}", queue=queue)
    async def nul() -> str:
        return "a\x00b"

    running()
    with pytest.raises(JobFailed, match="the end of the attempt was rejected: delay_seconds: -1 is out of range"):
        snoozes.enqueue_sync().result_sync(LIMIT)
    with pytest.raises(JobFailed, match="the end of the attempt was rejected: retry_after_seconds"):
        retries.enqueue_sync().result_sync(LIMIT)
    with pytest.raises(JobFailed, match="the result cannot be stored: result: a string contains a NUL"):
        nul.enqueue_sync().result_sync(LIMIT)


def test_any_error_text_can_be_reported(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    texts = {"surrogate": "caf\udce9", "nul": "a\x00b", "long": "x" * 100_000, "empty": ""}

    @ls.job(f"text-{queue}", queue=queue, max_attempts=1)
    async def fails(which: str) -> None:
        raise Mute if which == "mute" else ValueError(texts[which])

    running()
    expected = [("surrogate", r"caf\\udce9"), ("nul", "ValueError: ab "), ("long", "xxx…"), ("empty", "ValueError")]
    # With OpenTelemetry, the span of the handler reads the text too, and raises the error of `__str__`.
    for which, message in [*expected, ("mute", "Mute|no text")]:
        with pytest.raises(JobFailed, match=message):
            fails.enqueue_sync(which=which).result_sync(LIMIT)


def test_a_result_of_any_size_is_refused_and_delays_no_other(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    @ls.job(f"huge-{queue}", queue=queue)
    async def huge(size: int) -> str:
        return "x" * size

    @ls.job(f"deep-{queue}", queue=queue)
    async def deep(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return value

    running()
    # More than the server reads of a body, and more levels than it can parse: it refuses the whole call.
    bad = [huge.enqueue_sync(size=20 << 20), deep.enqueue_sync(levels=400)]
    good = [huge.enqueue_sync(size=n) for n in range(20)]
    assert [len(handle.result_sync(LIMIT)) for handle in good] == list(range(20))
    with pytest.raises(JobFailed, match="result: 20971522 bytes of JSON exceed the limit of 1048576"):
        bad[0].result_sync(LIMIT)
    with pytest.raises(JobFailed, match="the result cannot be stored"):
        bad[1].result_sync(LIMIT)


def test_a_success_whose_follow_ups_are_refused_is_retried(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    other = Longshore("http://127.0.0.1:1")

    @other.job(f"unknown-{queue}", queue=queue)
    async def unknown() -> None: ...

    @ls.job(f"follow-{queue}", queue=queue, max_attempts=2, retry={"policy": "fixed", "delay_ms": 1})
    async def work(*, ctx: Context) -> int:
        ctx.enqueue(unknown.new())
        return ctx.attempt

    running()
    handle = work.enqueue_sync()
    with pytest.raises(JobFailed, match="the follow-up jobs cannot be stored"):
        handle.result_sync(LIMIT)
    assert handle.get_sync()["attempts"] == 2


def test_progress_that_is_refused_costs_no_lease(
    ls: Longshore, queue: str, running: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = threading.Event()

    @ls.job(f"progress-{queue}", queue=queue)
    def work(n: int, *, ctx: SyncContext) -> str | None:
        # The server refuses every renewal with a report of the first job, and one with all of the others together.
        while not enough.is_set():
            ctx.progress("\x00" if n == 0 else str(n) * 30_000)
            ctx.cancelled.wait(0.01)
        return ctx.cancelled.reason

    worker = running(concurrency=30)
    exchange = worker._exchange
    renew = exchange._renew
    renewals: list[bool] = []

    def counting(connection: Any, worker_id: str, progress: dict[str, Any]) -> None:
        sent = time.monotonic()
        renew(connection, worker_id, progress)
        if any('"\\u0000"' in text for _, text in progress.values()):
            renewals.append(exchange._last_acknowledged >= sent)

    monkeypatch.setattr(exchange, "_renew", counting)
    handles = [work.enqueue_sync(n=n) for n in range(30)]
    eventually(lambda: len(renewals) >= 5, "renewals with the progress that is refused")
    enough.set()
    assert [handle.result_sync(LIMIT) for handle in handles] == [None] * 30
    assert all(renewals), "the leases were not renewed"


def test_no_step_starts_after_its_lease_is_lost() -> None:
    app = Longshore("http://127.0.0.1:1")

    @app.job()
    def work(ctx: SyncContext) -> None: ...

    worker = app.worker()
    attempt = Attempt(leased_job("work"), work)
    context = SyncContext(app, attempt, worker._backend)
    worker._exchange.lose(attempt)
    done: list[int] = []
    with pytest.raises(LeaseLost, match="nothing more is stored"):
        context.step("charge", lambda: done.append(1))
    assert done == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs TaskGroup")
def test_an_error_in_a_task_group_counts_as_if_it_were_raised_directly(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    from longshore import Fail

    @ls.job(f"group-{queue}", queue=queue)
    async def work() -> None:
        async def part() -> None:
            raise Fail("hopeless")

        async with asyncio.TaskGroup() as group:  # type: ignore[attr-defined,unused-ignore]
            group.create_task(part())

    running()
    handle = work.enqueue_sync()
    with pytest.raises(JobFailed, match="hopeless"):
        handle.result_sync(LIMIT)
    assert handle.get_sync()["attempts"] == 1
