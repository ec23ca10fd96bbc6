"""The worker against a real server: outcomes, cancels, timeouts, slots and shutdown."""

from __future__ import annotations

import asyncio
import os
import queue as queue_module
import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from longshore import (
    Cancel,
    Context,
    Fail,
    Flow,
    JobFailed,
    Longshore,
    LongshoreError,
    Retry,
    Snooze,
    SyncContext,
    Worker,
    fan_out,
)
from longshore._attempt import Attempt

from .conftest import LIMIT, Program, RunningServer, eventually
from .fake_server import leased_job


@dataclass
class Receipt:
    number: int


@pytest.mark.smoke
def test_async_and_sync_handlers_return_typed_results(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    @ls.job(f"async-{queue}", queue=queue)
    async def on_the_loop(number: int) -> Receipt:
        await asyncio.sleep(0)
        return Receipt(number)

    @ls.job(f"sync-{queue}", queue=queue)
    def in_a_thread(number: int) -> Receipt:
        assert threading.current_thread().name.startswith("longshore-job")
        return Receipt(number + 1)

    running()

    async def both() -> tuple[Receipt, Receipt]:
        first, second = await on_the_loop.enqueue(1), await in_a_thread.enqueue(number=2)
        return await first.result(LIMIT), await second.result(LIMIT)

    assert asyncio.run(both()) == (Receipt(1), Receipt(3))
    assert on_the_loop.enqueue_sync(5).result_sync(LIMIT) == Receipt(5)


def test_the_worker_describes_itself_and_its_kinds(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"described-{queue}", queue=queue, max_attempts=7, timeout=33)
    async def described(to: str) -> None: ...

    worker = running(name="packer")
    [shown] = [entry for entry in ls.sync.workers() if entry["id"] == worker.id]
    assert (shown["name"], shown["pid"], shown["queues"]) == ("packer", os.getpid(), [queue])
    assert (shown["version"] or "").startswith("longshore-python ")
    # The server applies the schema and the defaults to enqueues of other clients.
    from longshore import NewJob, ValidationError

    with pytest.raises(ValidationError, match="payload"):
        ls.sync.enqueue(NewJob(described.name, {"too": 1}))
    job = ls.sync.get(ls.sync.enqueue(NewJob(described.name, {"to": "ada"})).id)
    assert (job["queue"], job["max_attempts"], job["timeout_seconds"]) == (queue, 7, 33)


@pytest.mark.smoke
def test_each_exception_has_its_outcome(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"raises-{queue}", queue=queue, max_attempts=2, retry={"policy": "fixed", "delay_ms": 10})
    async def raises(how: str, *, ctx: Context) -> str:
        if how == "fail":
            raise Fail("it is hopeless")
        if how == "cancel":
            raise Cancel("nobody needs it")
        if how == "error":
            raise RuntimeError("it broke")
        if how == "retry" and ctx.attempt == 1:
            raise Retry("not yet", after=0.05)
        if how == "snooze" and ctx.lease_no < 3:
            raise Snooze(0.05)
        return f"attempt {ctx.attempt}"

    running()
    assert raises.enqueue_sync(how="retry").result_sync(LIMIT) == "attempt 2"
    assert raises.enqueue_sync(how="snooze").result_sync(LIMIT) == "attempt 1"
    ended = {}
    for how in ("fail", "cancel", "error"):
        handle = raises.enqueue_sync(how=how)
        with pytest.raises(JobFailed):
            handle.result_sync(LIMIT)
        ended[how] = handle.get_sync()
    assert (ended["fail"]["status"], ended["fail"]["attempts"]) == ("failed_permanent", 1)
    assert ended["fail"]["last_error"] == "it is hopeless"
    assert (ended["cancel"]["status"], ended["cancel"]["last_error"]) == ("cancelled", "nobody needs it")
    assert (ended["error"]["status"], ended["error"]["attempts"]) == ("failed_permanent", 2)
    assert (ended["error"]["last_error"] or "").startswith("RuntimeError: it broke (in raises, test_worker.py:")


def test_a_payload_that_does_not_decode_fails_at_once_and_names_the_field(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    # The producer has an older version of the job, whose schema the server knows.
    older = Longshore(ls.server)

    @older.job(f"decode-{queue}", queue=queue)
    async def old(to: Any) -> None: ...

    running(older).stop()
    handle = old.enqueue_sync(to={"name": 7})

    @dataclass
    class Person:
        name: str

    newer = Longshore(ls.server)

    def handler(to: Person) -> None: ...

    handler.__annotations__["to"] = Person
    newer.job(f"decode-{queue}", queue=queue)(handler)
    running(newer)
    with pytest.raises(JobFailed, match=r"payload\.to\.name: expected string, got integer"):
        handle.result_sync(LIMIT)
    assert handle.get_sync()["attempts"] == 1


def test_a_result_that_is_not_json_fails_the_job(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"bad-result-{queue}", queue=queue)
    async def bad() -> Any:
        return lambda: None

    @ls.job(f"huge-result-{queue}", queue=queue)
    async def huge() -> str:
        return "x" * (2 << 20)

    running()
    with pytest.raises(JobFailed, match="the result is not JSON"):
        bad.enqueue_sync().result_sync(LIMIT)
    with pytest.raises(JobFailed, match="result: 2097154 bytes of JSON exceed the limit"):
        huge.enqueue_sync().result_sync(LIMIT)


@pytest.mark.smoke
def test_a_running_job_is_cancelled(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    started = threading.Event()
    reasons: list[str | None] = []

    @ls.job(f"cancel-async-{queue}", queue=queue)
    async def sleeps(*, ctx: Context) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            reasons.append(ctx.cancelled.reason)

    @ls.job(f"cancel-sync-{queue}", queue=queue)
    def waits(*, ctx: SyncContext) -> None:
        started.set()
        ctx.cancelled.wait(3600)
        reasons.append(ctx.cancelled.reason)
        ctx.raise_if_cancelled()

    # No renewal for minutes: only the call that waits for work or cancels can bring the cancel.
    running(stale_after=3600)
    for job in (sleeps, waits):
        started.clear()
        handle = job.enqueue_sync()
        assert started.wait(LIMIT)
        assert handle.cancel_sync()["status"] == "pending"
        with pytest.raises(JobFailed) as failed:
            handle.result_sync(LIMIT)
        assert failed.value.job_status == "cancelled"
    assert reasons == ["cancel", "cancel"]


def test_a_timeout_fails_the_attempt(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    reasons = []

    @ls.job(f"slow-async-{queue}", queue=queue, max_attempts=1, timeout=1)
    async def slow_async(*, ctx: Context) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            reasons.append(ctx.cancelled.reason)

    @ls.job(f"slow-sync-{queue}", queue=queue, max_attempts=1, timeout=1)
    def slow_sync(*, ctx: SyncContext) -> None:
        ctx.cancelled.wait(3600)
        reasons.append(ctx.cancelled.reason)

    running()
    for handle in [job.enqueue_sync() for job in (slow_async, slow_sync)]:
        with pytest.raises(JobFailed, match="timed out after 1 s"):
            handle.result_sync(LIMIT)
    assert reasons == ["timeout", "timeout"]


def test_a_thread_that_ignores_its_timeout_is_reported_and_keeps_its_slot(
    ls: Longshore, queue: str, running: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore._worker.STOP_GRACE", 0.1)
    let_go = threading.Event()

    @ls.job(f"stubborn-{queue}", queue=queue, max_attempts=1, timeout=0.1)
    def stubborn() -> None:
        let_go.wait()

    @ls.job(f"next-{queue}", queue=queue)
    def following() -> str:
        return "ran"

    running(concurrency=1)
    handle = stubborn.enqueue_sync()
    with pytest.raises(JobFailed, match="timed out"):
        handle.result_sync(LIMIT)
    waiting = following.enqueue_sync()
    try:
        with pytest.raises(TimeoutError):
            waiting.result_sync(0.5)
        assert waiting.get_sync()["lease_no"] == 0
    finally:
        let_go.set()
    assert waiting.result_sync(LIMIT) == "ran"


def test_a_job_that_succeeds_after_a_cancel_has_succeeded(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    started = threading.Event()

    @ls.job(f"finishes-{queue}", queue=queue)
    def finishes(*, ctx: SyncContext) -> str:
        started.set()
        ctx.cancelled.wait(LIMIT)
        return "done anyway"

    running()
    handle = finishes.enqueue_sync()
    assert started.wait(LIMIT)
    handle.cancel_sync()
    assert handle.result_sync(LIMIT) == "done anyway"


def test_the_trace_of_the_enqueue_continues_in_the_handler(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    if not isinstance(trace.get_tracer_provider(), sdk.TracerProvider):
        trace.set_tracer_provider(sdk.TracerProvider())

    @ls.job(f"traced-{queue}", queue=queue)
    async def traced() -> str:
        return format(trace.get_current_span().get_span_context().trace_id, "032x")

    running()
    with trace.get_tracer("test").start_as_current_span("request") as span:
        handle = traced.enqueue_sync()
        expected = format(span.get_span_context().trace_id, "032x")
    assert handle.result_sync(LIMIT) == expected


@pytest.mark.smoke
def test_progress_and_checkpoints_are_stored(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    may_end = threading.Event()

    @ls.job(f"progress-{queue}", queue=queue, retry={"policy": "fixed", "delay_ms": 1})
    async def works(*, ctx: Context) -> Any:
        if ctx.attempt == 1:
            ctx.progress({"done": 3})
            await ctx.save_checkpoint({"row": 17})
            await asyncio.to_thread(may_end.wait, LIMIT)
            raise RuntimeError("again")
        return ctx.checkpoint

    running()
    handle = works.enqueue_sync()
    eventually(lambda: handle.get_sync()["progress"] == {"done": 3}, "the progress is stored")
    may_end.set()
    assert handle.result_sync(LIMIT) == {"row": 17}


def test_the_context_shows_the_job(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"shows-{queue}", queue=queue)
    async def shows(*, ctx: Context) -> Any:
        return [ctx.queue, ctx.tags, ctx.flags, ctx.metadata, ctx.why, ctx.attempt, ctx.max_attempts, ctx.kind]

    running()
    options = shows.options(tags=["t"], flags=["f"], metadata={"m": 1}, context="why not", max_attempts=4)
    expected = [queue, ["t"], ["f"], {"m": 1}, "why not", 1, 4, shows.name]
    assert options.enqueue_sync().result_sync(LIMIT) == expected


@pytest.mark.smoke
def test_follow_ups_exist_only_after_a_success(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"second-{queue}", queue=f"{queue}-second")
    async def second(n: int) -> None: ...

    @ls.job(f"first-{queue}", queue=queue, retry={"policy": "fixed", "delay_ms": 1})
    async def first(*, ctx: Context) -> None:
        ctx.enqueue(second.new(n=ctx.attempt))
        if ctx.attempt == 1:
            raise RuntimeError("again")

    running(kinds=[first.name], queues=[queue])
    announcing = running(kinds=[second.name], queues=["nothing-here"])
    announcing.stop()
    first.enqueue_sync().result_sync(LIMIT)
    assert [job["payload"] for job in ls.sync.jobs(queue=f"{queue}-second")] == [{"n": 2}]


def test_no_more_than_concurrency_run_at_once(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    lock, all_run = threading.Lock(), threading.Event()
    now, most = 0, 0

    def enter(by: int) -> None:
        nonlocal now, most
        with lock:
            now += by
            most = max(most, now)
            if now == 5:
                all_run.set()

    @ls.job(f"counted-async-{queue}", queue=queue)
    async def counted_async(n: int) -> None:
        enter(1)
        assert await asyncio.to_thread(all_run.wait, LIMIT)  # the first five wait for each other
        await asyncio.sleep(0.005)  # time for a sixth
        enter(-1)

    @ls.job(f"counted-sync-{queue}", queue=queue)
    def counted_sync(n: int) -> None:
        enter(1)
        assert all_run.wait(LIMIT)
        time.sleep(0.005)
        enter(-1)

    running(concurrency=5)
    jobs = [job.new(n=n) for n in range(100) for job in (counted_async, counted_sync)]
    ids = [entry.id for entry in ls.sync.enqueue_many(jobs)]
    for id in ids:
        assert ls.sync.wait(id, timeout=LIMIT)["status"] == "succeeded"
    assert most == 5


def test_context_variables_of_one_job_do_not_reach_the_next(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="none")

    @ls.job(f"async-context-{queue}", queue=queue)
    async def on_loop() -> str:
        before = tenant.get()
        tenant.set("acme")
        return before

    @ls.job(f"sync-context-{queue}", queue=queue)
    def on_thread() -> str:
        before = tenant.get()
        tenant.set("acme")
        return before

    running(concurrency=1)
    handles = [job.enqueue_sync() for job in (on_loop, on_thread) for _ in range(20)]
    assert {handle.result_sync(LIMIT) for handle in handles} == {"none"}


def test_every_slot_has_a_thread() -> None:
    app = Longshore("http://127.0.0.1:1")
    met = threading.Barrier(5)

    @app.job()
    def meets(is_alone: bool) -> None:
        if not is_alone:
            met.wait(LIMIT)

    class Work(queue_module.SimpleQueue[Attempt]):
        """Waits after the third of four attempts, until the idle threads have taken theirs."""

        puts = 0

        def put(self, item: Attempt, block: bool = True, timeout: float | None = None) -> None:
            super().put(item)
            self.puts += 1
            if self.puts == 2 + 3:
                eventually(lambda: self.qsize() == 1, "two threads take their work")

    executor = app.worker(concurrency=4)._executor
    executor._work = Work()
    executor.accept([Attempt(leased_job("meets", {"is_alone": True}), meets) for _ in range(2)])
    eventually(lambda: executor.used() == 0, "two threads are idle")
    executor.accept([Attempt(leased_job("meets", {"is_alone": False}), meets) for _ in range(4)])
    met.wait(LIMIT)  # fails if one of the four does not run


def test_a_worker_can_be_stopped_twice(ls: Longshore, queue: str) -> None:
    stops: list[str] = []

    @ls.job(f"stop-{queue}", queue=queue)
    async def job() -> None: ...

    @ls.on_shutdown
    async def hook() -> None:
        stops.append("stopped")

    ls.worker().stop()
    with ls.worker() as worker:
        assert worker.wait_until_registered(LIMIT)
        worker.stop()
    assert stops == ["stopped"]


def test_a_blocked_event_loop_does_not_stop_the_shutdown(
    ls: Longshore, queue: str, running: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore._worker._HOOK_TIMEOUT", 0.1)
    started, done = threading.Event(), threading.Event()

    @ls.job(f"blocks-{queue}", queue=queue)
    async def blocks() -> None:
        started.set()
        done.wait()  # longer than the test waits for the end of the worker

    @ls.on_shutdown
    async def hook() -> None: ...

    worker = running(grace=0.1)
    handle = blocks.enqueue_sync()
    assert started.wait(LIMIT)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    stopping.join(LIMIT)
    is_stopped = not stopping.is_alive()
    done.set()
    assert is_stopped
    eventually(lambda: handle.get_sync()["status"] == "queued", "the job is released")
    assert handle.get_sync()["attempts"] == 0


def test_a_string_in_place_of_a_list_is_refused(ls: Longshore) -> None:
    @ls.job()
    async def job() -> None: ...

    with pytest.raises(TypeError, match=r"queues: this is one string; pass a list: \['mail'\]"):
        ls.worker(queues="mail")
    with pytest.raises(TypeError, match="tags: this is one string"):
        job.options(tags="weekly")
    with pytest.raises(TypeError, match="after: this is one string"):
        Flow("f").task("b", job.new(), after="a")


def test_jobs_that_cannot_start_are_released(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    """A handler that blocks the event loop keeps others from starting; another worker gets them."""
    blocked, let_go = threading.Event(), threading.Event()
    ran_by: dict[int, str] = {}

    def define(app: Longshore, name: str) -> Any:
        @app.job(f"blocks-{queue}", queue=queue)
        async def blocks(n: int) -> None:
            ran_by[n] = name
            if n == 0:
                blocked.set()
                let_go.wait()  # longer than everything else here

        return blocks

    other = Longshore(ls.server)
    job = define(ls, "first")
    define(other, "second")
    running(ls, concurrency=3)
    first = job.enqueue_sync(n=0)
    assert blocked.wait(LIMIT)
    stuck = [job.enqueue_sync(n=n) for n in (1, 2)]
    eventually(lambda: all(handle.get_sync()["lease_no"] > 0 for handle in stuck), "they are leased")
    running(other)
    try:
        for handle in stuck:
            handle.result_sync(LIMIT)
            stored = handle.get_sync()
            assert (stored["attempts"], stored["errors"]) == (1, [])
        assert (ran_by[1], ran_by[2]) == ("second", "second")
    finally:
        let_go.set()
    first.result_sync(LIMIT)


def test_the_worker_renews_its_leases_while_a_handler_blocks_the_loop(
    ls: Longshore, queue: str, running: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals: list[None] = []

    @ls.job(f"blocking-{queue}", queue=queue)
    async def blocking(*, ctx: Context) -> str | None:
        before = len(renewals)
        eventually(lambda: len(renewals) >= before + 3, "three renewals")  # blocks the loop
        return ctx.cancelled.reason

    worker = running()
    exchange = worker._exchange
    renew = exchange._renew

    def counting(*arguments: Any) -> None:
        sent = time.monotonic()
        renew(*arguments)
        if exchange._last_acknowledged >= sent:
            renewals.append(None)

    monkeypatch.setattr(exchange, "_renew", counting)
    monkeypatch.setattr(exchange, "renew_within", 0.03)  # does not change when the server declares it dead
    exchange._renew_now.set()  # the pause before the next renewal has begun with the old value
    handle = blocking.enqueue_sync()
    assert handle.result_sync(LIMIT) is None
    job = handle.get_sync()
    assert (job["attempts"], job["interruptions"]) == (1, 0)


@pytest.mark.smoke
def test_flows_pass_results_to_the_next_task(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"part-{queue}", queue=queue)
    async def part(n: int) -> int:
        return n * 10

    @ls.job(f"sum-{queue}", queue=queue)
    async def add(*, ctx: Context) -> int:
        first: int = await ctx.input("1")
        rest = [entry.result for entry in await ctx.inputs() if entry.task != "1"]
        return int(first + sum(rest))

    running()
    flow = ls.sync.start_flow(fan_out([part.new(n=1), part.new(n=2)], then=add.new()))
    [last] = [task["id"] for task in ls.sync.flow_tasks(flow["id"]) if task["task"] == "then"]
    assert ls.sync.result(last, timeout=LIMIT) == 30


WORKER_PROGRAM = """
    import asyncio, logging
    from pathlib import Path
    from longshore import Context, Longshore

    logging.basicConfig(level="INFO")
    ls = Longshore()

    @ls.job("{kind}", queue="{queue}")
    async def job(*, ctx: Context) -> str:
        Path("started").touch()
        try:
            while not Path("may_end").exists():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            Path("reason").write_text(str(ctx.cancelled.reason))
            raise
        return "done"

    @ls.on_startup
    async def start() -> None:
        Path("hooks").write_text("start")

    @ls.on_shutdown
    def stop() -> None:
        Path("hooks").write_text("stop")

    if __name__ == "__main__":
        ls.work(grace={grace}, concurrency=2)
"""


def announce(ls: Longshore, kind: str, queue: str) -> Any:
    @ls.job(kind, queue=queue)
    async def job() -> str:
        return "not here"

    with ls.worker(queues=["nothing-here"]) as worker:
        assert worker.wait_until_registered(LIMIT)
    return job


def test_sigterm_lets_jobs_finish_and_leases_nothing_more(
    ls: Longshore, queue: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    kind = f"drain-{queue}"
    job = announce(ls, kind, queue)
    running = job.enqueue_sync()
    worker = program(WORKER_PROGRAM.format(kind=kind, queue=queue, grace=3600))
    eventually((tmp_path / "started").exists, "the job runs")
    worker.signal(signal.SIGTERM)
    eventually(lambda: b"draining" in worker.log.read_bytes(), "it drains")

    def heartbeat() -> str:
        [shown] = [entry for entry in ls.sync.workers() if entry["kinds"] == [kind] and entry["running"] == 1]
        return shown["heartbeat_at"]

    for _ in range(2):
        before = heartbeat()
        eventually(lambda before=before: heartbeat() > before, "heartbeats continue until the drain ends")  # type: ignore[misc]
    later = job.enqueue_sync()
    (tmp_path / "may_end").touch()
    assert running.result_sync(LIMIT) == "done"
    assert worker.wait() == 0
    assert running.get_sync()["attempts"] == 1
    assert (later.get_sync()["status"], later.get_sync()["lease_no"]) == ("queued", 0)
    assert (tmp_path / "hooks").read_text() == "stop"
    assert not (tmp_path / "reason").exists()


def test_jobs_that_outlast_the_grace_period_are_released_uncharged(
    ls: Longshore, queue: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    kind = f"grace-{queue}"
    job = announce(ls, kind, queue)
    handle = job.enqueue_sync()
    worker = program(WORKER_PROGRAM.format(kind=kind, queue=queue, grace=0.2))
    eventually((tmp_path / "started").exists, "the job runs")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert (tmp_path / "reason").read_text() == "shutdown"
    released = handle.get_sync()
    assert (released["status"], released["attempts"], released["interruptions"]) == ("queued", 0, 0)


def test_a_refused_worker_says_why(server: RunningServer, queue: str) -> None:
    app = Longshore(server.url)

    @app.job("x" * 200, queue=queue)
    async def long_name() -> None: ...

    worker = app.worker()
    with pytest.raises(LongshoreError, match="refuses this worker"):
        worker.run()


def test_a_worker_without_jobs_is_refused(server: RunningServer) -> None:
    with pytest.raises(LongshoreError, match=r"no job is registered.*import the modules"):
        Longshore(server.url).worker()
