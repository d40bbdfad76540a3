"""The app: `parti jobs run examples.transcode.app:jobs`, as often as you like."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from examples.transcode.settings import TranscodeSettings, load_transcode
from examples.transcode.transcoder import Transcoder

from parti.jobs import Job, JobApp, JobWorker


def make_app(settings: TranscodeSettings | None = None, **overrides: Any) -> JobApp:
    """A job app of these settings; `overrides` are settings of parti. Raises `ConfigError`."""
    own = settings or load_transcode()
    given = {"attempts": own.attempts, "backoff_s": own.backoff_s, **overrides}
    app = JobApp(stream=own.stream, subject=own.subject, **given)

    @app.lifespan
    def open_transcoder(worker: JobWorker) -> AbstractAsyncContextManager[Transcoder]:
        return Transcoder.opened(own, worker)

    @app.handler
    async def handle(job: Job) -> None:
        await job.resources.handle(job)

    return app


jobs = make_app()
