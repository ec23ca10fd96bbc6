"""Servers for the tests: the real binary (LONGSHORE_BIN) on SQLite, and on Postgres if
LONGSHORE_TEST_DATABASE_URL names a server. With LONGSHORE_TEST_POSTGRES=smoke, only the tests with the mark `smoke`
and those that need Postgres run on Postgres."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from longshore import Longshore, Worker, find_binary, new_id
from longshore._dev_server import await_address

POSTGRES = os.environ.get("LONGSHORE_TEST_DATABASE_URL")
ON_POSTGRES = os.environ.get("LONGSHORE_TEST_POSTGRES") or "full"
#: How long a test waits for what must happen, in seconds. Only a fault takes this long, however slow the machine is.
LIMIT = 120.0


@dataclass
class RunningServer:
    engine: str
    url: str
    database_url: str
    folder: Path
    binary: str

    def check(self) -> None:
        """Asserts that the tables are consistent."""
        command = [self.binary, "check", "--database-url", server_url(self.database_url), "--config", ""]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=clean_environment())
        assert done.returncode == 0, done.stdout + done.stderr


def server_url(database_url: str) -> str:
    """The URL for the server. A database for tests need not survive a crash of its host."""
    if database_url.startswith("sqlite:"):
        return database_url
    return f"{database_url}{'&' if '?' in database_url else '?'}durability=relaxed"


def clean_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not re.match("LONGSHORE_|DATABASE_URL", name)}
    return {**kept, **more}


@contextlib.contextmanager
def serving(engine: str, folder: Path, *arguments: str, database: str | None = None) -> Iterator[RunningServer]:
    """Runs a server, by default with a new database."""
    binary = find_binary()
    assert binary is not None, "set LONGSHORE_BIN to the server binary"
    with contextlib.ExitStack() as stack:
        is_sqlite = engine == "sqlite"
        file = f"sqlite:{folder}/queue.db" if is_sqlite else None
        database_url = file or database or stack.enter_context(new_database())
        command = [
            str(binary),
            "serve",
            "--migrate",
            "--bind",
            "127.0.0.1:0",
            "--database-url",
            server_url(database_url),
        ]
        command += ["--sweep-interval", "200ms", "--recovery-delay", "10ms", "--max-interruptions", "20", *arguments]
        log = folder / "server.log"
        with log.open("ab") as output:
            start = output.tell()
            process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=folder, env=clean_environment(LONGSHORE_CONFIG="")
            )
        try:
            url = await_address(process, log, start, LIMIT)
            yield RunningServer(engine, url, database_url, folder, str(binary))
        finally:
            process.terminate()
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def new_database() -> Iterator[str]:
    """A new Postgres database, which is dropped at the end."""
    import psycopg

    assert POSTGRES is not None
    name = f"longshore_python_{os.getpid()}_{new_id()[-12:]}"
    parts = urlsplit(POSTGRES)
    with psycopg.connect(POSTGRES, autocommit=True) as admin:
        admin.execute(f"create database {name}")  # type: ignore[call-overload,unused-ignore]
    try:
        yield urlunsplit(parts._replace(path=f"/{name}"))
    finally:
        with psycopg.connect(POSTGRES, autocommit=True) as admin:
            admin.execute(f"drop database if exists {name} with (force)")  # type: ignore[call-overload,unused-ignore]


ENGINES = ["sqlite", *(["postgres"] if POSTGRES else [])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what does not run on Postgres."""
    assert ON_POSTGRES in ("full", "smoke"), f"LONGSHORE_TEST_POSTGRES: `{ON_POSTGRES}` is invalid; use full or smoke"
    if ON_POSTGRES == "full":
        return

    left_out = [item for item in items if is_on_postgres(item) and item.get_closest_marker("smoke") is None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def is_on_postgres(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return "postgres" in (parameters.get("server"), parameters.get("engine"))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """`cargo xtask test` fails if no marked test has run on Postgres."""
    marked = os.environ.get("LONGSHORE_TEST_MARKED")
    if marked and is_on_postgres(item) and item.get_closest_marker("smoke"):
        with Path(marked).open("a") as file:
            file.write(f"{item.name}\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With CI=true no test may be skipped: nobody would notice that a package is missing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return
    if skipped := reporter.stats.get("skipped", []):
        reporter.write_line(f"CI=true, and {len(skipped)} tests were skipped; the first: {skipped[0].longrepr}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", params=ENGINES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on each engine, shared by the tests. Tests use queues and kinds of their own."""
    with serving(request.param, tmp_path_factory.mktemp(f"server-{request.param}")) as running:
        yield running


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    if not POSTGRES:
        pytest.skip("LONGSHORE_TEST_DATABASE_URL is not set")
    with serving("postgres", tmp_path_factory.mktemp("server-transactions")) as running:
        yield running


@pytest.fixture
def ls(server: RunningServer) -> Longshore:
    return Longshore(server.url)


_queue_number = iter(range(1_000_000))


@pytest.fixture
def queue() -> str:
    """A queue that no other test uses."""
    return f"queue-{os.getpid()}-{next(_queue_number)}"


@pytest.fixture
def running(ls: Longshore) -> Iterator[Callable[..., Worker]]:
    """Starts workers, and stops them at the end of the test."""
    workers: list[Worker] = []

    def start(app: Longshore = ls, **settings: Any) -> Worker:
        worker = app.worker(**{"grace": 5.0, **settings})
        worker.start()
        workers.append(worker)
        assert worker.wait_until_registered(LIMIT)
        return worker

    yield start
    for worker in workers:
        worker.stop()


def eventually(condition: Callable[[], Any], what: str, timeout: float = LIMIT) -> Any:
    """Waits until the condition holds, and returns its value."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"did not happen in {timeout} s: {what}"
        time.sleep(0.02)


class Program:
    """A Python program in a process of its own, which a test can kill."""

    def __init__(self, code: str, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.path = folder / f"program_{new_id()[-8:]}.py"
        self.path.write_text(textwrap.dedent(code))
        self.log = self.path.with_suffix(".log")
        self.environment = clean_environment(**environment)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(self.path)],
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=self.environment,
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout: float = LIMIT) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def program(tmp_path: Path, server: RunningServer) -> Iterator[Callable[..., Program]]:
    """Starts programs that know the server as LONGSHORE_SERVER."""
    programs: list[Program] = []

    def start(code: str, **environment: str) -> Program:
        started = Program(code, tmp_path, LONGSHORE_SERVER=server.url, **environment)
        programs.append(started)
        return started

    yield start
    for started in programs:
        started.close()
