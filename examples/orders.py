"""Handles orders: one partition for each customer, every partition in order."""

import json

import parti

app = parti.App(stream="ORDERS", subject="orders.{region}.{customer}")


@app.handler
async def handle(message: parti.Message) -> None:
    """Handle one order; a failure is tried again, a rejected order becomes a dead letter."""
    order = json.loads(message.data)
    if order["amount"] <= 0:
        raise parti.Reject("the amount must be positive")
    print(message.partition.keys["customer"], "order", order["number"], flush=True)
