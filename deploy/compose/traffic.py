"""Makes the stream ORDERS, if there is none, and sends it orders of fifty customers at a steady rate."""

import argparse
import asyncio
import itertools
import json
import os
import tempfile
from pathlib import Path

import nats

READY = Path(tempfile.gettempdir()) / "stream-is-there"
"""What the container's health check looks for."""


async def main(rate: float, count: int | None) -> None:
    """Send so many orders a second; for ever, if no count is given."""
    servers = os.environ["PARTI_NATS"].split(",")
    client = await nats.connect(servers)
    stream = client.jetstream()
    replicas = int(os.environ.get("PARTI_REPLICAS", "1"))
    await stream.add_stream(name="ORDERS", subjects=["orders.*.*"], num_replicas=replicas, allow_direct=True)
    READY.touch()
    for number in itertools.islice(itertools.count(), count):
        order = {"number": number, "amount": 1 + number % 100}
        await stream.publish(f"orders.eu.c{number % 50}", json.dumps(order).encode())
        await asyncio.sleep(1 / rate)
    await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="orders a second")
    parser.add_argument("--count", type=int, help="end after so many")
    given = parser.parse_args()
    asyncio.run(main(given.rate, given.count))
