"""Enqueues inside the application's own Postgres transaction, with the SQL function `longshore.enqueue`.

Recognises connections by the module of their class, so no driver is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, Protocol

from ._enqueue import NewJob, seconds, to_utc
from ._ids import new_id
from ._operations import Enqueued


class AsyncConnection(Protocol):
    """A connection whose methods are awaited: psycopg's `AsyncConnection`, asyncpg, SQLAlchemy's async classes.

    Recognised by `close`, because `execute` returns Any in some classes that are not async.
    """

    def close(self) -> Coroutine[Any, Any, Any]: ...


#: The parameters of the SQL function, with the casts that make their types known to every driver. JSON is sent as
#: text, because a connection of asyncpg may have a codec of its own for JSON.
_CASTS = {
    "payload": "::text::json",
    "priority": "::integer",
    "max_attempts": "::integer",
    "run_at": "::timestamptz",
    "delay": "::interval",
    "timeout": "::interval",
    "flags": "::text[]",
    "options": "::text::json",
    "id": "::uuid",
}
_OPTIONS = ("tags", "context", "metadata", "retry")


def statement(job: NewJob, schema: str) -> tuple[str, dict[str, Any]]:
    """The SQL statement with `{name}` for its parameters, and their values."""
    values: dict[str, Any] = {
        "kind": job.kind,
        "payload": json.dumps(job.payload, ensure_ascii=False, allow_nan=False),
        "id": str(job.options.get("id") or new_id()),
    }
    options = {}
    for name, value in job.options.items():
        if name == "id" or (value is None and name != "timeout"):
            continue
        if name in _OPTIONS:
            options[name] = list(value) if name == "tags" else value
        elif name == "group":
            values["grp"] = value
        elif name in ("delay", "timeout"):
            values[name] = None if value is None else timedelta(seconds=seconds(value))
        elif name == "flags":
            values[name] = list(value)
        elif name == "run_at":
            values[name] = to_utc(value)  # drivers disagree about times without a zone
        else:
            values[name] = value
    if options:
        values["options"] = json.dumps(options, ensure_ascii=False, allow_nan=False)
    arguments = ", ".join(f"{name} => {{{name}}}{_CASTS.get(name, '::text')}" for name in values)
    quoted = '"' + schema.replace('"', '""') + '"'
    return f"select job::text, how from {quoted}.enqueue({arguments})", values


def enqueue_in(connection: Any, job: NewJob, schema: str) -> Enqueued | Coroutine[Any, Any, Enqueued]:
    """Enqueues with a connection of the application. Returns a coroutine for connections that are awaited."""
    sql, values = statement(job, schema)
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(connection).__mro__]
    is_async = any("async" in kind.lower() for kind in kinds)

    def is_a(*prefixes: str) -> bool:
        return any(kind.startswith(prefixes) for kind in kinds)

    if is_a("asyncpg."):
        return _asyncpg(connection, sql, values)
    if is_a("sqlalchemy.ext.asyncio."):
        return _sqlalchemy_async(connection, sql, values)
    if is_a("sqlalchemy."):
        return _enqueued(connection.execute(_sqlalchemy_text(sql), values).one())
    if is_a("psycopg.") and hasattr(connection, "row_factory") and hasattr(connection, "cursor"):
        cursor = connection.cursor(row_factory=_as_tuples)  # whatever rows the connection makes for others
        if is_async:
            return _psycopg_async(cursor, sql, values)
        with cursor:
            return _enqueued(cursor.execute(_pyformat(sql), values).fetchone())
    if is_a("psycopg.") and is_async:  # a cursor
        return _psycopg_async(connection, sql, values)
    if hasattr(connection, "execute") and hasattr(connection, "fetchone"):  # a cursor
        connection.execute(_pyformat(sql), values)
        return _enqueued(connection.fetchone())
    if hasattr(connection, "cursor"):  # psycopg, psycopg2 and Django
        with connection.cursor() as cursor:
            cursor.execute(_pyformat(sql), values)
            return _enqueued(cursor.fetchone())
    raise TypeError(
        f"`{type(connection).__name__}` is not a supported connection; pass a connection of psycopg, asyncpg, "
        "SQLAlchemy or Django that is in a transaction"
    )


def _as_tuples(_: Any) -> Any:
    """A row factory for psycopg."""
    return tuple


def _pyformat(sql: str) -> str:
    return sql.replace("{", "%(").replace("}", ")s")


def _sqlalchemy_text(sql: str) -> Any:
    from sqlalchemy import text

    # `::` would be read as the start of a parameter, so casts are written as `cast(… as …)`.
    before, _, arguments = sql.partition("enqueue(")
    parts = []
    for argument in arguments[:-1].split(", "):
        name, _, value = argument.partition(" => ")
        parameter, *kinds = value.split("::")
        expression = f":{parameter.strip('{}')}"
        for kind in kinds:
            expression = f"cast({expression} as {kind})"
        parts.append(f"{name} => {expression}")
    return text(before.replace("job::text", "cast(job as text)") + "enqueue(" + ", ".join(parts) + ")")


async def _psycopg_async(cursor: Any, sql: str, values: dict[str, Any]) -> Enqueued:
    await cursor.execute(_pyformat(sql), values)
    return _enqueued(await cursor.fetchone())


async def _sqlalchemy_async(connection: Any, sql: str, values: dict[str, Any]) -> Enqueued:
    return _enqueued((await connection.execute(_sqlalchemy_text(sql), values)).one())


async def _asyncpg(connection: Any, sql: str, values: dict[str, Any]) -> Enqueued:
    for number, name in enumerate(values, 1):
        sql = sql.replace(f"{{{name}}}", f"${number}")
    return _enqueued(await connection.fetchrow(sql, *values.values()))


def _enqueued(row: Any) -> Enqueued:
    if row is None:
        raise RuntimeError("longshore.enqueue returned no row")
    if isinstance(row, dict):
        return Enqueued(str(row["job"]), str(row["how"]))
    return Enqueued(str(row[0]), str(row[1]))
