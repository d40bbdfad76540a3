"""A test, run again and again: each time something else happens, at another point of its handlers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import structlog

from parti.testing.run import ACTIONS, Action, AppLike, Fault, Run
from parti.testing.steps import Point

MOST_RUNS = 200


class Runner:
    """Runs apps: the value of the fixture `parti_run`, and what a scenario gets from `parti_every_await`.

    `async with runner(app) as run:` starts a server, makes the app's stream on it and starts `workers` workers of
    the app inside this process; `run` is a `Run`. The block begins when each knows what it owns. At its end the
    workers drain, and everything is gone.

    `app` may be a function that makes the app: it is called for each worker, so that nothing is shared between them
    that processes would not share. `stream` has further settings of the stream, such as `{"retention": "workqueue"}`;
    other keyword arguments are settings of parti.
    """

    def __init__(self, graveyard: list[Coroutine[Any, Any, Any]], fault: tuple[int, Fault] | None = None) -> None:
        self.runs: list[Run] = []
        self._graveyard = graveyard
        self._fault = fault

    @asynccontextmanager
    async def __call__(
        self,
        app: AppLike,
        *,
        workers: int = 2,
        fault: Fault | None = None,
        stream: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Run]:
        """Run an app for the length of a `with` block."""
        if self._fault and self._fault[0] == len(self.runs):
            fault = self._fault[1]
        run = Run(app, settings, fault, self._graveyard)
        self.runs.append(run)
        async with run._open(workers, stream or {}):
            yield run

    def every_await(self) -> EveryAwait:
        """What runs scenarios; handlers that it kills are let go of when this runner is closed."""
        return EveryAwait(self._graveyard)

    def close(self) -> None:
        """Let go of handlers that were killed: their `finally` blocks run now, when nobody looks any more."""
        for coroutine in self._graveyard:
            with suppress(Exception):
                coroutine.close()


@contextmanager
def quiet() -> Iterator[None]:
    """Log errors only, unless the test has set up logging itself: what a fleet says would drown what a test says."""
    if structlog.is_configured():
        yield
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.reset_defaults()


Scenario: TypeAlias = Callable[[Runner], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Failure:
    """A fault that the scenario did not survive, and how it ended."""

    fault: Fault
    error: BaseException


@dataclass(slots=True)
class Exploration:
    """What was tried."""

    points: list[Point] = field(default_factory=list)
    """Where handlers can be interrupted, as seen in a run without any fault."""
    tried: list[Fault] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)
    """Faults that did not happen, because the handler took another way than in the first run."""
    failures: list[Failure] = field(default_factory=list)


class BrokenError(AssertionError):
    """A scenario that holds when nothing happens, and not when something does."""

    __module__ = "parti.testing"  # where users find it, and what pytest prints

    def __init__(self, exploration: Exploration) -> None:
        self.exploration = exploration
        failures = exploration.failures
        lines = [f"  {each.fault}: {_first_line(each.error)}" for each in failures]
        super().__init__(
            f"{len(failures)} of {len(exploration.tried)} interruptions broke the scenario:\n" + "\n".join(lines)
        )


class EveryAwait:
    """Interrupts a scenario everywhere: the value of the fixture `parti_every_await`."""

    def __init__(self, graveyard: list[Coroutine[Any, Any, Any]]) -> None:
        self._graveyard = graveyard

    async def __call__(
        self, scenario: Scenario, *, actions: Sequence[Action] = ACTIONS, most_runs: int = MOST_RUNS
    ) -> Exploration:
        """Run a scenario without any fault, then once for each action at each point of its handlers.

        `scenario` takes a `Runner` and is a whole test: it makes what it needs anew, runs the app, and asserts what
        must hold. Raises what it raises when nothing happens, `BrokenError` when it fails with a fault only, and
        ValueError when there is nothing to try, more than `most_runs`, or none of it came to happen.
        """
        __tracebackhide__ = True  # pytest shows the user's own lines
        return await _explore(scenario, self._graveyard, actions, most_runs)


async def _explore(
    scenario: Scenario, graveyard: list[Coroutine[Any, Any, Any]], actions: Sequence[Action], most_runs: int
) -> Exploration:
    __tracebackhide__ = True
    unknown = sorted(set(actions) - set(ACTIONS))
    if unknown or not actions:
        named = ", ".join(unknown) or "none"
        raise ValueError(f"actions are {', '.join(ACTIONS)}, got {named}")
    undisturbed = Runner(graveyard)
    await scenario(undisturbed)
    found = Exploration([point for run in undisturbed.runs for point in run.points])
    if not found.points:
        raise ValueError("the scenario handled no message, so there is no point at which something could happen")
    if (needed := len(found.points) * len(actions)) > most_runs:
        raise ValueError(
            f"{len(found.points)} points and {len(actions)} actions are {needed} runs, more than "
            f"most_runs={most_runs}; publish fewer messages, name fewer actions, or raise most_runs"
        )
    for number, run in enumerate(undisturbed.runs):
        for point in run.points:
            for action in actions:
                await _try(scenario, graveyard, number, Fault(action, point), found)
    if found.failures:
        raise BrokenError(found) from found.failures[0].error
    if len(found.missed) == len(found.tried):
        raise ValueError(
            f"none of the {len(found.tried)} faults happened: the handlers take another way each time; "
            "make what they do depend on their messages alone"
        )
    return found


async def _try(
    scenario: Scenario, graveyard: list[Coroutine[Any, Any, Any]], number: int, fault: Fault, found: Exploration
) -> None:
    runner = Runner(graveyard, (number, fault))
    found.tried.append(fault)
    try:
        await scenario(runner)
    except (Exception, pytest.fail.Exception) as error:
        found.failures.append(Failure(fault, error))
    if not any(run.happened for run in runner.runs):
        found.missed.append(fault)


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
