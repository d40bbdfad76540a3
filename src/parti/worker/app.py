"""What a service developer writes: an app with a handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from parti.config import load_settings
from parti.errors import ConfigError, HandlerMissing
from parti.model.partition import PartitionLike, Template
from parti.worker.runners import Handler
from parti.worker.worker import Job, Worker

_H = TypeVar("_H", bound=Handler)


class App:
    """A stream, the partitions of it, and the handler of their messages.

    `subject` is a template such as `dc.{tool}.{chamber}.completion`. `partitions` lists the key values; left out,
    every subject that fits the template is a partition. Further keyword arguments are settings, which beat
    environment and `parti.toml`.

    Example:
        app = parti.App(stream="DC", subject="dc.{tool}.{chamber}.completion", partitions=["etch1.c1", "etch1.c2"])

        @app.handler
        async def handle(message: parti.Message) -> None:
            print(message.partition.keys["tool"], message.data)
    """

    def __init__(
        self,
        *,
        stream: str,
        subject: str,
        partitions: Iterable[PartitionLike] | None = None,
        **settings: Any,
    ) -> None:
        if not stream or any(c in stream for c in ".*> \t\r\n/\\"):
            raise ConfigError(f"stream name {stream!r} is not valid: use letters, digits, '-' and '_'")
        if isinstance(partitions, str):
            raise ConfigError(f"partitions is the text {partitions!r}; expected a list of partitions")
        self.stream = stream
        self.template = Template(subject)
        self.partitions = None if partitions is None else tuple(partitions)
        self.overrides: Mapping[str, Any] = dict(settings)
        self._handler: Handler | None = None

    def handler(self, function: _H) -> _H:
        """Register the handler: `async def` runs on the event loop, a plain function in a thread."""
        if not callable(function):
            raise ConfigError(f"a handler must be a function that takes a message, got {function!r}")
        if self._handler is not None:
            raise ConfigError("this app has a handler already; one app has exactly one")
        self._handler = function
        return function

    def worker(self, **overrides: Any) -> Worker:
        """Make a worker of this app; arguments beat the app's own settings.

        Raises `HandlerMissing` or `ConfigError` before anything is touched.
        """
        if self._handler is None:
            raise HandlerMissing("the app has no handler; decorate a function that takes a message with @app.handler")
        given = {k: v for k, v in overrides.items() if v is not None}
        settings = load_settings({**self.overrides, **given})
        return Worker(settings, Job(self.stream, self.template, self.partitions, self._handler))

    @asynccontextmanager
    async def running(self, **overrides: Any) -> AsyncIterator[Worker]:
        """Run a worker inside this process for the length of a `with` block; it drains at the end."""
        worker = self.worker(**overrides)
        await worker.start()
        worker.announce()
        try:
            yield worker
        finally:
            await worker.stop()
