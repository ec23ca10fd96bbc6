"""Durable steps, waits, children and events against a real server."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from longshore import Context, JobFailed, Longshore, Suspended, SyncContext, Wait, Worker
from longshore._attempt import Attempt
from longshore._backend import WorkerBackend

from .conftest import LIMIT, eventually
from .fake_server import leased_job


@dataclass
class Approval:
    by: str


def is_suspended(ls: Longshore, id: str) -> bool:
    return any(step["status"] == "waiting" for step in ls.sync.steps(id)) and ls.sync.get(id)["status"] == "queued"


@pytest.mark.smoke
def test_a_step_is_done_once_however_often_the_job_runs(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    # Not the number of the lease: a busy worker releases jobs that it cannot start, and leases them again.
    runs: collections.Counter[str] = collections.Counter()
    done: list[str] = []

    @ls.job(f"steps-{queue}", queue=queue, max_attempts=5, retry={"policy": "fixed", "delay_ms": 1})
    async def steps(*, ctx: Context) -> list[Any]:
        def charge() -> Approval:
            done.append("charge")
            return Approval("ada")

        async def ship() -> int:
            done.append("ship")
            return 7

        runs["async"] += 1
        receipt = await ctx.step("charge", charge)
        if runs["async"] == 1:
            raise RuntimeError("after charge")
        parcels = await ctx.step("ship", ship)
        if runs["async"] == 2:
            raise RuntimeError("after ship")
        return [receipt.by, parcels, runs["async"]]

    @ls.job(f"sync-steps-{queue}", queue=queue, max_attempts=5, retry={"policy": "fixed", "delay_ms": 1})
    def sync_steps(*, ctx: SyncContext) -> list[Any]:
        runs["sync"] += 1
        first = ctx.step("first", lambda: done.append("first") or 1)  # type: ignore[func-returns-value]
        if runs["sync"] == 1:
            raise RuntimeError("again")
        return [first, runs["sync"]]

    running()
    assert steps.enqueue_sync().result_sync(LIMIT) == ["ada", 7, 3]
    assert sync_steps.enqueue_sync().result_sync(LIMIT) == [1, 2]
    assert done == ["charge", "ship", "first"]


@pytest.mark.smoke
def test_a_sleep_occupies_no_worker(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    runs: collections.Counter[str] = collections.Counter()

    @ls.job(f"sleeps-{queue}", queue=queue)
    async def sleeps(*, ctx: Context) -> int:
        runs["async"] += 1
        await ctx.sleep("nap", 0.3)
        return runs["async"]

    @ls.job(f"sync-sleeps-{queue}", queue=queue)
    def sync_sleeps(*, ctx: SyncContext) -> int:
        runs["sync"] += 1
        try:
            ctx.sleep("nap", 0.3)
        except Exception:
            return -1
        return runs["sync"]

    worker = running(concurrency=1)
    handles = [sleeps.enqueue_sync(), sync_sleeps.enqueue_sync()]
    assert [handle.result_sync(LIMIT) for handle in handles] == [2, 2]
    assert [handle.get_sync()["attempts"] for handle in handles] == [1, 1]
    assert not worker._exchange.active


def test_except_exception_does_not_swallow_a_suspension(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    seen: list[str] = []

    @ls.job(f"swallows-{queue}", queue=queue)
    async def swallows(*, ctx: Context) -> None:
        seen.append("run")
        try:
            await ctx.sleep("nap", 0.1)
        except Exception:
            seen.append("swallowed")

    running()
    swallows.enqueue_sync().result_sync(LIMIT)
    assert seen == ["run", "run"]


@pytest.mark.smoke
def test_a_job_waits_for_an_event(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"approve-{queue}", queue=queue)
    async def approve(*, ctx: Context) -> str:
        approval = await ctx.event(f"approved:{queue}", within=60, type=Approval)
        return "nobody" if approval is None else approval.by

    @ls.job(f"ignored-{queue}", queue=queue)
    def ignored(*, ctx: SyncContext) -> Any:
        return ctx.event(f"never:{queue}", within=0.1)

    running()
    handle = approve.enqueue_sync()
    eventually(lambda: is_suspended(ls, handle.id), "the job is suspended")
    ls.sync.emit(f"approved:{queue}", {"by": "ada"})
    assert handle.result_sync(LIMIT) == "ada"
    assert ignored.enqueue_sync().result_sync(LIMIT) is None


def test_the_first_of_several_waits_is_stored(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"any-{queue}", queue=queue)
    async def decide(number: int, *, ctx: Context) -> list[Any]:
        waits = [Wait.event(f"yes:{queue}:{number}"), Wait.event(f"no:{queue}:{number}"), Wait.sleep(0.2)]
        first = await ctx.any("decision", waits)
        return [first.index, first.event, first.payload]

    running()
    ls.sync.emit(f"no:{queue}:1", 7)
    assert decide.enqueue_sync(number=1).result_sync(LIMIT) == [1, f"no:{queue}:1", 7]
    assert decide.enqueue_sync(number=2).result_sync(LIMIT) == [2, None, None]


def test_steps_of_concurrent_tasks_are_found_by_name_and_not_cut_short(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    done: list[str] = []

    @ls.job(f"parallel-{queue}", queue=queue)
    async def parallel(*, ctx: Context) -> list[Any]:
        async def work(name: str) -> str:
            await asyncio.sleep(0.1)
            done.append(name)
            return name

        async def branch(name: str) -> str:
            first = await ctx.step(f"{name} 1", lambda: work(f"{name} 1"))
            await ctx.sleep(f"{name} nap", 0.1)
            return first + await ctx.step(f"{name} 2", lambda: work("!"))

        # The nap does not suspend the job while the steps of the other branches are in progress.
        async def napper() -> str:
            await ctx.sleep("short nap", 0.05)
            return "rested"

        results = await asyncio.gather(napper(), branch("a"), branch("b"))
        return [*results, ctx.lease_no]

    running()
    result = parallel.enqueue_sync().result_sync(LIMIT)
    assert result[:3] == ["rested", "a 1!", "b 1!"]
    assert sorted(done) == ["!", "!", "a 1", "b 1"]


def test_a_name_that_is_used_twice_fails_the_job(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"twice-{queue}", queue=queue)
    async def twice(*, ctx: Context) -> None:
        await ctx.step("same", lambda: 1)
        await ctx.step("same", lambda: 2)

    running()
    with pytest.raises(JobFailed, match="step `same`: the name is used twice"):
        twice.enqueue_sync().result_sync(LIMIT)


@pytest.mark.smoke
def test_children_are_spawned_once_and_joined(ls: Longshore, queue: str, running: Callable[..., Worker]) -> None:
    @ls.job(f"parcel-{queue}", queue=queue, max_attempts=1)
    async def parcel(n: int) -> int:
        if n == 3:
            raise RuntimeError("lost at sea")
        return n * n

    @ls.job(f"order-{queue}", queue=queue, retry={"policy": "fixed", "delay_ms": 1})
    async def order(*, ctx: Context) -> list[Any]:
        await ctx.spawn("parcels", [parcel.new(n=n) for n in range(5)])
        if ctx.attempt == 1 and ctx.lease_no == 1:
            raise RuntimeError("after the spawn")
        children = await ctx.join("shipped")
        return [len(children), sorted(child.result for child in children if child.result is not None)] + [
            child.outcome for child in children.failed
        ]

    @ls.job(f"sync-order-{queue}", queue=queue)
    def sync_order(*, ctx: SyncContext) -> list[Any]:
        ctx.spawn("parcels", [parcel.new(n=n) for n in range(3)])
        return sorted(ctx.join("shipped").results())

    running()
    assert order.enqueue_sync().result_sync(LIMIT) == [5, [0, 1, 4, 16], "failed_permanent"]
    assert sync_order.enqueue_sync().result_sync(LIMIT) == [0, 1, 4]
    assert len(ls.sync.list_jobs(kind=parcel.name).jobs) == 8


def test_a_join_cuts_no_step_of_a_concurrent_task_short(
    ls: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    runs: list[int] = []
    charging, charged, child_may_end = threading.Event(), threading.Event(), threading.Event()

    @ls.job(f"slow-child-{queue}", queue=queue)
    async def child() -> int:
        assert await asyncio.to_thread(child_may_end.wait, LIMIT)
        return 7

    @ls.job(f"joins-{queue}", queue=queue)
    async def parent(*, ctx: Context) -> list[Any]:
        async def charge() -> str:
            runs.append(ctx.lease_no)
            charging.set()
            await asyncio.sleep(0.2)  # time for a join that does not wait for this step
            charged.set()
            return "charged"

        await ctx.spawn("children", [child.new()])
        children, result = await asyncio.gather(ctx.join("all"), ctx.step("charge", charge))
        return [children.results(), result]

    running()
    handle = parent.enqueue_sync()
    assert charging.wait(LIMIT)
    eventually(lambda: charged.is_set() or handle.get_sync()["status"] != "running", "the step ends or is cut short")
    child_may_end.set()
    assert handle.result_sync(LIMIT) == [[7], "charged"]
    assert len(runs) == 1, "the step was done again, because the first time was not stored"


def test_no_step_starts_while_the_job_is_being_suspended() -> None:
    app = Longshore("http://127.0.0.1:1")

    @app.job()
    async def work(*, ctx: Context) -> None: ...

    suspension: Future[Any] = Future()
    called = asyncio.Event()

    class Suspending(WorkerBackend):
        def wait(self, attempt: Attempt, waits: list[dict[str, Any]]) -> Future[Any]:
            called.set()
            return suspension

    done: list[int] = []

    async def run() -> list[Any]:
        attempt = Attempt(leased_job("work"), work)
        context = Context(app, attempt, Suspending(app.worker()._exchange))
        sleep = asyncio.create_task(context.sleep("nap", 60))
        await called.wait()
        step = asyncio.create_task(context.step("charge", lambda: done.append(1)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert done == [], "the step would be repeated after the nap"
        suspension.set_exception(Suspended())
        return list(await asyncio.gather(sleep, step, return_exceptions=True))

    assert [type(end) for end in asyncio.run(run())] == [Suspended, Suspended]
    assert done == []
