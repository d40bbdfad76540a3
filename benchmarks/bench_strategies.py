"""How long each strategy takes, and how much it moves when workers join or leave.

    python -m benchmarks.bench_strategies --rounds 3

Every strategy assigns 2,000 partitions to 25 workers and 1,000,000 to 10,000, without a previous assignment (cold)
and then, each time from that one, after one worker joined, after one left, and after many joined at once. Partitions
come in random order. `moved` counts the partitions that left a worker that is still there; `minimum` is what a
balanced assignment needs at least. Moves are the same in every round. Of the times the median counts; clock and
processor differ where the machine does other work too.

Exit code 1 when sticky or hash moves more than 5 % above the minimum, or anything takes longer than `--limit-s` of
processor time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.report import machine, write_result
from rich.console import Console
from rich.table import Table

from parti.strategies import STRATEGY_NAMES, Slot, Strategy, minimum_moves, strategy_named

SIZES = ((2_000, 25, 75), (1_000_000, 10_000, 100))
"""Partitions, workers, and how many join at once."""


@dataclass(frozen=True)
class Row:
    """One strategy after one change of the fleet."""

    partitions: int
    workers: int
    strategy: str
    change: str
    wall_s: list[float]
    cpu_s: list[float]
    moved: int
    minimum: int
    least_held: int
    most_held: int

    @property
    def median_cpu_s(self) -> float:
        """Processor time of one call."""
        return statistics.median(self.cpu_s)

    @property
    def within_promise(self) -> bool:
        """Whether what should move little moved little."""
        return self.strategy not in {"sticky", "hash"} or self.moved <= self.minimum * 1.05


def fleet(first: int, last: int) -> list[Slot]:
    """Return workers with the numbers from `first` to before `last`."""
    return [Slot(f"worker-{i}") for i in range(first, last)]


def measure(
    strategy: Strategy,
    change: str,
    partitions: Sequence[str],
    workers: Sequence[Slot],
    previous: Mapping[str, str],
    rounds: int,
) -> tuple[Row, dict[str, str]]:
    """Time the same call several times."""
    wall_s, cpu_s, result = list[float](), list[float](), dict[str, str]()
    for _ in range(rounds):
        wall_started, cpu_started = time.perf_counter(), time.process_time()
        result = strategy.assign(partitions, workers, previous)
        wall_s.append(time.perf_counter() - wall_started)
        cpu_s.append(time.process_time() - cpu_started)
    living = {slot.worker for slot in workers}
    moved = sum(1 for p, worker in previous.items() if worker in living and result[p] != worker)
    counts = Counter(result.values())
    row = Row(
        partitions=len(partitions),
        workers=len(workers),
        strategy=strategy.name,
        change=change,
        wall_s=wall_s,
        cpu_s=cpu_s,
        moved=moved,
        minimum=minimum_moves(partitions, workers, previous),
        least_held=min(counts[name] for name in living),
        most_held=max(counts.values()),
    )
    return row, result


def run(rounds: int) -> list[Row]:
    """Measure all strategies at all sizes."""
    rows: list[Row] = []
    with Console(stderr=True).status("") as status:
        for count, workers, joining in SIZES:
            partitions = [f"tool-{i // 100}.c{i % 100}" for i in range(count)]
            random.Random(1).shuffle(partitions)
            for name in STRATEGY_NAMES:
                status.update(f"{name}: {count:,} partitions, {workers:,} workers")
                strategy = strategy_named(name)
                row, cold = measure(strategy, "cold", partitions, fleet(0, workers), {}, rounds)
                rows.append(row)
                changes = {
                    "one joins": fleet(0, workers + 1),
                    "one leaves": fleet(1, workers),
                    f"{joining} join": fleet(0, workers + joining),
                }
                for change, slots in changes.items():
                    rows.append(measure(strategy, change, partitions, slots, cold, rounds)[0])
    return rows


def show(rows: Sequence[Row], rounds: int) -> None:
    """Print a table for each size."""
    for count, workers, _ in SIZES:
        table = Table(title=f"{count:,} partitions, {workers:,} workers, median of {rounds}")
        for column in ("strategy", "change", "clock s", "cpu s", "moved", "minimum", "held"):
            table.add_column(column, justify="left" if column in {"strategy", "change"} else "right")
        for row in rows:
            if row.partitions == count:
                table.add_row(
                    row.strategy if row.change == "cold" else "",
                    row.change,
                    f"{statistics.median(row.wall_s):.3f}",
                    f"{row.median_cpu_s:.3f}",
                    "" if row.change == "cold" else f"{row.moved:,}",
                    "" if row.change == "cold" else f"{row.minimum:,}",
                    f"{row.least_held} to {row.most_held}",
                    end_section=row.change.endswith(" join"),
                )
        Console().print(table)


def main() -> int:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=30.0, help="most processor time of one assignment")
    parser.add_argument("--result", default="bench_strategies", help="name of the JSON file, without ending")
    args = parser.parse_args()
    # Described before the run: the load afterwards would be that of the run itself.
    where = machine()
    rows = run(args.rounds)
    show(rows, args.rounds)
    data = [asdict(row) | {"median_cpu_s": row.median_cpu_s} for row in rows]
    path = write_result(args.result, {"machine": where, "settings": vars(args), "rows": data})
    slowest = max(rows, key=lambda row: row.median_cpu_s)
    good = all(row.within_promise for row in rows) and slowest.median_cpu_s <= args.limit_s
    print(
        f"slowest {slowest.median_cpu_s:.1f} s of processor time ({slowest.strategy}, {slowest.change}; "
        f"at most {args.limit_s:g}), sticky and hash within 5 % of the minimum: {'ok' if good else 'NOT MET'}"
    )
    print(f"written to {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
