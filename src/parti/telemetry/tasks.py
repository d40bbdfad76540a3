"""Background tasks that do not die unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from parti.telemetry.health import Health

_log = structlog.get_logger("parti.tasks")


def watched(coroutine: Coroutine[Any, Any, None], name: str, health: Health) -> asyncio.Task[None]:
    """Start a background task; should it end by an exception, that is logged and `task-<name>` signalled."""

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a background task died", task=name, exc_info=error)
            health.raise_signal(f"task-{name}", f"background task {name!r} died: {error!r}; restart the worker")

    task = asyncio.get_running_loop().create_task(coroutine, name=f"parti-{name}")
    task.add_done_callback(ended)
    return task
