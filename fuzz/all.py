"""Fuzz all targets, one after the other: `python -m fuzz.all --seconds 1800`; `make fuzz`.

The fleet gets a quarter of the time, the commands an eighth, the others share the rest evenly. Each target runs in a
process of its own, so that one that hangs or dies is a crash of that target and nothing more.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fuzz.engine import HANGS_S, Outcome, has_atheris
from fuzz.run import line_of
from fuzz.target import BUILD
from fuzz.targets import FLEET, NAMES

_SHARES = {FLEET: 1 / 4, "commands": 1 / 8}
_GRACE_S = 4 * HANGS_S
_COVERAGE = re.compile(rb"\bcov: (\d+)")
_ARTIFACTS = ("crash-", "timeout-", "oom-", "leak-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as asked; 1 when something crashed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.all", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="over all targets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="*", choices=(*NAMES, FLEET), default=[*NAMES, FLEET])
    parser.add_argument("--results", type=Path, default=BUILD)
    options = parser.parse_args(arguments)
    if not has_atheris():
        print("atheris is not installed, so coverage is not followed: a mutation loop makes all inputs", flush=True)
    began_s, outcomes = time.monotonic(), []
    for name, seconds in shares(options.targets, options.seconds).items():
        outcome = _run(name, seconds, options.seed, options.results)
        print(line_of(outcome), flush=True)
        outcomes.append(outcome)
    crashes = sum(len(outcome.crashes) for outcome in outcomes)
    print(
        f"{'all':<10}{sum(outcome.inputs for outcome in outcomes):>12,} inputs in "
        f"{time.monotonic() - began_s:,.0f} s over {len(outcomes)} targets, {crashes} crashes"
    )
    return 1 if crashes else 0


def shares(names: Sequence[str], seconds: float) -> dict[str, float]:
    """How long each target runs."""
    fixed = {name: _SHARES[name] * seconds for name in names if name in _SHARES}
    others = [name for name in names if name not in fixed]
    if not others:
        return {name: seconds / len(fixed) for name in fixed}
    rest = (seconds - sum(fixed.values())) / len(others)
    return {name: fixed.get(name, rest) for name in names}


def _run(name: str, seconds: float, seed: int, results: Path) -> Outcome:
    directory = results / name
    directory.mkdir(parents=True, exist_ok=True)
    result, log = directory / "result.json", directory / "log.txt"
    result.unlink(missing_ok=True)
    before = {path.name for path in directory.iterdir()}
    command = [sys.executable, "-m", "fuzz.run", name, "--seconds", f"{seconds:.0f}", "--seed", str(seed)]
    began_s, trouble = time.monotonic(), ""
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                [*command, "--results", str(results)],
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds + _GRACE_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code, trouble = -1, f"it did not end within {_GRACE_S} s of its time"
    said = log.read_bytes()
    outcome = Outcome(**json.loads(result.read_text())) if result.exists() else Outcome(name, "unknown")
    found = _COVERAGE.findall(said)
    outcome.coverage = int(found[-1]) if found else None
    outcome.seconds = outcome.seconds or time.monotonic() - began_s
    for path in directory.iterdir():
        known = path.name in before or str(path) in outcome.files.values() or path.suffix == ".txt"
        if path.name.startswith(_ARTIFACTS) and not known:
            outcome.crashes[path.name] = 1
            outcome.files[path.name] = str(path)
    if (code not in {0, 1} or not outcome.inputs) and not outcome.crashes:
        trouble = trouble or f"its process ended with {code}"
    if trouble:
        outcome.crashes[f"{trouble}, see {log}"] = 1
    return outcome


if __name__ == "__main__":
    sys.exit(main())
