"""What parti's code sees otherwise during a run: clocks, chance, logs.

Only names are replaced, and all of them are put back. A name bound at import (`clock = time.perf_counter`) is
replaced in every module of parti that has it, so that no module has to know of the simulation.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import Any

from parti.sim.loop import CURRENT, VirtualLoop
from parti.sim.process import Process

EPOCH_S = 1_700_000_000.0
"""Wall-clock time at the beginning of each run."""

_real_time, _real_monotonic, _real_perf_counter = time.time, time.monotonic, time.perf_counter
_active: VirtualLoop | None = None


class Patches:
    """Attributes that are replaced, and put back in the opposite order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: object) -> None:
        """Replace an attribute of a module or a class, or override one that the class inherits."""
        getattr(target, name)  # A patch of something that is not there any more would be no patch.
        self._undo.append((target, name, vars(target).get(name, _INHERITED)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            target, name, value = self._undo.pop()
            if value is _INHERITED:
                delattr(target, name)
            else:
                setattr(target, name, value)


_INHERITED = object()


@contextmanager
def simulated(logger: object | None = None) -> Iterator[Patches]:
    """Let parti's code read simulated clocks and log to `logger` (nowhere by default) inside this block.

    Chance comes from the `random` module, which each run seeds for itself; its state is put back too.
    """
    fakes: dict[object, object] = {_real_time: _wall, _real_monotonic: _monotonic, _real_perf_counter: _monotonic}
    silence, state, patches = logger or _Silence(), random.getstate(), Patches()
    try:
        for name, module in sorted(sys.modules.items()):
            if name.startswith("parti.") and not name.startswith("parti.sim"):
                _patch_module(patches, module, fakes, silence, tells_time=not name.startswith(_STRUCTS))
        for attribute, real in (
            ("time", _real_time),
            ("monotonic", _real_monotonic),
            ("perf_counter", _real_perf_counter),
        ):
            patches.set(time, attribute, fakes[real])
        patches.set(uuid, "uuid4", _uuid4)
        yield patches
    finally:
        patches.undo()
        random.setstate(state)


_STRUCTS = ("parti.model", "parti.core", "parti.jetstream")
"""Where `datetime` names the type of a field, or parses: nobody there asks it for the time."""


def _patch_module(
    patches: Patches, module: object, fakes: dict[object, object], logger: object, *, tells_time: bool
) -> None:
    for attribute, value in list(vars(module).items()):
        if type(value).__name__ == "BoundLoggerLazyProxy":
            patches.set(module, attribute, logger)
        elif value is datetime and tells_time:
            patches.set(module, attribute, _Datetime)
        elif getattr(value, "__module__", None) == "time" and value in fakes:
            patches.set(module, attribute, fakes[value])


@contextmanager
def clocks_of(loop: VirtualLoop) -> Iterator[None]:
    """Make this loop's time the simulated time; without it, clocks are real."""
    global _active  # noqa: PLW0603 - there is one `time` module, and so one simulated time
    before, _active = _active, loop
    try:
        yield
    finally:
        _active = before


def _monotonic() -> float:
    return _real_monotonic() if _active is None else _active.time()


def _wall() -> float:
    if _active is None:
        return _real_time()
    process = CURRENT.get()
    if process is None:
        return EPOCH_S + _active.now_s
    assert isinstance(process, Process)
    return EPOCH_S + process.wall_offset_s + _active.now_s * process.rate


class _Datetime(datetime):
    """`datetime` for modules that ask it for the time."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        """The simulated wall clock."""
        return datetime.fromtimestamp(_wall(), tz)


def _uuid4() -> uuid.UUID:
    return uuid.UUID(int=random.getrandbits(128), version=4)


class _Silence:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _say_nothing


def _say_nothing(*_: object, **__: object) -> None:
    """Take any log line."""
