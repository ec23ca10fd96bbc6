"""The testing module: jobs without a server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from longshore import (
    INJECTED,
    Context,
    Fail,
    Flow,
    JobFailed,
    Longshore,
    Retry,
    Snooze,
    SyncContext,
    Wait,
    testing,
)

ls = Longshore("http://127.0.0.1:1", retry_for=0)
calls: list[Any] = []


@dataclass
class Item:
    name: str


@ls.job(queue="mail", max_attempts=3)
async def send_report(to: str, item: Item | None = None, *, ctx: Context = INJECTED) -> str:
    calls.append((to, item))
    return f"sent to {to}"


@ls.job()
def flaky(until: int, ctx: SyncContext = INJECTED) -> int:
    if ctx.attempt < until:
        raise Retry(after=30)
    return ctx.attempt


@ls.job()
async def nested(n: int) -> None:
    calls.append(n)
    if n:
        await nested.enqueue(n=n - 1)


@ls.job()
async def approval(number: int, *, ctx: Context) -> str:
    await ctx.step("ask", lambda: calls.append("asked"))
    answer = await ctx.event(f"approved:{number}", within=timedelta(days=3))
    if answer is None:
        raise Fail("nobody approved")
    await ctx.sleep("cooling-off", 3600)
    await ctx.step("pay", lambda: calls.append("paid"))
    return f"approved by {answer}"


@ls.job()
async def child(n: int) -> int:
    return n * n


@ls.job()
async def parent(*, ctx: Context) -> list[int]:
    await ctx.spawn("children", [child.new(n=n) for n in range(3)])
    results: list[int] = (await ctx.join("done")).results()
    return results


@ls.job()
def first_of(*, ctx: SyncContext) -> int:
    return ctx.any("first", [Wait.event("never"), Wait.sleep(10)]).index


@ls.job()
def later(*, ctx: SyncContext) -> str:
    if ctx.lease_no == 1:
        raise Snooze(60)
    ctx.enqueue(child.new(n=3))
    return "done"


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def test_manual_mode_keeps_jobs_until_they_are_run() -> None:
    with testing.manual(ls) as queue:
        handle = send_report.enqueue_sync(to="ada@example.com", item=Item("ship"))
        assert calls == []
        queue.assert_enqueued(send_report, to="ada@example.com")
        queue.assert_enqueued(send_report, item=Item("ship"))
        queue.assert_not_enqueued(flaky)
        with pytest.raises(
            AssertionError, match=r'no job `send_report` with {"to": "bob"} was enqueued; found: {"to"'
        ):
            queue.assert_enqueued(send_report, to="bob")
        assert queue.run_pending() == 1
        assert calls == [("ada@example.com", Item("ship"))]
        assert handle.result_sync() == "sent to ada@example.com"


def test_inline_mode_runs_jobs_at_once_in_threads_and_loops() -> None:
    with testing.inline(ls):
        assert send_report.enqueue_sync(to="ada").result_sync() == "sent to ada"

        async def enqueue() -> str:
            return await (await send_report.enqueue(to="bob")).result()

        assert asyncio.run(enqueue()) == "sent to bob"
        assert [to for to, _ in calls] == ["ada", "bob"]


def test_a_job_that_enqueues_another_one_works_in_both_modes() -> None:
    for mode in (testing.inline, testing.manual):
        calls.clear()
        with mode(ls) as queue:
            nested.enqueue_sync(n=2)
            queue.run_pending()
            assert calls == [2, 1, 0]


def test_payloads_are_converted_to_json_and_back() -> None:
    with testing.manual(ls) as queue:
        entry = queue.get(send_report.enqueue_sync(to="ada", item=Item("x")).id)
        assert entry.payload == {"to": "ada", "item": {"name": "x"}}
        entry.payload["item"] = 7
        queue.run_pending()
        assert (entry.status, entry.last_error) == ("failed_permanent", "payload.item: expected object, got integer")


def test_retries_and_snoozes_follow_the_clock() -> None:
    with testing.manual(ls) as queue:
        handle, snoozed = flaky.enqueue_sync(until=2), later.enqueue_sync()
        queue.run_pending()
        assert (queue.get(handle.id).status, queue.get(snoozed.id).status) == ("retrying", "queued")
        queue.advance(30)
        queue.run_pending()
        assert handle.result_sync() == 2
        queue.advance(timedelta(seconds=30))
        queue.run_pending()
        assert snoozed.result_sync() == "done"
        queue.assert_enqueued(child, n=3)
        hopeless = flaky.enqueue_sync(until=9)
        queue.run_to_end()
        with pytest.raises(JobFailed):
            hopeless.result_sync()


def test_steps_events_and_sleeps_work_with_the_clock() -> None:
    with testing.manual(ls) as queue:
        approved, ignored = approval.enqueue_sync(number=1), approval.enqueue_sync(number=2)
        queue.run_pending()
        queue.emit("approved:1", "ada")
        queue.run_pending()
        assert calls == ["asked", "asked"]
        queue.advance(3600)
        queue.run_pending()
        assert approved.result_sync() == "approved by ada"
        assert calls == ["asked", "asked", "paid"]
        queue.advance(timedelta(days=3))
        queue.run_pending()
        assert queue.get(ignored.id).last_error == "nobody approved"
        waits = first_of.enqueue_sync()
        queue.run_to_end()
        assert waits.result_sync() == 1


def test_children_are_joined() -> None:
    with testing.manual(ls) as queue:
        handle = parent.enqueue_sync()
        queue.run_pending()
        assert handle.result_sync() == [0, 1, 4]


def test_flows_run_in_order_and_skip_what_cannot_start() -> None:
    with testing.manual(ls) as queue:
        ls.sync.start_flow(
            Flow("f")
            .task("a", child.new(n=2))
            .task("b", send_report.new(to="after a"), after=["a"])
            .task("c", send_report.new(to="never"), after_failure=["a"])
        )
        queue.run_pending()
        assert [to for to, _ in calls] == ["after a"]
        assert [job.status for job in queue.jobs] == ["succeeded", "succeeded", "cancelled"]


def test_keys_work_as_on_the_server() -> None:
    with testing.manual(ls) as queue:
        first = send_report.options(unique_key="k").enqueue_sync(to="a")
        assert send_report.options(unique_key="k").enqueue_sync(to="b").id == first.id
        queue.run_pending()
        assert send_report.options(unique_key="k").enqueue_sync(to="c").how == "created"
        keyed = send_report.options(idempotency_key="i").enqueue_sync(to="d")
        queue.run_pending()
        assert send_report.options(idempotency_key="i").enqueue_sync(to="e").id == keyed.id


def test_enqueue_in_needs_no_database() -> None:
    class Connection:
        def cursor(self) -> None: ...

    with testing.manual(ls) as queue:
        send_report.enqueue_in(Connection(), to="ada")
        queue.assert_enqueued(send_report, to="ada")


def test_the_server_is_used_again_afterwards() -> None:
    with testing.manual(ls):
        assert ls.interception is not None
    assert ls.interception is None


def test_the_fixture_starts_a_server(longshore_server: str) -> None:
    assert Longshore(longshore_server).sync.health() == {"status": "ok"}
