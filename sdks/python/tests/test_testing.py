"""The testing module: jobs without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from longshore import (
    INJECTED,
    Conflict,
    Context,
    Fail,
    Flow,
    JobFailed,
    Longshore,
    NewJob,
    Retry,
    Snooze,
    SyncContext,
    ValidationError,
    Wait,
    testing,
)

from .conftest import LIMIT

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


@ls.job()
async def may_fail(n: int) -> int:
    if n < 0:
        raise Fail("no")
    return n


@ls.job()
def cancels_itself(ctx: SyncContext) -> None:
    assert ls.sync.cancel(ctx.id)["status"] == "pending"
    raise Retry(after=1)


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


@pytest.fixture(params=["server", "test queue"])
def either(request: pytest.FixtureRequest, queue: str) -> Iterator[tuple[Longshore, Any]]:
    """The same application with a real server and with a test queue: both have to behave alike."""
    app = Longshore("http://127.0.0.1:1")

    @app.job(f"number-{queue}", queue=queue)
    async def number(n: int) -> int:
        return n

    if request.param == "test queue":
        with testing.manual(app):
            yield app, number
        return
    app.configure(request.getfixturevalue("longshore_server"))
    with app.worker(queues=[f"nothing-{queue}"]) as worker:  # makes the kind known
        assert worker.wait_until_registered(LIMIT)
    yield app, number


def test_unique_modes_are_those_of_the_server(either: tuple[Longshore, Any], queue: str) -> None:
    app, number = either
    keyed: dict[str, Any] = {"unique_key": queue, "delay": 60}
    first = number.options(**keyed).enqueue_sync(n=1)

    def enqueue(n: int, mode: str) -> tuple[str, bool, Any, bool]:
        before = app.sync.get(first.id)["run_at"]
        again = number.options(unique_key=queue, unique_mode=mode, delay=3600).enqueue_sync(n=n)
        job = app.sync.get(first.id)
        return again.how, again.id == first.id, job["payload"], job["run_at"] == before

    assert enqueue(2, "dedupe") == ("existing", True, {"n": 1}, True)
    assert enqueue(3, "preserve_run_at") == ("replaced", True, {"n": 3}, True)
    assert enqueue(4, "replace") == ("replaced", True, {"n": 4}, False)


def test_invalid_jobs_are_refused_as_by_the_server(either: tuple[Longshore, Any]) -> None:
    app, number = either
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_attempts": 0}, "max_attempts"),
        ({"priority": 40_000}, "priority"),
        ({"delay": -1}, "delay_seconds"),
        ({"queue": "*"}, "queue"),
        ({"unique_key": ""}, "unique_key"),
        ({"tags": ["x" * 200]}, "tags"),
    ]
    for options, field in cases:
        with pytest.raises(ValidationError, match=field):
            number.options(**options).enqueue_sync(n=1)
    with pytest.raises(ValidationError, match="payload"):
        app.sync.enqueue(NewJob(number.name, {"n": "x"}))
    with pytest.raises(ValidationError, match=r"jobs\[1\]: max_attempts"):
        app.sync.enqueue_many([number.new(n=1), number.options(max_attempts=0).new(n=2)])


def test_finished_and_waiting_jobs_can_be_changed_as_on_the_server(either: tuple[Longshore, Any]) -> None:
    app, number = either
    id = number.options(delay=60).enqueue_sync(n=1).id
    assert app.sync.cancel(id) == {"status": "cancelled", "job_id": id}
    assert app.sync.get(id)["cancel_requested"] is True
    with pytest.raises(Conflict) as caught:
        app.sync.cancel(id)
    assert caught.value.job_status == "cancelled"
    again = app.sync.retry(id, payload={"n": 2}, priority=3)
    assert (again["status"], again["payload"], again["priority"]) == ("queued", {"n": 2}, 3)


def test_the_retry_policy_decides_when_the_next_attempt_starts() -> None:
    app = Longshore("http://127.0.0.1:1")

    @app.job()
    def breaks() -> None:
        raise ValueError

    policies: list[tuple[Any, list[float]]] = [
        (None, [1, 1]),
        ({"policy": "fixed", "delay_ms": 5_000}, [5, 5]),
        ({"policy": "list", "delays_ms": [1_000, 7_000]}, [1, 7]),
        ({"policy": "exponential", "cap_ms": 6_000}, [4, 6]),
        ({"policy": "none"}, []),
    ]
    for policy, delays in policies:
        with testing.manual(app) as queue:
            handle = breaks.options(max_attempts=3, retry=policy).enqueue_sync()
            entry = queue.get(handle.id)
            seen = []
            queue.run_pending()
            while entry.status == "retrying":
                seen.append((entry.run_at - queue.now).total_seconds())
                queue.advance(seen[-1])
                queue.run_pending()
            assert (entry.status, seen) == ("failed_permanent", delays), policy


def test_waiting_for_a_job_that_cannot_end_is_an_error_and_no_endless_loop() -> None:
    with testing.manual(ls) as queue:
        handle = flaky.enqueue_sync(until=2)
        with pytest.raises(AssertionError, match=r"is retrying and does not end while the clock stands still"):
            handle.result_sync()
        queue.advance(30)

        async def result() -> int:
            return await handle.result()

        assert asyncio.run(result()) == 2


def test_handlers_run_on_the_event_loop_that_waits_for_them() -> None:
    app = Longshore("http://127.0.0.1:1")
    loops: list[Any] = []

    @app.job()
    async def job() -> None:
        loops.append(asyncio.get_running_loop())

    async def wait() -> None:
        await (await job.enqueue()).result()
        loops.append(asyncio.get_running_loop())

    with testing.manual(app):
        asyncio.run(wait())
    assert loops[0] is loops[1], "what a test opens on its loop cannot be used on another one"


def test_callbacks_of_flows_run_once() -> None:
    for n, expected in ((2, ["success", "end"]), (-1, ["failure", "end"])):
        calls.clear()
        with testing.manual(ls) as queue:
            flow = Flow("f", idempotency_key="once").task("a", may_fail.new(n=n))
            flow.task("b", child.new(n=1), after_failure=["a"])
            flow.on_success(send_report.new(to="success")).on_failure(send_report.new(to="failure"))
            flow.on_end(send_report.new(to="end"))
            assert ls.sync.start_flow(flow)["id"] == ls.sync.start_flow(flow)["id"]
            queue.run_pending()
            queue.run_pending()
            assert [to for to, _ in calls] == expected


def test_a_running_job_that_is_cancelled_is_not_retried() -> None:
    with testing.manual(ls) as queue:
        handle = cancels_itself.enqueue_sync()
        queue.run_pending()
        job = handle.get_sync()
        assert (job["status"], job["cancel_requested"]) == ("cancelled", True)


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
