"""Runs the same random operations on the model and on a real nats-server and compares every answer.

    python -m tests.sim.differential --seeds 1000 [--first 0] [--length 60]

prints the first seed whose answers differ and the shortest list of operations found that still shows it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence

from tests.sim.backends import Model, Real
from tests.sim.comparison import DifferenceError, Op
from tests.sim.run import FILTERS, ROOTS, Run, Setup

from parti.embedded import Server

# ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────

_CONSUMERS = ("A", "B", "C")
_WEIGHTS = {
    "publish": 22,
    "cas": 4,
    "batch": 3,
    "consumer": 12,
    "hold": 3,
    "watch": 2,
    "pull": 14,
    "leave": 3,
    "ack": 22,
    "forge": 2,
    "reset": 3,
    "delete consumer": 3,
    "delete": 2,
    "purge": 2,
    "read": 5,
    "info": 10,
    "names": 1,
}


def choose_setup(rng: random.Random) -> Setup:
    retention = rng.choice(("limits", "limits", "workqueue", "interest"))
    per_subject = rng.choice((-1, -1, 1, 2)) if retention == "limits" else -1
    limit = rng.choice((-1, -1, -1, 6)) if per_subject == -1 and retention == "limits" else -1
    return Setup(retention, rng.choice(("memory", "memory", "file")), per_subject, limit)


def choose_ops(rng: random.Random, setup: Setup, length: int) -> list[Op]:
    kinds = [kind for kind in _WEIGHTS if kind != "watch" or setup.kv]
    weights = [_WEIGHTS[kind] for kind in kinds]
    start: list[Op] = [("consumer", name, rng.randrange(7), "create", 1000, False) for name in _CONSUMERS[:2]]
    return start + [_choose(rng, rng.choices(kinds, weights)[0], setup) for _ in range(length)]


def _choose(rng: random.Random, kind: str, setup: Setup) -> Op:
    root, name, seq = rng.choice(ROOTS), rng.choice(_CONSUMERS), rng.randrange(1, 24)
    many = rng.randrange(2, 4)
    wide = ">" if setup.storage == "memory" else root
    choices: dict[str, Callable[[], Op]] = {
        "publish": lambda: (kind, root, rng.choice((1, 1, 100)), rng.choice(("", "", "", "", "m1", "m2"))),
        "cas": lambda: (kind, root, rng.choice((0, 0, 1, -1)), rng.choice(("", "", rng.choice(ROOTS)))),
        "batch": lambda: (
            kind,
            tuple(rng.choice(ROOTS) for _ in range(many)),
            tuple(rng.choice((0, 0, 0, 1, 9)) for _ in range(many)),
            rng.choice((0, 0, 0, 1, 2)),
        ),
        "consumer": lambda: (
            kind,
            name,
            rng.randrange(len(FILTERS)) if rng.random() < 0.3 else rng.randrange(7),
            rng.choice(("create", "update", "update", "update", "")),
            rng.choice((1000, 1000, 3)),
            rng.random() < 0.5,
        ),
        "hold": lambda: (kind, rng.choice(("H", "I")), rng.randrange(6), seq),
        "watch": lambda: (kind, rng.choice(("W", "V")), rng.randrange(6)),
        "pull": lambda: (
            kind,
            name,
            rng.choice((1, 2, 5, 10)),
            rng.choice((0, 0, 0, 200, 1000)),
            rng.random() < 0.2,
            rng.choice((0, 100, 100)),
        ),
        "leave": lambda: (kind, rng.randrange(100)),
        "ack": lambda: (
            kind,
            -rng.randrange(1, 8) if rng.random() < 0.8 else rng.randrange(100),
            rng.choice((b"", b"+ACK", b"+ACK", b"+ACK", b"+ACK", b"-NAK", b"+TERM", b"+WPI")),
        ),
        "forge": lambda: (kind, name, seq, rng.randrange(1, 12)),
        "reset": lambda: (
            kind,
            rng.choice((name, name, "H")),
            rng.choice((1, seq, seq) if setup.discards else (-1, 0, 1, seq, seq)),
        ),
        "delete consumer": lambda: (kind, rng.choice((name, "H", "I"))),
        "delete": lambda: (kind, seq),
        "purge": lambda: (kind, rng.choice(("", root, root, wide)), *rng.choice(((0, 0), (seq, 0), (0, 1)))),
        "read": lambda: (
            kind,
            rng.choice(("seq", "last", "next", "direct", "direct last", "direct batch", "direct all")),
            rng.choice((root, root, ">")),
            seq,
            rng.choice((1, 2, 5, 50)),
        ),
        "info": lambda: (kind, rng.choice(("", name, name, name))),
        "names": lambda: (kind,),
    }
    return choices[kind]()


# ── many runs ─────────────────────────────────────────────────────────────────────────────────────────────────


def plan(seed: int, length: int) -> tuple[Setup, list[Op]]:
    """What a seed stands for."""
    rng = random.Random(seed)
    setup = choose_setup(rng)
    return setup, choose_ops(rng, setup, length)


def find_difference(real: Real, setup: Setup, ops: Sequence[Op]) -> DifferenceError | None:
    """Run operations on both sides; None when all answers agree."""
    run = Run(Model(), real, setup)
    run.begin()
    try:
        for op in ops:
            run.do(op)
        for consumer in ("", *sorted(run.model.server.streams[run.name].consumers)):
            run.do(("info", consumer))
    except DifferenceError as difference:
        return difference
    finally:
        run.end()
    return None


def shrink(real: Real, setup: Setup, ops: Sequence[Op]) -> list[Op]:
    """Leave out what is not needed for the two to differ."""
    kept = list(ops)
    size = max(1, len(kept) // 2)
    while True:
        begin = 0
        while begin < len(kept):
            fewer = kept[:begin] + kept[begin + size :]
            if find_difference(real, setup, fewer) is not None:
                kept = fewer
            else:
                begin += size
        if size == 1:
            return kept
        size = max(1, size // 2)


def check_seeds(url: str, seeds: Sequence[int], length: int) -> str:
    """Run all seeds; what differs, in words, or nothing."""
    real = Real(url)
    try:
        real.subscribe("_INBOX.keeper", 2)
        config = {"name": "KEEPER", "subjects": ["keeper"], "storage": "file"}
        real.publish("$JS.API.STREAM.CREATE.KEEPER", json.dumps(config).encode(), "_INBOX.keeper", None)
        real.collect(1)
        for seed in seeds:
            setup, ops = plan(seed, length)
            difference = find_difference(real, setup, ops)
            if difference is not None:
                fewest = shrink(real, setup, ops[: difference.step + 1])
                again = find_difference(real, setup, fewest) or difference
                listed = "\n".join(f"    {op!r}," for op in fewest)
                return f"seed {seed}: {setup}\n  ops = [\n{listed}\n  ]\n{again}"
        return ""
    finally:
        real.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--length", type=int, default=60)
    options = parser.parse_args()
    began_s = time.monotonic()
    with Server() as server:
        trouble = check_seeds(server.url, range(options.first, options.first + options.seeds), options.length)
    print(trouble or f"{options.seeds} seeds, no difference, {time.monotonic() - began_s:.0f} s")
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
