"""What the ledger costs: the same worker with the ledger off, sampled and full, in one run on one server.

    python -m benchmarks.bench_ledger --messages 100000 --rounds 5

Each round drains the same stream (256 B messages over 2000 subjects, file storage) three times with an async handler
that does nothing, ordered, under a fresh worker id. Rounds are interleaved, each begins with another contender, and
the median counts, since the machine is never quiet. The ratio to `off` of the same round is the result; a handler
that does nothing is the worst case. The worker's own processor time says what the ledger costs whatever else runs on
the machine. Exit code 1 when `full` is below 0.7 of `off`, or the ledger lacks a row.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from typing import Any

import nats
from benchmarks.bench_worker import STREAM, TEMPLATE, fill
from benchmarks.report import write_result
from rich.console import Console
from rich.table import Table

import parti
from parti.embedded import Server
from parti.model.ledger import sample_hash, sample_limit
from parti.telemetry.logs import configure_logging

MODES = ("off", "sampled", "full")
WANTED = 0.7


async def drain(url: str, mode: str, name: str, args: argparse.Namespace) -> dict[str, float]:
    """Handle the whole stream once; messages a second, and what the ledger took."""
    app = parti.App(
        stream=STREAM,
        subject=TEMPLATE,
        nats=url,
        fleet=False,
        max_ack_pending=args.max_ack_pending,
        ledger=mode,
        ledger_sample=args.sample,
    )
    done, got, first_s, last_s, busy_s = asyncio.Event(), 0, 0.0, 0.0, 0.0

    @app.handler
    async def handle(_message: parti.Message) -> None:
        nonlocal got, first_s, last_s, busy_s
        if not got:
            first_s, busy_s = time.perf_counter(), time.process_time()
        got += 1
        if got == args.messages:
            last_s, busy_s = time.perf_counter(), time.process_time() - busy_s
            done.set()

    async with app.running(worker_id=name) as worker:
        await done.wait()
    metrics = worker.metrics
    return {
        "msg_per_s": got / (last_s - first_s),
        "cpu_us": 1e6 * busy_s / got,
        "rows": metrics.ledger_rows.value,
        "bytes": metrics.ledger_bytes.value,
        "batches": metrics.ledger_duration.count,
        "flush_s": metrics.ledger_duration.sum / max(1, metrics.ledger_duration.count),
    }


async def run(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Interleave the rounds."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    console = Console(stderr=True)
    async with Server() as server:
        client = await nats.connect(server.url)
        with console.status(f"publishing {args.messages:,} messages"):
            await fill(client, args.messages, args.subjects)
        for number in range(args.rounds):
            first = number % len(MODES)
            for mode in MODES[first:] + MODES[:first]:
                with console.status(f"round {number + 1} of {args.rounds}: {mode}"):
                    found[mode].append(await drain(server.url, mode, f"ledger-{mode}-{number}", args))
        await client.close()
    return found


def show(found: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> dict[str, Any]:
    """Print the table and return what it says."""
    ratios = {
        mode: [mine["msg_per_s"] / off["msg_per_s"] for mine, off in zip(runs, found["off"], strict=True)]
        for mode, runs in found.items()
    }
    table = Table(
        title=f"{args.messages:,} messages over {args.subjects:,} subjects, MaxAckPending {args.max_ack_pending}, "
        f"one in {args.sample} sampled, median of {args.rounds}"
    )
    for column in ("ledger", "msg/s", "x off", "CPU us", "B/row", "rows/batch", "flush ms", "rounds"):
        table.add_column(column, justify="left" if column == "ledger" else "right")
    summary = {}
    for mode, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        middle["ratio"] = statistics.median(ratios[mode])
        middle["bytes_per_row"] = middle["bytes"] / max(1.0, middle["rows"])
        summary[mode] = middle
        table.add_row(
            mode,
            f"{middle['msg_per_s']:,.0f}",
            f"{middle['ratio']:.2f}",
            f"{middle['cpu_us']:.1f}",
            f"{middle['bytes_per_row']:.1f}",
            f"{middle['rows'] / max(1.0, middle['batches']):.0f}",
            f"{1000 * middle['flush_s']:.1f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios[mode]),
        )
    Console().print(table)
    return summary


def main() -> int:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--subjects", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--max-ack-pending", type=int, default=2_000)
    parser.add_argument("--result", default="bench_ledger", help="name of the JSON file, without ending")
    args = parser.parse_args()
    configure_logging("warning")
    found = asyncio.run(run(args))
    summary = show(found, args)
    chosen = sum(sample_hash(seq) < sample_limit(args.sample) for seq in range(1, args.messages + 1))
    expected = {"off": 0, "sampled": chosen, "full": args.messages}
    whole = all(run["rows"] == expected[mode] for mode, runs in found.items() for run in runs)
    path = write_result(args.result, {"settings": vars(args), "rounds": found, "summary": summary})
    good = whole and summary["full"]["ratio"] >= WANTED
    print(
        f"full/off {summary['full']['ratio']:.2f} (wanted {WANTED}), rows "
        f"{'all there' if whole else 'MISSING'}: {'ok' if good else 'NOT MET'}"
    )
    print(f"written to {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
