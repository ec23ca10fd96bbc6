"""Handlers in processes of their own (`process=True`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longshore import JobFailed, Longshore, Worker
from longshore._process import _Child

from . import process_jobs
from .conftest import LIMIT, Program, RunningServer, eventually
from .fake_server import leased_job


@pytest.fixture
def app(server: RunningServer) -> Longshore:
    process_jobs.ls.configure(server.url)
    return process_jobs.ls


def test_a_process_runs_jobs_and_its_death_is_a_failed_attempt(
    app: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    running(app, queues=[queue])
    with_queue: dict[str, Any] = {"queue": queue, "max_attempts": 1}
    pid, double = process_jobs.doubles.options(**with_queue).enqueue_sync(n=4).result_sync(LIMIT)
    assert (double, pid == os.getpid()) == (8, False)
    with pytest.raises(JobFailed, match=r"killed by signal 9 \(SIGKILL\)"):
        process_jobs.dies.options(**with_queue).enqueue_sync().result_sync(LIMIT)
    with pytest.raises(JobFailed, match="ValueError: it broke"):
        process_jobs.breaks.options(**with_queue).enqueue_sync().result_sync(LIMIT)
    with pytest.raises(JobFailed, match="hopeless"):
        process_jobs.fails.options(**with_queue).enqueue_sync().result_sync(LIMIT)
    slow = process_jobs.waits.options(queue=queue, max_attempts=1, timeout=0.3).enqueue_sync()
    with pytest.raises(JobFailed, match="timed out"):
        slow.result_sync(LIMIT)
    assert process_jobs.steps.options(queue=queue).enqueue_sync().result_sync(LIMIT) == [1, [1, "done"]]


def test_every_way_to_end_an_attempt_works_in_a_process(
    app: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    running(app, queues=[queue])
    options: dict[str, Any] = {"queue": queue, "max_attempts": 2}
    assert process_jobs.snoozes.options(**options).enqueue_sync().result_sync(LIMIT) == 1
    assert process_jobs.retries.options(**options).enqueue_sync().result_sync(LIMIT) == 2
    no_json = process_jobs.returns_no_json.options(**options).enqueue_sync()
    with pytest.raises(JobFailed, match="the result is not JSON"):
        no_json.result_sync(LIMIT)
    assert no_json.get_sync()["attempts"] == 1, "no retry helps"
    too_much = process_jobs.reports_too_much.options(queue=queue, max_attempts=1).enqueue_sync()
    with pytest.raises(JobFailed, match="progress: 100002 bytes of JSON are too many"):
        too_much.result_sync(LIMIT)


def test_jobs_in_one_process_do_not_affect_one_another(
    app: Longshore, queue: str, running: Callable[..., Worker]
) -> None:
    running(app, queues=[queue], concurrency=1)
    jobs = [process_jobs.sets_context.options(queue=queue).enqueue_sync() for _ in range(3)]
    assert [job.result_sync(LIMIT) for job in jobs] == ["nothing"] * 3
    assert process_jobs.signals.options(queue=queue).enqueue_sync().result_sync(LIMIT) == -signal.SIGTERM


def test_a_cancel_that_comes_before_the_handler_starts_is_not_lost() -> None:
    child = _Child()
    try:
        # Both are there before the new process has imported the module of the handler.
        job = process_jobs.waits
        child.pipe.send(("run", job.__module__, job.__qualname__, job.name, leased_job(job.name)))
        child.pipe.send(("cancel", "cancel"))
        assert child.pipe.poll(LIMIT), "the handler does not stop"
        kind, error, _ = child.pipe.recv()
        assert kind == "raised"
        assert "cancel" in str(error)
    finally:
        child.kill()


def is_alive(path: Path) -> bool:
    """Whether the process that wrote its id to the file runs."""
    try:
        os.kill(int(path.read_text().split()[-1]), 0)
    except ProcessLookupError:
        return False
    return True


PROGRAM = """
    import sys
    sys.path.insert(0, {folder!r})
    from tests import process_jobs

    if __name__ == "__main__":
        process_jobs.ls.configure()
        process_jobs.ls.work(queues=[{queue!r}], kinds=["process_ignores"], grace=0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_handler_does_not_outlive_its_worker(
    app: Longshore, queue: str, program: Callable[..., Program], tmp_path: Path, number: int
) -> None:
    with app.worker(queues=[f"nothing-{queue}"]) as worker:
        assert worker.wait_until_registered(LIMIT)
    path = tmp_path / "alive"
    process_jobs.ignores.options(queue=queue).enqueue_sync(path=str(path))
    folder = str(Path(__file__).resolve().parent.parent)
    started = program(PROGRAM.format(folder=folder, queue=queue))
    eventually(lambda: path.exists() and path.read_text().count("\n") > 1, "the handler runs")
    assert is_alive(path)
    started.signal(number)
    started.wait()
    eventually(lambda: not is_alive(path), "the handler ends")
