"""Effects that happen once for each message, whoever brings it, while two sides handle the same messages.

A message has the same stream and sequence for both, so these two are the key. The row and the effect are written in
one transaction: whoever comes second finds the row and does nothing.

    nats-py   once.take(message.metadata.stream, message.metadata.sequence.stream, effect)
    parti     once.take(message.stream, message.seq, effect)
"""

from __future__ import annotations

import sqlite3
import threading

TABLES = """
CREATE TABLE IF NOT EXISTS handled (stream TEXT, seq INTEGER, PRIMARY KEY (stream, seq)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS effects (stream TEXT, seq INTEGER, effect TEXT);
"""


class Once:
    """A sqlite database; several processes may have it open."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._threads = threading.local()

    def take(self, stream: str, seq: int, effect: str) -> bool:
        """Do it unless it was done: True when this call did it."""
        database = self._open()
        with database:
            database.execute("BEGIN IMMEDIATE")
            try:
                database.execute("INSERT INTO handled VALUES (?, ?)", (stream, seq))
            except sqlite3.IntegrityError:
                return False
            database.execute("INSERT INTO effects VALUES (?, ?, ?)", (stream, seq, effect))
            return True

    def effects(self) -> list[tuple[int, str]]:
        """Sequences and effects, in the order in which they happened."""
        return list(self._open().execute("SELECT seq, effect FROM effects ORDER BY rowid"))

    def close(self) -> None:
        """Close the connection of this thread."""
        self._open().close()
        self._threads.database = None

    def _open(self) -> sqlite3.Connection:
        database: sqlite3.Connection | None = getattr(self._threads, "database", None)
        if database is None:
            database = self._threads.database = sqlite3.connect(self._path, timeout=30.0, isolation_level=None)
            database.executescript(TABLES)
        return database
