"""Writes orders to a SQL database, each of them once, however often it is handled and whoever handles it.

A message may be handled again after a crash, and an owner that was suspended may wake up when another one is at work.
So the database keeps, for each partition, the largest fence token that it has seen and the last sequence that it has
taken; both are compared and changed in the same transaction as the order itself.
"""

import json
import os
import sqlite3
import threading

import parti

TABLES = """
CREATE TABLE IF NOT EXISTS partitions (id TEXT PRIMARY KEY, fence INTEGER NOT NULL, seq INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS orders (customer TEXT, number INTEGER, amount INTEGER);
"""


class Sink:
    """Orders in a sqlite database; several processes may have it open."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._threads = threading.local()

    def __call__(self, message: parti.Message) -> None:
        """Handle one order. One that is refused is somebody else's, or is there already: neither is an error."""
        print(message.partition.id, message.seq, self.take(message), flush=True)

    def take(self, message: parti.Message) -> str:
        """Store an order if it is new and its sender still owns the partition: `taken`, `repeated` or `stale`."""
        database = self._open()
        with database:
            database.execute("BEGIN IMMEDIATE")  # the lock first, so that nobody writes between reading and writing
            found = database.execute(
                "SELECT fence, seq FROM partitions WHERE id = ?", (message.partition.id,)
            ).fetchone()
            fence, seq = found or (0, 0)
            if message.fence < fence:
                return "stale"
            # Also for a repeat: from now on nobody with an older token gets anything in.
            database.execute(
                "INSERT OR REPLACE INTO partitions VALUES (?, ?, ?)",
                (message.partition.id, message.fence, max(seq, message.seq)),
            )
            if message.seq <= seq:
                return "repeated"
            order = json.loads(message.data)
            customer = message.partition.keys["customer"]
            database.execute("INSERT INTO orders VALUES (?, ?, ?)", (customer, order["number"], order["amount"]))
            return "taken"

    def _open(self) -> sqlite3.Connection:
        """The connection of this thread: handlers that are plain functions run in several."""
        database: sqlite3.Connection | None = getattr(self._threads, "database", None)
        if database is None:
            database = self._threads.database = sqlite3.connect(self._path, timeout=30.0, isolation_level=None)
            database.executescript(TABLES)
        return database


app = parti.App(stream="ORDERS", subject="orders.{region}.{customer}")
app.handler(Sink(os.environ.get("ORDERS_DB", "orders.db")))
