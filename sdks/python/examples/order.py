"""An order: charge the card, wait for an approval, ship ten parcels in parallel, notify the customer.

Kill the program at any moment and start it again: it continues.

    longshore dev                                # in another terminal
    python examples/order.py /tmp/order 42       # a folder for its files, and the number of the order
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from longshore import Cancel, Context, Longshore

ls = Longshore()
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "order-files")
number = int(sys.argv[2]) if len(sys.argv) > 2 else 42
queue = f"orders-{number}"


async def request(key: str) -> str:
    """Asks another company to do something. It knows the key, so a repeated request changes nothing."""
    (folder / key).write_text("done")
    print(key, flush=True)
    await asyncio.sleep(0.02)
    return key


@ls.job(queue=queue)
async def order(number: int, *, ctx: Context) -> str:
    charge = await ctx.step("charge", lambda: request(f"charge-{number}"))
    person = await ctx.event(f"approved:{number}", within=24 * 60 * 60, type=str)
    if person is None:
        raise Cancel("nobody approved the order")
    await ctx.spawn("parcels", [parcel.new(parcel=n, order=number) for n in range(10)])
    shipped = await ctx.join("shipped")
    await ctx.step("notify", lambda: request(f"notify-{number}"))
    return f"{charge}, approved by {person}, {len(shipped.results())} parcels"


@ls.job(queue=queue)
async def parcel(parcel: int, order: int) -> str:
    return await request(f"parcel-{parcel}-{order}")


async def main() -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # A short `stale_after`, so that a restarted program continues soon.
    async with ls.worker(stale_after=15.0, grace=5.0) as worker:
        worker.wait_until_registered()
        handle = await order.options(idempotency_key=f"order-{number}").enqueue(number=number)
        while (await handle.get())["finished_at"] is None:
            if await ls.steps(handle.id):
                await ls.emit(f"approved:{number}", "ada")  # in real life, a person does this days later
            await asyncio.sleep(0.01)
        print("result:", await handle.result())


if __name__ == "__main__":
    asyncio.run(main())
