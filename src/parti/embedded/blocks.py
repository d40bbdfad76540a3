"""What can be started and stopped, as a block: `with` for code without an event loop, `async with` for asyncio."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Blocks(ABC):
    """Started when a block begins, and stopped when it ends, whatever ended it."""

    @abstractmethod
    def start_sync(self) -> None:
        """Start; on failure nothing is left behind."""

    @abstractmethod
    def stop_sync(self) -> None:
        """Stop; a second call does nothing."""

    @abstractmethod
    async def start(self) -> None:
        """Like `start_sync`, without blocking the event loop; a cancelled start leaves nothing running."""

    async def stop(self) -> None:
        """Like `stop_sync`, without blocking the event loop; when cancelled, it still ends in the background."""
        await asyncio.to_thread(self.stop_sync)

    def __enter__(self) -> Self:
        """Start; see `start_sync`."""
        self.start_sync()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; see `stop_sync`."""
        self.stop_sync()

    async def __aenter__(self) -> Self:
        """Start; see `start`."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; see `stop`."""
        await self.stop()
