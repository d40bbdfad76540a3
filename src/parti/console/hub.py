"""Hands events to all browsers: each has a short queue, and who does not read is dropped and comes back by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_BROWSERS = 100
MOST_WAITING = 64
"""Events that wait for one browser: at four a second, about a quarter of a minute."""


class Subscriber:
    """One browser: what waits for it, and whether it was given up."""

    def __init__(self, room: int, on_dropped: Callable[[], None]) -> None:
        self.dropped = False
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(room + 1)  # one place for the end
        self._room = room
        self._on_dropped = on_dropped

    def offer(self, event: bytes) -> None:
        """Queue an event; a browser without room for it is dropped."""
        if self.dropped:
            return
        if self._waiting.qsize() >= self._room:
            self.drop()
        else:
            self._waiting.put_nowait(event)

    def drop(self) -> None:
        """Send it nothing more, not even what waits."""
        if self.dropped:
            return
        self.dropped = True
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)
        self._on_dropped()

    async def next(self) -> bytes | None:
        """The next event; None when there are no more."""
        return None if self.dropped else await self._waiting.get()


class Hub:
    """All browsers that look at this moment. `publish` neither waits nor raises."""

    def __init__(self, *, most: int = MOST_BROWSERS, room: int = MOST_WAITING) -> None:
        self.dropped = 0
        """Browsers that were given up because they did not read."""
        self._most = most
        self._room = room
        self._subscribers: set[Subscriber] = set()
        self.closed = False

    def __len__(self) -> int:
        return len(self._subscribers)

    @property
    def full(self) -> bool:
        """Whether no more browsers are let in."""
        return self.closed or len(self._subscribers) >= self._most

    @contextmanager
    def subscribed(self, on_dropped: Callable[[], None] = lambda: None) -> Iterator[Subscriber]:
        """A browser for the length of the block; `on_dropped` is called when it is given up."""
        subscriber = Subscriber(self._room, on_dropped)
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    def publish(self, event: bytes) -> None:
        """Give an event to every browser."""
        for subscriber in list(self._subscribers):
            subscriber.offer(event)
            if subscriber.dropped:
                self.dropped += 1
                self._subscribers.discard(subscriber)

    def close(self) -> None:
        """Let all browsers go, and let no more in."""
        self.closed = True
        for subscriber in list(self._subscribers):
            subscriber.drop()
