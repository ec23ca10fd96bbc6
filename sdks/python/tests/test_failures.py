"""What survives: killed workers, lost replies, and a server that cannot be reached."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longshore import Context, Longshore
from longshore._attempt import Attempt

from .conftest import ENGINES, LIMIT, Program, RunningServer, eventually, new_database, serving
from .fake_server import leased_job
from .proxy import Proxy

JOBS = 5_000
KILLS = 5

KILLED_WORKER = """
    import asyncio, os
    from longshore import Context, Longshore

    ls = Longshore()
    # One write per attempt that ends, with O_APPEND: a line is written completely or not at all.
    effects = os.open("effects.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @ls.job("{kind}", queue="{queue}")
    async def job(n: int, *, ctx: Context) -> int:
        await asyncio.sleep(0.002)
        os.write(effects, f"{{n}} {{ctx.lease_no}} {{os.getpid()}}\\n".encode())
        return n

    if __name__ == "__main__":
        ls.work(concurrency=20, stale_after=3.0)
"""


def announce(ls: Longshore, kind: str, queue: str) -> Any:
    @ls.job(kind, queue=queue)
    async def job(n: int) -> int:
        return -1

    with ls.worker(queues=["nothing-here"]) as worker:
        assert worker.wait_until_registered(LIMIT)
    return job


@pytest.mark.smoke
def test_five_kills_lose_nothing_and_settle_nothing_twice(
    server: RunningServer, ls: Longshore, queue: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    kind = f"killed-{queue}"
    job = announce(ls, kind, queue)
    ls.sync.enqueue_many(job.new(n=n) for n in range(JOBS))
    code = KILLED_WORKER.format(kind=kind, queue=queue)
    workers = [program(code) for _ in range(2)]
    effects = tmp_path / "effects.log"

    def have_ended(count: int, victim: Program) -> bool:
        """Whether more jobs than this have ended, some of them in the worker that is killed next."""
        assert victim.process is not None
        assert victim.process.poll() is None, victim.log.read_text()
        lines = effects.read_bytes().splitlines() if effects.exists() else []
        return len(lines) > count and any(line.endswith(b" %d" % victim.process.pid) for line in lines)

    for kill in range(1, KILLS + 1):
        victim = workers[kill % 2]
        is_time = functools.partial(have_ended, JOBS * kill // (KILLS + 2), victim)
        eventually(is_time, f"progress before kill {kill}", 10 * LIMIT)
        victim.signal(signal.SIGKILL)
        victim.wait()
        victim.start()

    def is_done() -> bool:
        waiting = ls.sync.list_jobs(queue=queue, status=["queued", "running", "retrying"], limit=1)
        return not waiting.jobs and waiting.cursor is None

    eventually(is_done, "all jobs end", 10 * LIMIT)
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    # Nothing is lost: every job has succeeded with its own result.
    seen = set()
    interruptions = 0
    for stored in ls.sync.jobs(queue=queue, limit=200):
        assert stored["status"] == "succeeded", stored
        assert stored["result"] == stored["payload"]["n"]
        assert stored["attempts"] == 1
        seen.add(stored["payload"]["n"])
        interruptions += stored["interruptions"]
    assert seen == set(range(JOBS))
    assert interruptions > 0, "no kill hit a running job"
    # Nothing is settled twice: a job ran again only if its worker was killed before the settle was stored.
    runs = collections.Counter(line.split()[0] for line in effects.read_text().splitlines())
    assert set(map(int, runs)) == set(range(JOBS))
    leases = {tuple(line.split()[:2]) for line in effects.read_text().splitlines()}
    assert len(leases) == sum(runs.values()), "an attempt ran twice with one lease"
    repeated = sum(count - 1 for count in runs.values())
    assert repeated <= KILLS * 600, f"{repeated} jobs were repeated"
    server.check()


def test_lost_replies_lose_no_job_and_repeat_no_job(server: RunningServer, queue: str) -> None:
    with Proxy(server.url) as proxy:
        ls = Longshore(proxy.url)
        runs: collections.Counter[int] = collections.Counter()

        @ls.job(f"cut-{queue}", queue=queue)
        async def job(n: int, *, ctx: Context) -> int:
            assert await ctx.step("once", lambda: n) == n
            runs[n] += 1
            return n

        with ls.worker(concurrency=10) as worker:
            assert worker.wait_until_registered(LIMIT)
            proxy.cut_every(4)
            ids = [entry.id for entry in ls.sync.enqueue_many(job.new(n=n) for n in range(300))]
            for id in ids:
                assert ls.sync.wait(id, timeout=LIMIT)["status"] == "succeeded"
            proxy.cut_every(0)
        assert proxy.cut > 10
        # A job whose lease was lost with the reply is released and runs once; a settle that was lost is repeated.
        assert set(runs) == set(range(300))
        assert sum(runs.values()) == 300
        assert all(stored["attempts"] == 1 for stored in ls.sync.jobs(queue=queue, limit=200))


def test_a_worker_without_contact_stops_its_handlers_and_continues_afterwards(
    server: RunningServer, queue: str
) -> None:
    with Proxy(server.url) as proxy:
        ls = Longshore(proxy.url)
        started = threading.Event()
        reasons: list[str | None] = []

        @ls.job(f"silent-{queue}", queue=queue)
        async def handler(*, ctx: Context) -> int:
            if not started.is_set():
                started.set()
                try:
                    await ctx.cancelled.wait_async()
                finally:
                    reasons.append(ctx.cancelled.reason)
            return ctx.lease_no

        with ls.worker(stale_after=3.0) as worker:
            assert worker.wait_until_registered(LIMIT)
            handle = Longshore(server.url).sync.enqueue(handler.new())
            assert started.wait(LIMIT)
            proxy.go_silent()
            eventually(lambda: reasons, "the handler is stopped")
            proxy.recover()
            assert Longshore(server.url).sync.result(handle.id, timeout=LIMIT) >= 2
        assert reasons == ["lease_lost"]


def test_handlers_stop_before_the_server_declares_their_worker_dead() -> None:
    app = Longshore("http://127.0.0.1:1")

    @app.job()
    async def work() -> None: ...

    exchange = app.worker(stale_after=3600)._exchange
    attempt = Attempt(leased_job("work"), work)
    exchange.hold(attempt)
    exchange._last_acknowledged = time.monotonic() - 0.74 * 3600
    exchange.check_contact()
    assert exchange.active
    exchange._last_acknowledged = time.monotonic() - 0.76 * 3600
    exchange.check_contact()
    assert not exchange.active
    assert attempt.is_lost
    assert attempt.cancellation.reason == "lease_lost"


def test_a_worker_that_was_declared_dead_registers_again(server: RunningServer, queue: str) -> None:
    with Proxy(server.url) as proxy:
        ls, direct = Longshore(proxy.url), Longshore(server.url)

        @ls.job(f"dead-{queue}", queue=queue)
        async def job() -> str:
            return "ran"

        with ls.worker(stale_after=3.0) as worker:
            assert worker.wait_until_registered(LIMIT)
            first = worker.id

            def is_dead() -> bool:
                [shown] = [entry for entry in direct.sync.workers() if entry["id"] == first]
                return shown["dead_at"] is not None

            # Without connections: the server keeps a worker alive while one of its calls waits.
            proxy.go_dark()
            eventually(is_dead, "the server declares the worker dead")
            proxy.recover()
            handle = direct.sync.enqueue(job.new())
            assert direct.sync.result(handle.id, timeout=LIMIT) == "ran"
            assert worker.id not in (None, first)


def test_random_disconnects_do_not_stop_a_worker(server: RunningServer, queue: str) -> None:
    with Proxy(server.url) as proxy:
        ls = Longshore(proxy.url)

        @ls.job(f"disconnects-{queue}", queue=queue)
        async def job(n: int) -> int:
            return n

        direct = Longshore(server.url)
        with ls.worker() as worker:
            assert worker.wait_until_registered(LIMIT)
            for round in range(10):
                ids = [entry.id for entry in direct.sync.enqueue_many(job.new(n=n) for n in range(20))]
                time.sleep(random.uniform(0, 0.02))
                proxy.disconnect()
                for id in ids:
                    assert direct.sync.wait(id, timeout=LIMIT)["status"] == "succeeded", round


@pytest.mark.smoke
@pytest.mark.parametrize("engine", ENGINES)
def test_a_restart_of_the_server_loses_no_job_and_repeats_no_job(engine: str, queue: str, tmp_path: Path) -> None:
    runs: collections.Counter[int] = collections.Counter()
    with contextlib.ExitStack() as stack:
        database = None if engine == "sqlite" else stack.enter_context(new_database())
        first = stack.enter_context(contextlib.ExitStack())
        proxy = stack.enter_context(Proxy(first.enter_context(serving(engine, tmp_path, database=database)).url))
        ls = Longshore(proxy.url)

        @ls.job(f"restart-{queue}", queue=queue)
        async def job(n: int) -> int:
            await asyncio.sleep(0.01)
            runs[n] += 1
            return n

        worker = stack.enter_context(ls.worker(concurrency=5))
        assert worker.wait_until_registered(LIMIT)
        ids = [entry.id for entry in ls.sync.enqueue_many(job.new(n=n) for n in range(300))]
        eventually(lambda: len(runs) > 50, "jobs run")
        first.close()  # stops the server, with jobs running and results on their way
        proxy.redirect(stack.enter_context(serving(engine, tmp_path, database=database)).url)
        assert [ls.sync.result(id, timeout=LIMIT) for id in ids] == list(range(300))
        assert all(stored["attempts"] == 1 for stored in ls.sync.jobs(queue=queue, limit=200))
        assert worker.id is not None
        worker.stop()
    assert sum(runs.values()) == 300


def test_a_locked_job_is_settled_later_and_delays_no_other(
    postgres_server: RunningServer, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    import psycopg

    ls = Longshore(postgres_server.url)
    is_locked = threading.Event()
    starts = collections.Counter[int]()

    @ls.job(f"locked-{queue}", queue=queue)
    def job(n: int) -> int:
        starts[n] += 1
        assert n > 0 or is_locked.wait(LIMIT)
        return n

    database_url = postgres_server.database_url
    with ls.worker(queues=[queue], concurrency=2) as worker, psycopg.connect(database_url) as other:
        assert worker.wait_until_registered(LIMIT)
        first = job.enqueue_sync(n=0)
        eventually(lambda: starts[0], "the first job runs")
        other.execute("select 1 from longshore.running where id = %s for update", [first.id])
        is_locked.set()
        eventually(lambda: "cannot store its end now" in caplog.text, "the end of the first job is refused")
        others = [job.enqueue_sync(n=n) for n in range(1, 5)]
        assert [handle.result_sync(LIMIT) for handle in others] == [1, 2, 3, 4]
        assert first.get_sync()["status"] == "running"
        other.rollback()
        assert first.result_sync(LIMIT) == 0
    assert first.get_sync()["attempts"] == 1
    assert starts[0] == 1
