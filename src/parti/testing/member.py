"""One worker of a fleet inside the test's process, which can be paused and killed as if it were a process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from parti.app.worker import Job, Worker
from parti.config import Settings
from parti.coordination.hooks import Hooks
from parti.model.message import Message
from parti.testing.link import Link
from parti.testing.steps import Point, stepped

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(slots=True)
class Call:
    """One call of the handler."""

    partition: str
    seq: int
    attempt: int
    worker: str
    fence: int
    outcome: Literal["running", "returned", "raised", "killed"] = "running"
    error: BaseException | None = None
    """What it raised."""


class Member:
    """A worker, its link to the server, and the calls of its handler.

    `kill` is what SIGKILL is to a process: nothing of it runs any more, no `finally` block and no hook, and nothing
    that it had not sent reaches the server. `pause` is SIGSTOP, `resume` SIGCONT, with the clock past the lease.
    """

    def __init__(
        self,
        link: Link,
        calls: list[Call],
        graveyard: list[Coroutine[Any, Any, Any]],
        on_point: Callable[[Member, Message, Point], Coroutine[Any, Any, None] | None],
        on_change: Callable[[], None],
    ) -> None:
        self.dead = False
        self.link = link
        self._calls = calls
        self._graveyard = graveyard
        self._on_point = on_point
        self._on_change = on_change
        self._running: dict[int, Call] = {}
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._ending: asyncio.Task[None] | None = None
        self._worker: Worker | None = None

    async def start(self, settings: Settings, job: Job, hooks: Hooks) -> None:
        """Join the fleet; returns when the worker holds an id."""
        guarded = Hooks(
            [self._guarded(hook) for hook in hooks.on_assignment_changed],
            [self._guarded(hook) for hook in hooks.on_state_changed],
            [self._guarded(hook) for hook in hooks.on_error],
        )
        settings = settings.model_copy(update={"nats": (self.link.url,)})
        self._worker = Worker(settings, replace(job, handler=stepped(job.handler, self)), guarded)
        await self._worker.start()

    @property
    def worker(self) -> Worker:
        """The worker itself."""
        assert self._worker
        return self._worker

    @property
    def id(self) -> str:
        """The worker id that it holds, or held last."""
        return self.worker.worker_id

    @property
    def paused(self) -> bool:
        """Whether it stands still."""
        return not self._goes_on.is_set()

    @property
    def busy(self) -> bool:
        """Whether a handler runs on it."""
        return bool(self._running) and not self.dead

    def kill(self) -> None:
        """Let it die now."""
        self.dead = True
        self.link.cut()
        for call in self._running.values():
            call.outcome = "killed"
        self._ending = asyncio.ensure_future(self.worker.vanish())

    def pause(self) -> None:
        """Stop it where it is."""
        self.link.silence(True)
        self._goes_on.clear()

    def resume(self) -> None:
        """Let it go on, after a time that was longer than its lease."""
        manager = self.worker.manager
        assert manager
        manager.lapse()
        self.link.silence(False)
        self._goes_on.set()

    async def stop(self) -> None:
        """End in order, or finish dying; the link goes too."""
        if not self.dead and self.paused:
            self.resume()
        if self._ending:
            await self._ending
        elif self._worker:
            await self._worker.stop()
        await self.link.close()

    # ── what its handler's steps ask ──────────────────────────────────────────────────────────────────────────

    def hold(self) -> Coroutine[Any, Any, None] | None:
        """What keeps its handlers from going on."""
        if self.dead:
            return _for_ever()
        return self._resumed() if self.paused else None

    async def _resumed(self) -> None:
        await self._goes_on.wait()

    def reach(self, message: Message, point: Point) -> Coroutine[Any, Any, None] | None:
        """One of its handlers is at a point."""
        return None if self.dead else self._on_point(self, message, point)

    def began(self, message: Message) -> None:
        """A handler was called."""
        call = Call(message.partition.id, message.seq, message.attempt, message.worker_id, message.fence)
        self._running[message.seq] = call
        self._calls.append(call)

    def ended(self, message: Message, error: BaseException | None) -> None:
        """A handler has returned or raised."""
        call = self._running.pop(message.seq, None)
        if call and not self.dead:
            call.outcome, call.error = "raised" if error else "returned", error
        self._on_change()

    def bury(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Keep a handler that is never continued."""
        self._graveyard.append(coroutine)

    def _guarded(self, hook: _F) -> _F:
        """The same hook, until this worker is dead."""

        async def call(*arguments: Any) -> None:
            if not self.dead:
                result = hook(*arguments)
                if inspect.isawaitable(result):
                    await result

        return call  # type: ignore[return-value]


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()
