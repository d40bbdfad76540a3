"""What a service developer writes: an app with a handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from parti.app.worker import Job, Worker
from parti.config import Settings, load_settings
from parti.coordination.hooks import AssignmentHook, ErrorHook, Hooks, StateHook
from parti.coordination.sources import SourceLike, as_source
from parti.errors import ConfigError, HandlerMissing
from parti.model.partition import Template
from parti.strategies import strategy_named
from parti.strategies.interface import Strategy
from parti.worker.runners import Handler

_H = TypeVar("_H", bound=Handler)
_A = TypeVar("_A", bound=AssignmentHook)
_S = TypeVar("_S", bound=StateHook)
_E = TypeVar("_E", bound=ErrorHook)


class App:
    """A stream, the partitions of it, and the handler of their messages.

    `subject` is a template such as `dc.{tool}.{chamber}.completion`. `partitions` lists the key values, or is a
    function that returns them, a `SubjectMapping` or another source; left out, every subject in the stream that fits
    the template is a partition. `strategy`, a name or an object, decides how a fleet shares them; `weights` are the
    loads of single partitions by id, or a quick function that returns them, for strategies that care. Further keyword
    arguments are settings, which beat environment and `parti.toml`.

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
        partitions: SourceLike = None,
        strategy: Strategy | str | None = None,
        weights: Mapping[str, float] | Callable[[], Mapping[str, float]] | None = None,
        **settings: Any,
    ) -> None:
        if not stream or any(c in stream for c in ".*> \t\r\n/\\"):
            raise ConfigError(f"stream name {stream!r} is not valid: use letters, digits, '-' and '_'")
        self.stream = stream
        self.template = Template(subject)
        self.source = as_source(partitions)
        self.strategy = strategy_named(strategy) if isinstance(strategy, str) else strategy
        self.weights = weights if callable(weights) else (lambda: weights)
        self.hooks = Hooks()
        self._every_subject = partitions is None
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

    def on_assignment_changed(self, function: _A) -> _A:
        """Register a hook: called with the old and the new partitions before this worker reads the new ones."""
        self.hooks.on_assignment_changed.append(function)
        return function

    def on_state_changed(self, function: _S) -> _S:
        """Register a hook: called with the old and the new state of this worker."""
        self.hooks.on_state_changed.append(function)
        return function

    def on_error(self, function: _E) -> _E:
        """Register a hook: called with each error that the worker met in the background and survived."""
        self.hooks.on_error.append(function)
        return function

    def worker(self, **overrides: Any) -> Worker:
        """Make a worker of this app; arguments beat the app's own settings.

        Raises `HandlerMissing` or `ConfigError` before anything is touched.
        """
        settings, job = self.job(**overrides)
        return Worker(settings, job, self.hooks)

    def job(self, **overrides: Any) -> tuple[Settings, Job]:
        """What there is to do, and with which settings; raises as `worker` does."""
        if self._handler is None:
            raise HandlerMissing("the app has no handler; decorate a function that takes a message with @app.handler")
        given = {k: v for k, v in overrides.items() if v is not None}
        settings = load_settings({**self.overrides, **given})
        source = None if self._every_subject and not settings.fleet else self.source
        strategy = self.strategy or strategy_named(settings.strategy)
        return settings, Job(self.stream, self.template, source, self._handler, strategy, self.weights)

    @asynccontextmanager
    async def running(self, **overrides: Any) -> AsyncIterator[Worker]:
        """Run a worker inside this process for the length of a `with` block; it drains at the end.

        The block begins when the worker has been told what it owns, or (`standby`) when it waits for its turn.
        """
        worker = self.worker(**overrides)
        await worker.start()
        worker.announce()
        try:
            if not worker.settings.standby:
                await worker.wait_assigned()
            yield worker
        finally:
            await worker.stop()
