"""The client against a real server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from longshore import (
    Conflict,
    Flow,
    JobFailed,
    Longshore,
    LongshoreError,
    NewJob,
    NotFound,
    RateLimited,
    Unavailable,
    ValidationError,
    WaitTimeout,
    _ids,
    chain,
    fan_out,
    new_id,
)
from longshore._http import Connection, Request

from .conftest import LIMIT, RunningServer, eventually, serving
from .proxy import Proxy


@pytest.fixture
def kind(ls: Longshore, queue: str) -> str:
    """A kind that the server knows, in a queue of its own, without a worker."""
    name = f"kind-{queue}"
    worker_ls = Longshore(ls.server)

    @worker_ls.job(name, queue=queue)
    async def handler(n: int = 0) -> int:
        return n

    with worker_ls.worker() as worker:
        assert worker.wait_until_registered(LIMIT)
    return name


@pytest.mark.smoke
def test_every_option_reaches_the_server(ls: Longshore, kind: str, queue: str) -> None:
    run_at = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    job = NewJob(kind, {"n": 7}).with_options(
        queue=queue,
        priority=5,
        max_attempts=9,
        timeout=timedelta(seconds=42),
        run_at=run_at,
        idempotency_key=f"idem-{queue}",
        unique_key=f"unique-{queue}",
        tags=["t1", "t2"],
        flags=["f1"],
        group="acme",
        context="because",
        metadata={"m": 1},
        retry={"policy": "fixed", "delay_ms": 1234},
    )
    enqueued = ls.sync.enqueue(job)
    stored = ls.sync.get(enqueued.id)
    assert enqueued.how == "created"
    assert stored["payload"] == {"n": 7}
    assert (stored["queue"], stored["priority"], stored["max_attempts"]) == (queue, 5, 9)
    assert stored["timeout_seconds"] == 42
    assert datetime.fromisoformat(stored["run_at"].replace("Z", "+00:00")) == run_at
    assert (stored["idempotency_key"], stored["unique_key"]) == (f"idem-{queue}", f"unique-{queue}")
    assert (stored["tags"], stored["flags"], stored["group"]) == (["t1", "t2"], ["f1"], "acme")
    assert (stored["context"], stored["metadata"]) == ("because", {"m": 1})
    assert stored["retry"] == {"policy": "fixed", "delay_ms": 1234}
    assert ls.sync.enqueue(job).how == "existing"


@pytest.mark.smoke
def test_an_id_can_be_enqueued_twice_and_makes_one_job(ls: Longshore, kind: str, queue: str) -> None:
    job = NewJob(kind, {"n": 1}, {"id": new_id(), "queue": queue})
    assert ls.sync.enqueue(job).id == ls.sync.enqueue(job).id
    assert len(ls.sync.list_jobs(queue=queue).jobs) == 1


@pytest.mark.smoke
def test_lists_are_followed_to_their_end(ls: Longshore, kind: str, queue: str) -> None:
    enqueued = ls.sync.enqueue_many(NewJob(kind, {"n": n}, {"queue": queue}) for n in range(25))
    listed = list(ls.sync.jobs(queue=queue, limit=10))
    assert [job["id"] for job in listed] == sorted((entry.id for entry in enqueued), reverse=True)

    async def all_async() -> int:
        return len([job async for job in ls.jobs(queue=queue, limit=10)])

    assert asyncio.run(all_async()) == 25


def test_a_refused_item_of_a_batch_is_named(ls: Longshore, kind: str, queue: str) -> None:
    jobs = [NewJob(kind, {"n": 1}, {"queue": queue}), NewJob("no-such-kind", {})]
    with pytest.raises(ValidationError, match=r"jobs\[1\]: kind: `no-such-kind`"):
        ls.sync.enqueue_many(jobs)


def test_large_batches_are_sent_in_parts(ls: Longshore, kind: str, queue: str) -> None:
    jobs = [NewJob(kind, {"n": n}, {"queue": queue, "metadata": "x" * 60_000, "tags": ["big"]}) for n in range(300)]
    enqueued = ls.sync.enqueue_many(jobs)
    assert len({entry.id for entry in enqueued}) == 300
    listed = ls.sync.jobs(queue=queue, limit=200)
    assert sorted(job["payload"]["n"] for job in listed) == list(range(300))


def test_errors_have_the_slug_of_the_server(ls: Longshore, kind: str, queue: str) -> None:
    with pytest.raises(NotFound) as missing:
        ls.sync.get(new_id())
    assert (missing.value.slug, missing.value.status) == ("not_found", 404)
    id = ls.sync.enqueue(NewJob(kind, {}, {"queue": queue})).id
    with pytest.raises(Conflict) as conflict:
        ls.sync.delete(id)
    assert conflict.value.job_status == "queued"
    with pytest.raises(ValidationError):
        ls.sync.enqueue(NewJob(kind, {"n": "not a number"}))


@pytest.mark.smoke
def test_a_job_is_cancelled_retried_explained_and_deleted(ls: Longshore, kind: str, queue: str) -> None:
    id = ls.sync.enqueue(NewJob(kind, {}, {"queue": queue})).id
    assert ls.sync.explain(id)["reason"].startswith("no_worker")
    assert ls.sync.cancel(id)["status"] == "cancelled"
    with pytest.raises(JobFailed) as failed:
        ls.sync.result(id, timeout=LIMIT)
    assert failed.value.job_status == "cancelled"
    assert ls.sync.retry(id, payload={"n": 3})["payload"] == {"n": 3}
    ls.sync.cancel(id)
    ls.sync.delete(id)
    with pytest.raises(NotFound):
        ls.sync.get(id)


def test_a_wait_ends_at_its_timeout(ls: Longshore, kind: str, queue: str) -> None:
    id = ls.sync.enqueue(NewJob(kind, {}, {"queue": queue})).id
    with pytest.raises(WaitTimeout):
        ls.sync.result(id, timeout=0.2)
    with pytest.raises(TimeoutError):
        asyncio.run(ls.result(id, timeout=0.2))


@pytest.mark.smoke
def test_queues_and_schedules_can_be_changed(ls: Longshore, kind: str, queue: str) -> None:
    assert ls.sync.pause_queue(queue)["paused"]
    assert not ls.sync.resume_queue(queue)["paused"]
    assert any(entry["name"] == queue for entry in ls.sync.queues())
    name = f"nightly-{queue}"
    put = ls.sync.put_schedule(name, "30 2 * * *", NewJob(kind, {"n": 1}), zone="Europe/Berlin", missed="one")
    assert (put["cron"], put["zone"], put["missed"]) == ("30 2 * * *", "Europe/Berlin", "one")
    assert any(entry["name"] == name for entry in ls.sync.schedules())
    ls.sync.delete_schedule(name)
    assert all(entry["name"] != name for entry in ls.sync.schedules())


def test_the_first_event_with_a_name_wins(ls: Longshore, queue: str) -> None:
    assert ls.sync.emit(f"e-{queue}", {"by": "ada"})["payload"] == {"by": "ada"}
    assert ls.sync.emit(f"e-{queue}", {"by": "bob"})["payload"] == {"by": "ada"}


@pytest.mark.smoke
def test_flows_are_started_and_cancelled(ls: Longshore, kind: str, queue: str) -> None:
    def job(n: int) -> NewJob:
        return NewJob(kind, {"n": n}, {"queue": queue})

    flow = ls.sync.start_flow(
        Flow("import", idempotency_key=f"flow-{queue}", deadline=3600)
        .task("fetch", job(1))
        .task("parse", job(2), after=["fetch"])
        .task("clean", job(3), after_end=["parse"])
        .task("alert", job(4), after_failure=["parse"])
        .on_failure(job(5))
        .on_end(job(6))
    )
    assert (flow["members"], flow["status"]) == (4, "running")
    links = {task["task"]: [link["condition"] for link in task["after"]] for task in ls.sync.flow_tasks(flow["id"])}
    assert links == {"fetch": [], "parse": ["succeeded"], "clean": ["ended"], "alert": ["failed"]}
    assert ls.sync.cancel_flow(flow["id"])["cancelled"] == 4
    assert ls.sync.get_flow(flow["id"])["cancelled"]
    assert ls.sync.start_flow(chain(job(1), job(2)))["members"] == 2
    assert ls.sync.start_flow(fan_out([job(1), job(2)], then=job(3)))["members"] == 3
    grown = ls.sync.start_flow(Flow("open", sealed=False))
    assert ls.sync.add_to_flow(grown["id"], [job(1), job(2)])["members"] == 2
    assert ls.sync.seal_flow(grown["id"])["sealed"]


def test_a_lost_reply_does_not_create_a_second_job(server: RunningServer, kind: str, queue: str) -> None:
    with Proxy(server.url) as proxy:
        ls = Longshore(proxy.url)
        ls.sync.health()
        for lost in range(1, 6):
            proxy.cut_replies(1)
            ls.sync.enqueue(NewJob(kind, {"n": lost}, {"queue": queue}))
        assert proxy.cut == 5

        async def enqueue_async() -> None:
            for n in range(5):
                proxy.cut_replies(1)
                await ls.enqueue(NewJob(kind, {"n": 10 + n}, {"queue": queue}))

        asyncio.run(enqueue_async())
        proxy.cut_replies(1)
        ls.sync.enqueue_many(NewJob(kind, {"n": 100 + n}, {"queue": queue}) for n in range(10))
        assert proxy.cut == 11
    stored = sorted(job["payload"]["n"] for job in Longshore(server.url).sync.jobs(queue=queue))
    assert stored == [1, 2, 3, 4, 5, 10, 11, 12, 13, 14, *range(100, 110)]


def test_a_connection_that_was_closed_meanwhile_is_not_used(server: RunningServer, kind: str, queue: str) -> None:
    with Proxy(server.url) as proxy:
        ls = Longshore(proxy.url)
        id = ls.sync.enqueue(NewJob(kind, {}, {"queue": queue})).id
        proxy.disconnect()
        [connection] = ls._pool._idle
        eventually(connection._is_stale, "the end of the connection arrives")
        # A cancel is not repeated after a lost reply, so it must not be sent on a connection that is gone.
        assert ls.sync.cancel(id)["status"] == "cancelled"


def test_an_unreachable_server_is_named_after_the_deadline() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # without `listen`: the port refuses connections, and nobody else gets it
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ls = Longshore(url, retry_for=0.2)
        with pytest.raises(Unavailable, match=f"{url} cannot be reached"):
            ls.sync.health()
        with pytest.raises(Unavailable, match="cannot be reached"):
            asyncio.run(ls.health())


def test_a_rate_limit_is_waited_for(tmp_path: Path) -> None:
    # One request per second, so that a hundred exceed it on any machine.
    with serving("sqlite", tmp_path, "--rate-limit", "1", "--allow-unknown-kinds") as limited:
        ls = Longshore(limited.url, retry_for=LIMIT)
        for n in range(4):
            ls.sync.enqueue(NewJob("limited", {"n": n}))
        assert sorted(job["payload"]["n"] for job in ls.sync.jobs(limit=200)) == list(range(4))
        impatient = Longshore(limited.url, retry_for=0.0)
        with pytest.raises(RateLimited) as refused:  # noqa: PT012
            for _ in range(100):
                impatient.sync.queues()
        assert refused.value.status == 429


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_opens_its_own_connections(ls: Longshore, kind: str, queue: str) -> None:
    """As servers do that load the application before they fork."""
    ls.sync.health()
    children = []
    for n in range(3):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(20):
                    ls.sync.enqueue(NewJob(kind, {"n": n}, {"queue": queue}))
            finally:
                os._exit(0)
        children.append(child)
    for _ in range(20):
        ls.sync.enqueue(NewJob(kind, {"n": 3}, {"queue": queue}))
    for child in children:
        os.waitpid(child, 0)
    assert len(list(ls.sync.jobs(queue=queue, limit=200))) == 80


def test_a_process_that_was_forked_during_an_enqueue_makes_ids() -> None:
    with _ids._lock:  # as another thread would hold it
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if new_id() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_connections_of_closed_event_loops_are_closed(server: RunningServer, kind: str, queue: str) -> None:
    with Proxy(server.url) as proxy:
        ls = Longshore(proxy.url)
        for _ in range(10):
            asyncio.run(ls.enqueue(NewJob(kind, {}, {"queue": queue})))
        # The connection of the last loop is closed when another loop is used.
        eventually(lambda: proxy.open <= 1, "the others are closed")


def test_a_job_that_is_too_large_is_refused_at_once(ls: Longshore, kind: str, queue: str) -> None:
    for payload in ("x" * (2 << 20), "x" * (20 << 20)):
        with pytest.raises(ValidationError, match="bytes of JSON exceed the limit"):
            ls.sync.enqueue(NewJob(kind, payload))
    with pytest.raises(ValidationError, match=r"jobs\[1\]: .* exceed the limit"):
        ls.sync.enqueue_many([NewJob(kind, {}), NewJob(kind, "x" * (20 << 20))])
    with pytest.raises(ValidationError, match=f"job `{kind}`: its payload and options are not JSON"):
        ls.sync.enqueue(NewJob(kind, {}, {"metadata": object()}))
    flow = Flow("large")
    for _ in range(20):
        flow.task(None, NewJob(kind, "x" * (1 << 20)))
    with pytest.raises(ValidationError, match=r"/flows: .* exceed the limit of 16777216"):
        asyncio.run(ls.start_flow(flow))
    # A reply that comes before the request is complete is read.
    reply = Connection(ls._server).send(Request("POST", "/jobs", b"x" * (20 << 20)))
    assert reply.status == 413


def test_the_address_and_the_token_are_checked() -> None:
    assert Longshore("http://x", "secret\n")._server.headers["authorization"] == "Bearer secret"
    with pytest.raises(LongshoreError, match="token: it contains a character"):
        Longshore("http://x", "se\ncret")
    with pytest.raises(LongshoreError, match="server: `http://x:port`"):
        Longshore("http://x:port")


def test_threads_and_loops_share_a_client(ls: Longshore, kind: str, queue: str) -> None:
    def in_thread() -> None:
        for n in range(10):
            ls.sync.enqueue(NewJob(kind, {"n": n}, {"queue": queue}))

    async def in_loop() -> None:
        await asyncio.gather(*(ls.enqueue(NewJob(kind, {"n": n}, {"queue": queue})) for n in range(50)))

    threads = [threading.Thread(target=in_thread) for _ in range(5)]
    for thread in threads:
        thread.start()
    asyncio.run(in_loop())
    for thread in threads:
        thread.join()
    assert len(list(ls.sync.jobs(queue=queue, limit=200))) == 100


def test_ids_are_version_7_and_ascending() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    assert all(id[14] == "7" and id[19] in "89ab" for id in ids)
