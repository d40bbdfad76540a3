"""What a service developer writes for jobs: an app with a handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from parti.config import load_settings
from parti.errors import ConfigError, HandlerMissing
from parti.jobs.calls import JobHandler
from parti.jobs.scheduler import WeightedScheduler
from parti.jobs.settings import JobSettings, load_jobs
from parti.jobs.worker import JobSource, JobWorker, Lifespan
from parti.model.subjects import tokens_of

_H = TypeVar("_H", bound=JobHandler)
_L = TypeVar("_L", bound=Lifespan)


class JobApp:
    """A stream of jobs and the handler that does them.

    `subject` may have wildcards. The stream is made if it does not exist. Further keyword arguments are settings, of
    jobs (`max_capacity`, `ack_wait_minutes`, ...) or general ones (`nats`, `attempts`, ...); they beat environment
    and `parti.toml`. Start as many workers as you like with `parti jobs run MODULE:APP`.

    Example:
        jobs = parti.jobs.JobApp(stream="MEDIA", subject="media.uploaded", max_capacity=14)

        @jobs.handler
        async def handle(job: parti.jobs.Job) -> None:
            for record in job.records:
                async with job.slots(4):
                    await transcode(record)
    """

    def __init__(self, *, stream: str, subject: str, **settings: Any) -> None:
        if not stream or any(c in stream for c in ".*> \t\r\n/\\"):
            raise ConfigError(f"stream name {stream!r} is not valid: use letters, digits, '-' and '_'")
        tokens_of(subject)
        self.stream = stream
        self.subject = subject
        self.overrides: Mapping[str, Any] = dict(settings)
        self._handler: JobHandler | None = None
        self._lifespan: Lifespan | None = None

    def handler(self, function: _H) -> _H:
        """Register the handler: `async def` runs on the event loop, a plain function in a thread."""
        if not callable(function):
            raise ConfigError(f"a handler must be a function that takes a job, got {function!r}")
        if self._handler is not None:
            raise ConfigError("this app has a handler already; one app has exactly one")
        self._handler = function
        return function

    def lifespan(self, function: _L) -> _L:
        """Register what the handler needs for as long as a worker runs: an async context manager, given the worker.

        It is entered before the first job is received and left after the last one has ended; what it yields is
        `job.resources`. What it raises at its entry keeps the worker from starting.

        Example:
            @jobs.lifespan
            @asynccontextmanager
            async def connect(worker: parti.jobs.JobWorker) -> AsyncIterator[Store]:
                async with open_store(worker.settings) as store:
                    yield store
        """
        if self._lifespan is not None:
            raise ConfigError("this app has a lifespan already; one app has at most one")
        self._lifespan = function
        return function

    def worker(self, *, scheduler: WeightedScheduler | None = None, **overrides: Any) -> JobWorker:
        """Make a worker of this app; arguments beat the app's own settings.

        `scheduler`: slots that this worker is to share with others of the process. Raises `HandlerMissing` or
        `ConfigError` before anything is touched.
        """
        if self._handler is None:
            raise HandlerMissing("the app has no handler; decorate a function that takes a job with @jobs.handler")
        given = {**self.overrides, **{k: v for k, v in overrides.items() if v is not None}}
        own = {name: value for name, value in given.items() if name in JobSettings.model_fields}
        general = {name: value for name, value in given.items() if name not in JobSettings.model_fields}
        source = JobSource(self.stream, self.subject, self._handler, self._lifespan)
        return JobWorker(load_settings(general), load_jobs(own), source, scheduler)

    @asynccontextmanager
    async def running(self, **overrides: Any) -> AsyncIterator[JobWorker]:
        """Run a worker inside this process for the length of a `with` block; it drains at the end."""
        worker = self.worker(**overrides)
        await worker.start()
        worker.announce()
        try:
            yield worker
        finally:
            await worker.stop()
