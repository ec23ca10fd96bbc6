"""The order example, killed at every step boundary."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from longshore import Longshore
from longshore._http import Connection, Request, Server

from .conftest import LIMIT, RunningServer, clean_environment

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "order.py"
#: charge, ten parcels, notify
REQUESTS = 12
#: charge, the approval, the spawn, the join, notify
STEPS = 5


@contextlib.contextmanager
def order(server: RunningServer, folder: Path, number: int) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), str(folder), str(number)],
            stdout=log,
            stderr=log,
            env=clean_environment(LONGSHORE_SERVER=server.url),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def sign_off(server: RunningServer, pid: int) -> None:
    """Releases the leases of the killed program, which the server would do some seconds later."""
    for worker in Longshore(server.url).sync.workers():
        if worker["pid"] == pid and worker["dead_at"] is None:
            Connection(Server(server.url, None)).send(Request("DELETE", f"/leases/{worker['id']}"))


def run_killed(server: RunningServer, folder: Path, number: int, is_time: Callable[[], bool]) -> None:
    """Kills the program at one moment, starts it again, and checks that the order is complete."""
    log = folder / "log"
    with order(server, folder, number) as process:
        deadline = time.monotonic() + LIMIT
        while process.poll() is None and not is_time():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.002)
    sign_off(server, process.pid)
    with order(server, folder, number) as process:
        assert process.wait(3 * LIMIT) == 0, log.read_text()
    text = log.read_text()
    assert f"result: charge-{number}, approved by ada, 10 parcels" in text
    expected = {f"charge-{number}", f"notify-{number}", *(f"parcel-{n}-{number}" for n in range(10))}
    assert {path.name for path in folder.iterdir()} - {"log"} == expected
    # Only the request that was killed before it was stored may be repeated.
    requests = [line for line in text.splitlines() if line in expected]
    assert len(requests) <= len(expected) + 10
    assert requests.count(f"charge-{number}") <= 2
    assert requests.count(f"notify-{number}") <= 2


def test_the_order_survives_a_kill_at_every_step_boundary(server: RunningServer, tmp_path: Path) -> None:
    ls = Longshore(server.url)
    base = int(time.time() * 10) % 1_000_000 * 100

    def at_request(count: int) -> None:
        """Kills inside the work of a step: it is done, and not stored yet."""
        number, folder = base + count, tmp_path / f"request-{count}"
        run_killed(server, folder, number, lambda: (folder / "log").read_bytes().count(b"\n") >= count)

    def at_step(count: int) -> None:
        """Kills right after a step was stored."""
        number, folder = base + 50 + count, tmp_path / f"step-{count}"

        def has_steps() -> bool:
            found = ls.sync.list_jobs(idempotency_key=f"order-{number}").jobs
            return bool(found) and len(ls.sync.steps(found[0]["id"])) >= count

        run_killed(server, folder, number, has_steps)

    with ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(at_request, count) for count in range(1, REQUESTS + 1)]
        runs += [pool.submit(at_step, count) for count in range(1, STEPS + 1)]
        for run in runs:
            run.result()
    for count in range(1, REQUESTS + 1):
        [stored] = ls.sync.list_jobs(idempotency_key=f"order-{base + count}").jobs
        children = ls.sync.get_flow(stored["id"])
        assert (stored["status"], children["members"], children["status"]) == ("succeeded", 10, "succeeded")
    server.check()
