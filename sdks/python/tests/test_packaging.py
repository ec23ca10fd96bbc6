"""The commands and the wheel."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from longshore import Longshore, find_binary

from .conftest import LIMIT, RunningServer, clean_environment, eventually

ROOT = Path(__file__).resolve().parent.parent

APP = """
    from longshore import Longshore

    ls = Longshore()

    @ls.job("{kind}", queue="{queue}")
    def answer() -> int:
        return {answer}
"""


def write_app(folder: Path, kind: str, queue: str, answer: int) -> None:
    (folder / "shop.py").write_text(textwrap.dedent(APP.format(kind=kind, queue=queue, answer=answer)))


def worker_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "longshore", *arguments]


def job_of(ls: Longshore, kind: str, queue: str) -> Any:
    def answer() -> int:
        return 0

    return ls.job(kind, queue=queue)(answer)


def is_known(ls: Longshore, kind: str) -> bool:
    return any(kind in (worker["kinds"] or []) for worker in ls.sync.workers() if worker["dead_at"] is None)


def test_the_command_runs_an_application_and_reloads_it(server: RunningServer, queue: str, tmp_path: Path) -> None:
    ls = Longshore(server.url)
    kind = f"answer-{queue}"
    job = job_of(ls, kind, queue)
    write_app(tmp_path, kind, queue, 41)
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            worker_command("shop:ls", "--reload", "--concurrency", "2", "--name", "shop"),
            cwd=tmp_path,
            env=clean_environment(LONGSHORE_SERVER=server.url),
            stdout=output,
            stderr=output,
        )
    try:
        eventually(lambda: is_known(ls, kind), "the worker registers")
        assert job.enqueue_sync().result_sync(LIMIT) == 41
        write_app(tmp_path, kind, queue, 42)
        os.utime(tmp_path / "shop.py", (time.time() + 5, time.time() + 5))
        eventually(lambda: b"restarting" in log.read_bytes(), "the worker restarts")
        assert job.enqueue_sync().result_sync(LIMIT) == 42
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_thread_that_a_handler_left_behind_does_not_keep_the_process(
    server: RunningServer, queue: str, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(
        textwrap.dedent(f"""
        import asyncio, pathlib, time
        from longshore import Longshore

        ls = Longshore()

        @ls.job("thread-{queue}", queue="{queue}")
        async def job() -> int:
            pathlib.Path("started").touch()
            await asyncio.to_thread(time.sleep, 3600)
        """)
    )
    ls = Longshore(server.url)
    job = job_of(ls, f"thread-{queue}", queue)
    process = subprocess.Popen(
        worker_command("shop:ls", "--grace", "0.1"), cwd=tmp_path, env=clean_environment(LONGSHORE_SERVER=server.url)
    )
    try:
        eventually(lambda: is_known(ls, f"thread-{queue}"), "the worker registers")
        job.enqueue_sync()
        eventually((tmp_path / "started").exists, "the job runs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere:ls"], "there is no module `nowhere` in "),
        (["broken:ls"], 'broken.py", line 1'),  # errors of the application have a traceback
        (["shop:app"], "`shop` has no Longshore object `app`"),
        (["shop:ls", "--kinds", "other"], "kinds: `other` is not registered"),
        (["shop:ls", "--concurrency", "0"], "concurrency: 0 is out of range"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str, tmp_path: Path) -> None:
    write_app(tmp_path, "answer", "default", 1)
    (tmp_path / "broken.py").write_text("import a_module_that_does_not_exist")
    done = subprocess.run(
        worker_command(*arguments),
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 1
    assert message in done.stderr


def test_arguments_that_are_invalid_are_named(tmp_path: Path) -> None:
    write_app(tmp_path, "answer", "default", 1)
    for arguments, environment, message in [
        (["shop:ls", "--rel"], {}, "unrecognized arguments: --rel"),  # an abbreviation would start itself forever
        (["shop:ls"], {"WORKER_CONCURRENCY": "many"}, "--concurrency: invalid int value: 'many'"),
    ]:
        command, clean = worker_command(*arguments), clean_environment(**environment)
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 2
        assert message in done.stderr


def test_a_package_without_a_server_says_how_to_get_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from longshore._binary import main; main()"],
        env=clean_environment(PATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 127
    assert "set LONGSHORE_BIN" in done.stderr


def test_the_wheel_without_a_server_and_the_sdist_are_built(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, str(ROOT / "tools" / "build_wheel.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * LIMIT)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [re.sub(r"\d+\.\d+\.\d+", "V", name) for name in names] == [
        "longshore-V-py3-none-any.whl",
        "longshore-V.tar.gz",
    ]


def test_the_wheel_provides_sdk_worker_and_server(tmp_path: Path) -> None:
    """Installs the wheel into an empty environment, and runs a server, a worker and an enqueue from it."""
    binary = find_binary()
    assert binary is not None
    build = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "build_wheel.py"), "--binary", str(binary), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=5 * LIMIT,
    )
    assert build.returncode == 0, build.stderr
    [wheel] = tmp_path.glob("longshore-*.whl")
    assert "-py3-none-any" not in wheel.name
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    install = [str(programs / "pip"), "install", "--quiet", "--no-index", str(wheel)]
    assert subprocess.run(install, timeout=5 * LIMIT).returncode == 0
    environment = clean_environment(PATH=f"{programs}:/usr/bin:/bin")
    environment.pop("PYTHONPATH", None)
    version = subprocess.run(
        [str(programs / "longshore"), "--version"], env=environment, capture_output=True, timeout=LIMIT
    )
    assert version.stdout.startswith(b"longshore ")
    write_app(tmp_path, "answer", "default", 42)
    script = """
        import subprocess, sys
        from longshore.testing import DevServer
        from shop import ls, answer

        with DevServer() as server:
            worker = subprocess.Popen([sys.argv[1], "shop:ls"], env={"LONGSHORE_SERVER": server.url})
            ls.configure(server.url)
            with ls.worker(queues=["nothing-here"]) as announcing:
                announcing.wait_until_registered(120)
            print(answer.enqueue_sync().result_sync(120))
            worker.terminate()
            assert worker.wait(120) == 0
    """
    (tmp_path / "try.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [str(programs / "python"), "try.py", str(programs / "longshore-worker")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=5 * LIMIT,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.stderr
