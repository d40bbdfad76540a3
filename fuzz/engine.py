"""Engines: how inputs are made. Atheris follows coverage; the mutation loop needs nothing but Python."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from fuzz.mutation import MOST_BYTES, mutate
from fuzz.target import Crashes, Target

HANGS_S = 20
"""An input that takes longer is a crash."""
_NOTE_S = 1.0


class HangError(Exception):
    """An input took too long."""


@dataclass(slots=True)
class Outcome:
    """What one run of a target has come to."""

    target: str
    engine: str
    inputs: int = 0
    seconds: float = 0.0
    coverage: int | None = None
    """Edges of the code that were reached, where the engine counts them."""
    crashes: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Keep it, for who started this process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps(asdict(self)), encoding="utf-8")
        whole.replace(path)


class Trial:
    """Runs inputs through a target, counts them and keeps those that crash it."""

    def __init__(self, target: Target, crashes: Crashes, engine: str) -> None:
        self._target = target
        self._crashes = crashes
        self._began_s = time.monotonic()
        self.outcome = Outcome(target.name, engine)

    def one(self, data: bytes) -> None:
        """Try one input."""
        self.outcome.inputs += 1
        try:
            self._target.one(data)
        except Exception as error:
            if self._crashes.note(data, error):
                print(f"{self._target.name}: {next(reversed(self._crashes.found))}", file=sys.stderr, flush=True)

    def done(self) -> Outcome:
        """What has come out so far."""
        self.outcome.seconds = time.monotonic() - self._began_s
        self.outcome.crashes = dict(self._crashes.found)
        self.outcome.files = {where: str(path) for where, path in self._crashes.files.items()}
        return self.outcome


def be_quiet() -> None:
    """Have parti log nothing: lines of thousands of inputs help nobody. `texts` looks at lines by itself."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger().setLevel(logging.CRITICAL)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError(f"one input took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_mutations(target: Target, crashes: Crashes, *, seconds: float, inputs: int | None, seed: int) -> Outcome:
    """Try the seeds, then mutations of them, until the time or the number of inputs is used up."""
    chance, seeds = random.Random(f"{target.name} {seed}"), list(target.seeds())
    trial, ends_s = Trial(target, crashes, "mutation"), time.monotonic() + seconds
    for number in range(sys.maxsize if inputs is None else inputs):
        if time.monotonic() >= ends_s:
            break
        data = seeds[number] if number < len(seeds) else mutate(chance.choice(seeds), chance, seeds)
        try:
            with _alarm(HANGS_S):
                trial.one(data)
        except HangError as error:
            crashes.note(data, error)
    return trial.done()


def has_atheris() -> bool:
    """Whether atheris is installed."""
    return importlib.util.find_spec("atheris") is not None


def run_atheris(
    load: Any, crashes: Crashes, result: Path, *, seconds: float, inputs: int | None, seed: int
) -> None:  # pragma: no cover - ends the process
    """Try inputs that reach new code, until the time or the number of inputs is used up; then ends the process.

    `load` imports the target: what it imports of parti is instrumented. The outcome is in the file `result`, because
    libFuzzer never comes back.
    """
    import atheris  # noqa: PLC0415 - installed by `make fuzz` only

    ends_s = time.monotonic() + seconds
    with atheris.instrument_imports(include=["parti", "fuzz.targets"]):
        target: Target = load()
    seeds = list(target.seeds())
    trial, noted_s = Trial(target, crashes, "atheris"), time.monotonic()
    ends_s = max(ends_s, noted_s + seconds / 2)  # to instrument what is imported takes some seconds

    def one(data: bytes) -> None:
        nonlocal noted_s
        trial.one(data)
        now_s = time.monotonic()
        over = now_s >= ends_s or (inputs is not None and trial.outcome.inputs >= inputs)
        if over or now_s - noted_s > _NOTE_S:
            noted_s = now_s
            trial.done().write(result)
        if over:
            os._exit(0)

    def change(data: bytes, most: int, number: int) -> bytes:
        chance = random.Random(number)
        kind = chance.random()
        if kind < 0.4:
            return bytes(atheris.Mutate(data, most))
        # Decoders are written in C, where no coverage is seen, and so libFuzzer forgets most seeds.
        return mutate(data if kind < 0.7 else chance.choice(seeds), chance, seeds)[:most]

    with tempfile.TemporaryDirectory(prefix="parti-fuzz-") as corpus:
        for number, each in enumerate(seeds):
            (Path(corpus) / f"seed-{number:04}").write_bytes(each)
        arguments = [
            sys.argv[0],
            f"-max_len={MOST_BYTES}",
            "-len_control=0",
            f"-timeout={HANGS_S}",
            f"-seed={seed % 2**31 or 1}",
            f"-artifact_prefix={crashes.directory}/",
            corpus,
        ]
        crashes.directory.mkdir(parents=True, exist_ok=True)
        atheris.Setup(arguments, one, custom_mutator=change)
        atheris.Fuzz()
