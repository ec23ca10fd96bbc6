"""Drains BENCH_JOBS tasks that do nothing with one Celery process, and prints tasks per second."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from celery import Celery

JOBS = int(os.environ["BENCH_JOBS"])
app = Celery("celery_peer", broker=os.environ["BENCH_REDIS"])
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=200,
    worker_hijack_root_logger=False,
    task_default_queue="bench",
    worker_send_task_events=False,
)
done = 0
started = 0.0


@app.task(name="bench")
def bench(to: str, template: str, n: int) -> None:
    global done, started
    if done == 0:
        started = time.perf_counter()
    done += 1
    if done == JOBS:
        Path(os.environ["BENCH_RESULT"]).write_text(str(JOBS / (time.perf_counter() - started)))


def main() -> None:
    app.control.purge()
    with app.producer_pool.acquire(block=True) as producer:
        for n in range(JOBS):
            bench.apply_async((), {"to": "somebody@example.com", "template": "welcome", "n": n}, producer=producer)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        command = [sys.executable, "-m", "celery", "-A", "celery_peer", "worker", "--pool=solo", "--without-gossip",
                   "--without-mingle", "--without-heartbeat", "--loglevel=error"]
        worker = subprocess.Popen(
            command,
            cwd=Path(__file__).parent,
            env={**os.environ, "BENCH_RESULT": str(result)},
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 200
        while not result.exists() or not result.read_text():
            if worker.poll() is not None or time.monotonic() > deadline:
                sys.exit("the worker did not finish")
            time.sleep(0.05)
        print(result.read_text())
        worker.terminate()
        worker.wait(20)


if __name__ == "__main__":
    main()
