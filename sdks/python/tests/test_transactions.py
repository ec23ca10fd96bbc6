"""`enqueue_in`: jobs in the transaction of the application, with each supported driver."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime, timedelta
from typing import Any

import pytest

from longshore import Longshore

from .conftest import RunningServer

psycopg = pytest.importorskip("psycopg")


@pytest.fixture
def app(postgres_server: RunningServer) -> Longshore:
    return Longshore(postgres_server.url)


@pytest.fixture
def job(app: Longshore, queue: str) -> Any:
    @app.job(f"tx-{queue}", queue=queue, max_attempts=4, timeout=90)
    async def send_report(to: str) -> None: ...

    return send_report


OPTIONS: dict[str, Any] = {
    "priority": 3,
    "delay": 60,
    "tags": ["t"],
    "flags": ["f"],
    "group": "acme",
    "context": "why: 'quoted' {braces} 100%",
    "metadata": {"m": [1]},
    "retry": {"policy": "fixed", "delay_ms": 5},
}


def check_committed(app: Longshore, queue: str, id: str) -> None:
    [stored] = list(app.sync.jobs(queue=queue))
    assert stored["id"] == id
    assert stored["payload"] == {"to": "ada's {pier} :at %s"}
    assert (stored["priority"], stored["max_attempts"], stored["timeout_seconds"]) == (3, 4, 90)
    assert (stored["tags"], stored["flags"], stored["group"]) == (["t"], ["f"], "acme")
    assert (stored["context"], stored["metadata"]) == (OPTIONS["context"], OPTIONS["metadata"])
    assert (stored["retry"], stored["unique_key"]) == (OPTIONS["retry"], f"u-{queue}")


TO = "ada's {pier} :at %s"


def test_psycopg(app: Longshore, job: Any, queue: str, postgres_server: RunningServer) -> None:
    with psycopg.connect(postgres_server.database_url) as connection:
        job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(connection, to=TO)
        connection.rollback()
        assert not list(app.sync.jobs(queue=queue))
        handle = job.options(**{**OPTIONS, "delay": timedelta(minutes=1)}, unique_key=f"u-{queue}").enqueue_in(
            connection, to=TO
        )
        assert not list(app.sync.jobs(queue=queue))
        connection.commit()
        assert handle.how == "created"
        check_committed(app, queue, handle.id)
        assert job.options(unique_key=f"u-{queue}").enqueue_in(connection, to="bob").how == "existing"
        with connection.cursor() as cursor:
            assert job.options(unique_key=f"u-{queue}").enqueue_in(cursor, to="bob").id == handle.id


def test_psycopg_async(app: Longshore, job: Any, queue: str, postgres_server: RunningServer) -> None:
    async def run() -> str:
        async with await psycopg.AsyncConnection.connect(postgres_server.database_url) as connection:
            await job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(connection, to=TO)
            await connection.rollback()
            handle = await job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(connection, to=TO)
            await connection.commit()
            return str(handle.id)

    check_committed(app, queue, asyncio.run(run()))


def test_asyncpg(app: Longshore, job: Any, queue: str, postgres_server: RunningServer) -> None:
    asyncpg = pytest.importorskip("asyncpg")

    async def run() -> str:
        connection = await asyncpg.connect(postgres_server.database_url)
        transaction = connection.transaction()
        await transaction.start()
        await job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(connection, to=TO)
        await transaction.rollback()
        async with connection.transaction():
            handle = await job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(connection, to=TO)
        await connection.close()
        async with asyncpg.create_pool(postgres_server.database_url, min_size=1) as pool, pool.acquire() as pooled:
            assert (await job.options(unique_key=f"u-{queue}").enqueue_in(pooled, to="bob")).how == "existing"
        return str(handle.id)

    check_committed(app, queue, asyncio.run(run()))


def test_sqlalchemy(app: Longshore, job: Any, queue: str, postgres_server: RunningServer) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    orm = pytest.importorskip("sqlalchemy.orm")
    engine = sqlalchemy.create_engine(postgres_server.database_url.replace("postgres:", "postgresql+psycopg:", 1))
    with engine.connect() as connection:
        job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(connection, to=TO)
        connection.rollback()
    with orm.Session(engine) as session, session.begin():
        handle = job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(session, to=TO)
    engine.dispose()
    check_committed(app, queue, handle.id)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_sqlalchemy_async(app: Longshore, job: Any, queue: str, postgres_server: RunningServer, driver: str) -> None:
    aio = pytest.importorskip("sqlalchemy.ext.asyncio")
    pytest.importorskip(driver)

    async def run() -> str:
        url = postgres_server.database_url.replace("postgres:", f"postgresql+{driver}:", 1)
        engine = aio.create_async_engine(url)
        async with engine.connect() as connection:
            await job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(connection, to=TO)
            await connection.rollback()
        async with aio.AsyncSession(engine) as session, session.begin():
            handle = await job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(session, to=TO)
        await engine.dispose()
        return str(handle.id)

    check_committed(app, queue, asyncio.run(run()))


def test_django(app: Longshore, job: Any, queue: str, postgres_server: RunningServer) -> None:
    pytest.importorskip("django")
    from urllib.parse import urlsplit

    from django.conf import settings
    from django.db import connection, transaction

    parts = urlsplit(postgres_server.database_url)
    if not settings.configured:
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path[1:],
            "USER": parts.username,
            "PASSWORD": parts.password,
            "HOST": parts.hostname,
            "PORT": parts.port,
        }
        settings.configure(DATABASES={"default": database})
    with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
        job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(connection, to=TO)
        raise ZeroDivisionError
    with transaction.atomic():
        handle = job.options(**OPTIONS, unique_key=f"u-{queue}").enqueue_in(connection, to=TO)
    connection.close()
    check_committed(app, queue, handle.id)


def test_the_settings_of_a_connection_do_not_matter(
    app: Longshore, job: Any, queue: str, postgres_server: RunningServer
) -> None:
    from psycopg.rows import class_row, dict_row, scalar_row

    url = postgres_server.database_url
    for factory in (dict_row, scalar_row, class_row(object)):
        with psycopg.connect(url, row_factory=factory) as connection:
            assert job.enqueue_in(connection, to="ada").how == "created"

    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(url, row_factory=scalar_row) as connection:
            assert (await job.enqueue_in(connection, to="ada")).how == "created"
        asyncpg = pytest.importorskip("asyncpg")
        with_codec = await asyncpg.connect(url)
        await with_codec.set_type_codec("json", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        await job.options(metadata={"m": 1}).enqueue_in(with_codec, to="ada")
        await with_codec.close()

    asyncio.run(run())
    stored = list(app.sync.jobs(queue=queue))
    assert [entry["payload"] for entry in stored] == [{"to": "ada"}] * 5
    assert stored[0]["metadata"] == {"m": 1}


def test_a_time_without_a_zone_is_local_time_with_every_driver(
    app: Longshore, job: Any, queue: str, postgres_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncpg = pytest.importorskip("asyncpg")
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    url = postgres_server.database_url
    at = job.options(run_at=datetime(2030, 7, 1, 8, 0))
    with psycopg.connect(url, options="-c timezone=Asia/Tokyo") as connection:
        at.enqueue_in(connection, to="ada")

    async def run() -> None:
        connection = await asyncpg.connect(url)
        await at.enqueue_in(connection, to="ada")
        await connection.close()

    asyncio.run(run())
    monkeypatch.undo()
    time.tzset()
    assert {entry["run_at"][:16] for entry in app.sync.jobs(queue=queue)} == {"2030-07-01T12:00"}


def test_another_object_is_refused(job: Any) -> None:
    with pytest.raises(TypeError, match="`list` is not a supported connection"):
        job.enqueue_in([], to="ada")
