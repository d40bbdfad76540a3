"""Several workers of the chaos app in one process: a fleet of 25 on a machine that has no room for 25 processes.

    python -m chaos.hosts 5

SIGTERM lets all of them leave in good order.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from chaos.handler import app
from parti.telemetry.logs import configure_logging


async def main(number: int) -> None:
    """Run so many workers until SIGTERM."""
    configure_logging("warning", "json")
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    workers = [app.worker() for _ in range(number)]
    for worker in workers:
        await worker.start()
    await told.wait()
    await asyncio.gather(*(worker.stop() for worker in workers))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
