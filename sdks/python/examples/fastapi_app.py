"""FastAPI: enqueue in a request and in a transaction, with a worker alongside or in another process.

    export LONGSHORE_SERVER=http://127.0.0.1:8080 DATABASE_URL=postgresql+psycopg://localhost/app
    longshore-worker fastapi_app:ls &              # in the folder examples
    uvicorn fastapi_app:app

With RUN_WORKER=1, the worker runs inside the web process, on threads and an event loop of its own.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from longshore import Context, Longshore, NotFound

ls = Longshore()
engine = create_async_engine(os.environ.get("DATABASE_URL", "postgresql+psycopg://localhost/app"))


class Signup(BaseModel):
    email: str
    plan: str = "free"


@ls.job(queue="mail", max_attempts=5, timeout=60)
async def welcome(signup: Signup, *, ctx: Context) -> dict[str, str]:
    ctx.progress({"step": "rendering"})
    return {"sent_to": signup.email}


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    if os.environ.get("RUN_WORKER"):
        async with ls.worker(concurrency=4):
            yield
    else:
        yield
    await ls.aclose()
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


async def transaction() -> AsyncIterator[AsyncConnection]:
    """One transaction per request. It is rolled back if the request fails."""
    async with engine.begin() as connection:
        yield connection


@app.post("/signups", status_code=202)
async def sign_up(signup: Signup) -> dict[str, str]:
    """Enqueues a job. The email is also the key, so a second click sends no second mail."""
    handle = await welcome.options(idempotency_key=f"welcome-{signup.email}").enqueue(signup=signup)
    return {"job": handle.id}


@app.post("/users", status_code=201)
async def create_user(signup: Signup, connection: Annotated[AsyncConnection, Depends(transaction)]) -> dict[str, str]:
    """Stores a user and enqueues a job: both or neither."""
    await connection.execute(text("insert into users (email) values (:email)"), {"email": signup.email})
    handle = await welcome.enqueue_in(connection, signup=signup)
    return {"job": handle.id}


@app.get("/jobs/{id}")
async def job_status(id: str) -> dict[str, object]:
    try:
        job = await ls.get(id)
    except NotFound:
        raise HTTPException(404, "no such job") from None
    return {"status": job["status"], "progress": job["progress"], "result": job["result"]}
