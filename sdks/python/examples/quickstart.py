"""A job, a worker and a result in one file.

longshore dev                       # in another terminal
python examples/quickstart.py
"""

from __future__ import annotations

import asyncio

from longshore import Context, Longshore

ls = Longshore()  # LONGSHORE_SERVER, LONGSHORE_TOKEN


@ls.job(queue="mail", max_attempts=5, timeout=60)
async def send_report(to: str, *, ctx: Context) -> dict[str, str]:
    ctx.progress({"done": 0.5})
    return {"sent_to": to, "attempt": str(ctx.attempt)}


async def main() -> None:
    async with ls.worker(concurrency=4) as worker:
        worker.wait_until_registered()
        handle = await send_report.enqueue(to="ada@example.com")
        print(await handle.result(timeout=30))


if __name__ == "__main__":
    asyncio.run(main())
