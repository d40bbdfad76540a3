"""What do acknowledgements cost, and what is left when positions are kept elsewhere?

    python -m benchmarks.acks --rounds 5

Each way to acknowledge drains the same messages (256 B over 2000 subjects) through a fresh durable pull consumer:

- `file, wildcard`: one wildcard filter on the file stream;
- `mirror, 80 of 2000`: 80 filters on a memory mirror of it; several consumers one after the other, each with 80
  others, since one has too few messages.

The ways: explicit acknowledgements, each a write to the socket of its own; explicit ones, those of a chunk joined
into one write; `ack_policy` all, one acknowledgement for each chunk; none at all. Rounds are interleaved, in another
order each, ratios are taken within a round, and medians count. CPU is that of the whole process, from the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from typing import Any

from benchmarks.drains import PATTERN, STREAM, Acks, Drained, Source, drain, drain_mirror, filled
from benchmarks.report import LiveLine, machine, write_result
from rich.console import Console
from rich.table import Table

from parti.telemetry.logs import configure_logging

FILE, HOT = "file, wildcard", "mirror, 80 of 2000"
Rows = dict[str, dict[Acks, list[Drained]]]


async def one(source: Source, setup: str, acks: Acks, consumers: int, name: str) -> Drained:
    """Drain one setup in one way."""
    if setup == FILE:
        return await drain(source, STREAM, [PATTERN], acks, name)
    return await drain_mirror(source, acks, consumers, name)


async def run(args: argparse.Namespace) -> Rows:
    """All ways in each round."""
    live, ways = LiveLine(), list(Acks)
    rows: Rows = {setup: {acks: [] for acks in ways} for setup in (FILE, HOT)}
    live.show(f"publishing {args.messages:,} messages")
    async with filled(args.messages, args.subjects) as source:
        for number in range(args.rounds):
            turn = number % len(ways)
            for setup in rows:
                for acks in ways[turn:] + ways[:turn]:
                    live.show(f"round {number + 1} of {args.rounds}: {setup}, {acks}")
                    name = f"{acks.name.lower()}-{number}"
                    rows[setup][acks].append(await one(source, setup, acks, args.consumers, name))
    live.end()
    return rows


def summary(rows: dict[Acks, list[Drained]]) -> dict[str, dict[str, Any]]:
    """Medians of one setup; `times_single` against single writes in the same round."""
    single = rows[Acks.SINGLE]
    found = {}
    for acks, drained in rows.items():
        times = [row.msg_per_s / other.msg_per_s for row, other in zip(drained, single, strict=True)]
        found[acks.name.lower()] = {
            "msg_per_s": round(statistics.median(row.msg_per_s for row in drained)),
            "times_single": round(statistics.median(times), 3),
            "reader_cpu_us_per_msg": round(statistics.median(row.reader_us for row in drained), 2),
            "server_cpu_us_per_msg": round(statistics.median(row.server_us for row in drained), 2),
            "messages_per_round": drained[0].messages,
            "rounds_msg_per_s": [round(row.msg_per_s) for row in drained],
        }
    return found


def show(setup: str, found: dict[str, dict[str, Any]]) -> None:
    """One setup as a table."""
    table = Table(title=setup, title_justify="left")
    for column in ("acknowledgements", "msg/s", "x single", "reader us/msg", "server us/msg", "rounds"):
        table.add_column(column, justify="left" if column == "acknowledgements" else "right")
    for name, row in found.items():
        table.add_row(
            Acks[name.upper()].value,
            f"{row['msg_per_s']:,}",
            f"{row['times_single']:.2f}",
            f"{row['reader_cpu_us_per_msg']:.1f}",
            f"{row['server_cpu_us_per_msg']:.1f}",
            " ".join(f"{rate / 1000:.0f}k" for rate in row["rounds_msg_per_s"]),
        )
    # A fixed width where there is no terminal: nothing may be cut in a log.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> int:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--subjects", type=int, default=2_000)
    parser.add_argument("--consumers", type=int, default=6, help="that drain the mirror one after the other")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", default="acks", help="name of the JSON file, without ending")
    args = parser.parse_args()
    configure_logging("error")
    described = machine()
    results = {setup: summary(rows) for setup, rows in asyncio.run(run(args)).items()}
    for setup, found in results.items():
        show(setup, found)
    path = write_result(args.result, {"machine": described, "settings": vars(args), "results": results})
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
