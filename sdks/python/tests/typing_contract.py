"""What a type checker must accept and refuse. mypy checks this file; every `type: ignore` must be needed."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg.rows import TupleRow
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from typing_extensions import assert_type

from longshore import INJECTED, Context, Handle, Longshore, SyncContext

ls = Longshore()


@dataclass
class Receipt:
    number: int


@ls.job(queue="mail", max_attempts=5, timeout=60)
async def with_context(to: str, copies: int = 1, *, ctx: Context) -> Receipt:
    return Receipt(copies)


@ls.job()
async def with_default(to: str, ctx: Context = INJECTED) -> int:
    return await ctx.step("one", lambda: 1)


@ls.job()
def in_a_thread(to: str, ctx: SyncContext) -> str:
    return to


@ls.job()
def plain(items: list[int]) -> None: ...


async def in_transactions(
    connection: psycopg.Connection[TupleRow],
    async_connection: psycopg.AsyncConnection[TupleRow],
    session: Session,
    async_session: AsyncSession,
) -> None:
    assert_type(with_context.enqueue_in(connection, to="ada"), Handle[Receipt])
    assert_type(await with_context.enqueue_in(async_connection, to="ada"), Handle[Receipt])
    assert_type(with_context.enqueue_in(session, to="ada"), Handle[Receipt])
    assert_type(await with_context.enqueue_in(async_session, to="ada"), Handle[Receipt])
    with_context.enqueue_in(connection, to=7)  # type: ignore[call-overload]


async def enqueues() -> None:
    handle = await with_context.enqueue(to="ada@example.com")
    assert_type(handle, Handle[Receipt])
    assert_type(await handle.result(timeout=1), Receipt)
    await with_context.options(delay=60, unique_key="r-7").enqueue(to="ada@example.com", copies=2)
    await with_context.enqueue("ada@example.com", 2)
    await with_context.enqueue()  # type: ignore[call-arg]
    await with_context.enqueue(to=7)  # type: ignore[arg-type]
    await with_context.enqueue(too="ada@example.com")  # type: ignore[call-arg]
    with_context.options(delays=60)  # type: ignore[call-arg]
    assert_type(await with_default.enqueue(to="ada"), Handle[int])
    assert_type(in_a_thread.enqueue_sync(to="ada").result_sync(), str)
    plain.new(items=[1, 2])
    plain.new(items=["1"])  # type: ignore[list-item]
