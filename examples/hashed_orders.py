"""Handles orders of any number of customers in sixteen partitions, chosen by the server from a hash of the customer.

parti creates the stream if it is missing. Publish on `orders.<customer>`: a customer's orders stay in one partition.
"""

import json

import parti

mapping = parti.SubjectMapping("orders.*", "orders.{{wildcard(1)}}.{{partition(16,1)}}")
app = parti.App(stream="HASHED_ORDERS", subject="orders.{customer}.{slot}", partitions=mapping)


@app.handler
async def handle(message: parti.Message) -> None:
    """Handle one order; its subject, as stored, names the customer."""
    _, customer, slot = message.subject.split(".")
    print(slot, customer, "order", json.loads(message.data)["number"], flush=True)
