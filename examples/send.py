"""Creates the stream ORDERS and publishes ten orders for each of three customers."""

import asyncio
import json

import nats


async def main() -> None:
    """Send the orders, the customers taking turns."""
    client = await nats.connect("nats://127.0.0.1:4222")
    stream = client.jetstream()
    await stream.add_stream(name="ORDERS", subjects=["orders.*.*"], allow_direct=True)
    for number in range(1, 11):
        for customer in ("ada", "bob", "cy"):
            order = {"number": number, "amount": 10 * number}
            await stream.publish(f"orders.eu.{customer}", json.dumps(order).encode())
    await client.close()


asyncio.run(main())
