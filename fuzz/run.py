"""Fuzz one target: `python -m fuzz.run TARGET [--seconds N] [--inputs N] [--seed N] [--replay FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fuzz.engine import Outcome, be_quiet, has_atheris, run_atheris, run_mutations
from fuzz.target import BUILD, Crashes
from fuzz.targets import FLEET, NAMES, load

ENGINES = ("auto", "atheris", "mutation")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as asked; 1 when something crashed."""
    options = _parser().parse_args(arguments)
    directory = options.results / options.target
    if options.target == FLEET:
        from fuzz.fleet import main_of  # noqa: PLC0415 - starts servers, which other targets do not need

        return main_of(options, directory)
    be_quiet()
    if options.replay is not None:
        return _replay(options.target, options.replay)
    crashes, result = Crashes(directory), directory / "result.json"
    result.unlink(missing_ok=True)
    seconds, inputs = options.seconds, options.inputs
    atheris = options.engine == "atheris" or (options.engine == "auto" and has_atheris())
    if atheris and options.target not in _SERVERS:
        run_atheris(lambda: load(options.target), crashes, result, seconds=seconds, inputs=inputs, seed=options.seed)
    target = load(options.target)
    with target.opened():
        outcome = run_mutations(target, crashes, seconds=seconds, inputs=inputs, seed=options.seed)
    outcome.write(result)
    print(line_of(outcome))
    return 1 if outcome.crashes else 0


_SERVERS = frozenset({"commands"})
"""Targets with a server, whose work is done elsewhere: coverage would say nothing."""


def line_of(outcome: Outcome) -> str:
    """One line that says what has come out, and for each crash how to see it again."""
    rate = outcome.inputs / outcome.seconds if outcome.seconds else 0.0
    coverage = "" if outcome.coverage is None else f", {outcome.coverage:,} edges"
    lines = [
        f"{outcome.target:<10}{outcome.inputs:>12,} inputs {rate:>9,.0f}/s{coverage}, {outcome.engine}, "
        f"{len(outcome.crashes)} crashes"
    ]
    for where, count in outcome.crashes.items():
        replay = f"python -m fuzz.run {outcome.target} --replay {outcome.files.get(where, '?')}"
        lines.append(f"    {count:,} x {where}; replay: {replay}")
    return "\n".join(lines)


def _replay(name: str, file: Path) -> int:
    """Try one input and let its error through."""
    target = load(name)
    with target.opened():
        target.one(file.read_bytes())
    print(f"{name}: {file} does no harm")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuzz.run", description=__doc__)
    parser.add_argument("target", choices=(*NAMES, FLEET))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="auto: atheris where it is installed")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try the input in this file, and nothing else")
    parser.add_argument("--results", type=Path, default=BUILD, help="where crashing inputs are kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
