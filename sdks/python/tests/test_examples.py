"""The framework examples, against a real server."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore import Longshore

from .conftest import LIMIT, RunningServer, clean_environment

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def environment(postgres_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    import psycopg

    url = postgres_server.database_url
    monkeypatch.setenv("LONGSHORE_SERVER", postgres_server.url)
    monkeypatch.setenv("DATABASE_URL", url.replace("postgres:", "postgresql+psycopg:", 1))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table if not exists users (email text primary key)")
        connection.execute("create table if not exists orders (number integer primary key, confirmed boolean)")
    yield postgres_server
    for name in ("fastapi_app", "flask_app"):
        sys.modules.pop(name, None)


def test_quickstart(server: RunningServer) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py")],
        env=clean_environment(LONGSHORE_SERVER=server.url),
        capture_output=True,
        text=True,
        timeout=3 * LIMIT,
    )
    assert done.stdout.strip() == "{'sent_to': 'ada@example.com', 'attempt': '1'}", done.stderr


def test_fastapi(environment: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    testclient = pytest.importorskip("fastapi.testclient")
    monkeypatch.setenv("RUN_WORKER", "1")
    example: Any = importlib.import_module("fastapi_app")
    ls = Longshore(environment.url)
    with testclient.TestClient(example.app, raise_server_exceptions=False) as client:
        announced = example.ls.worker(queues=["nothing-here"])
        with announced:
            assert announced.wait_until_registered(LIMIT)
        job = client.post("/signups", json={"email": "ada@example.com"}).json()["job"]
        assert client.post("/signups", json={"email": "ada@example.com"}).json()["job"] == job
        assert ls.sync.result(job, timeout=LIMIT) == {"sent_to": "ada@example.com"}
        assert client.get(f"/jobs/{job}").json()["status"] == "succeeded"
        created = client.post("/users", json={"email": "bob@example.com"}).json()["job"]
        assert ls.sync.result(created, timeout=LIMIT) == {"sent_to": "bob@example.com"}
        before = len(ls.sync.list_jobs(kind="welcome").jobs)
        assert client.post("/users", json={"email": "bob@example.com"}).status_code == 500
        assert len(ls.sync.list_jobs(kind="welcome").jobs) == before


def test_flask(environment: RunningServer) -> None:
    pytest.importorskip("flask")
    example: Any = importlib.import_module("flask_app")
    with example.ls.worker() as worker:
        assert worker.wait_until_registered(LIMIT)
        client = example.app.test_client()
        job = client.post("/reports", json={"month": "2030-01"}).get_json()["job"]
        assert Longshore(environment.url).sync.result(job, timeout=LIMIT) == {"rows": 45}
        assert client.get(f"/reports/{job}").get_json()["status"] == "succeeded"


def test_django(environment: RunningServer) -> None:
    pytest.importorskip("django")
    script = """
        import django
        django.setup()
        from django.test import Client
        from django_shop.jobs import ls

        with ls.worker() as worker:
            worker.wait_until_registered(120)
            job = Client().post("/orders/7").json()["job"]
            print(ls.sync.result(job, timeout=120))
            try:
                Client().post("/orders/7")
            except Exception as error:
                print(type(error).__name__)
            print(len(ls.sync.list_jobs(kind="confirm_order").jobs))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=EXAMPLES,
        env=clean_environment(
            DJANGO_SETTINGS_MODULE="django_shop.settings",
            DATABASE_URL=environment.database_url,
            LONGSHORE_SERVER=environment.url,
            PYTHONPATH=os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent / "src")]),
        ),
        capture_output=True,
        text=True,
        timeout=3 * LIMIT,
    )
    assert done.stdout.split("\n")[:3] == ["confirmed 7", "IntegrityError", "1"], done.stdout + done.stderr
