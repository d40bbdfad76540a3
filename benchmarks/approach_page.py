"""The table and the page of `benchmarks.approaches`, made from its JSON result and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.approach_plots import cpu, latency, recovery, short, state
from rich.console import Console
from rich.table import Table

Found = Mapping[str, Any]
PLOTS = {"latency": latency, "cpu": cpu, "recovery": recovery}


def rows(result: Found) -> list[tuple[str, list[str]]]:
    """The table: what, and a cell for each topology."""
    found: Mapping[str, Found] = result["topologies"]
    plan = result["settings"]["plan"]
    stall = f"{plan['stall_s']:g} s without readers at {short(plan['stall_rate'])} msg/s"
    lines: list[tuple[str, Callable[[Found], str]]] = [
        ("streams", lambda f: f"{f['streams']:,}"),
        ("consumers", lambda f: f"{f['consumers']:,}"),
        ("create everything", lambda f: _seconds(f["create_s"])),
        ("server memory, pulls standing / most under load", lambda f: f"{f['rss_idle_mb']:.0f} / {_most(f)} MB"),
        ("server CPU, pulls standing and no load", lambda f: f"{f['idle_cpu_percent']:g} %"),
    ]
    for index, rate in enumerate(plan["rates"]):
        lines.append((f"p50 / p99 at {short(rate)} msg/s", lambda f, i=index: _held(f["rates"][i])))  # type: ignore[misc]
    for index, rate in enumerate(plan["rates"]):
        lines.append((f"server CPU a message at {short(rate)} msg/s", lambda f, i=index: _cost(f["rates"][i])))  # type: ignore[misc]
    lines += [
        (f"drain of {plan['backlog']:,} messages", lambda f: f"{f['drain']['drained_per_s']:,} msg/s"),
        ("server CPU a drained message", lambda f: _us(f["drain"]["server_cpu_us_per_msg"])),
        (f"{stall}: backlog gone", lambda f: _gone(f["stall"])),
        (f"{stall}: p99 as before", lambda f: _back(f["stall"])),
        ("a worker leaves: its partitions are read again", lambda f: _moved(f["rebalance"])),
        ("requests to the server for that", lambda f: f"{f['rebalance']['requests']}"),
    ]
    lines.append(("other processes used, in the mean", lambda f: f"{_mean_others([f])} cores"))
    return [(what, [_cell(cell, one) for one in found.values()]) for what, cell in lines]


def _cell(cell: Callable[[Found], str], found: Found) -> str:
    try:
        return cell(found)
    except (KeyError, IndexError):
        return "failed"  # that phase has no figures; `failure` in the result says why


def _most(found: Found) -> str:
    return f"{found['rss_most_mb']:.0f}"


def _held(row: Found) -> str:
    ages = f"{_ms(row['p50_ms'])} / {_ms(row['p99_ms'])}"
    word = state(row)
    if word == "held":
        return ages
    return f"{word}: {ages}; {row['sent_per_s'] / 1e3:.1f} k/s sent, {row['delivered_per_s'] / 1e3:.1f} k/s came"


def _cost(row: Found) -> str:
    word = state(row)
    return _us(row["server_cpu_us_per_msg"]) + ("" if word == "held" else f" ({word})")


def _gone(stall: Found) -> str:
    notes = []
    if stall["backlog_gone_s"] is None:
        text = f"not in {stall['watched_s']:.0f} s"
        notes.append(f"{stall['backlog_at_end']:,} left")
    else:
        text = f"{stall['backlog_gone_s']:g} s"
    if stall["collapsed_before"]:
        notes.append("collapsed before the stall")
    for when in ("before", "after"):
        if (reached := stall[f"sent_{when}_per_s"]) < 0.95 * stall["rate_per_s"]:
            notes.append(f"{_thousands(reached)}/s taken {when}")
    return f"{text} ({', '.join(notes)})" if notes else text


def _back(stall: Found) -> str:
    if stall["collapsed_before"] or stall["sent_before_per_s"] < 0.95 * stall["rate_per_s"]:
        return "rate not held before the stall"
    before = f"before: {_ms(stall['p99_before_ms'])}"
    if stall["p99_back_s"] is None:
        return f"not in {stall['watched_s']:.0f} s ({before})"
    return f"{stall['p99_back_s']:g} s ({before})"


def _moved(rebalance: Found) -> str:
    if rebalance["rebalance_ms"] is None:
        return "not within the limit"
    return f"{rebalance['rebalance_ms']:.0f} ms"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} µs"


def _thousands(value: float) -> str:
    return f"{value / 1e3:.1f} k"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def show(result: Found, console: Console) -> None:
    """Print the table."""
    settings = result["settings"]
    title = (
        f"{settings['partitions']:,} partitions, {settings['workers']} workers, "
        f"{settings['payload_bytes']} B messages, file storage"
    )
    table = Table(title=title, show_lines=True)
    table.add_column("")
    for name in result["topologies"]:
        table.add_column(name, justify="right")
    for what, cells in rows(result):
        table.add_row(what, *cells)
    console.print(table)
    for name, found in result["topologies"].items():
        if "failure" in found:
            console.print(f"{name} failed: {found['failure']}", style="red", highlight=False)


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────────────────

_PAGE = """# Topologies compared

Generated by `make bench-approaches` (`benchmarks/approach_page.py`) from `benchmarks/results/approaches.json`; do not
edit. {date}, nats-server {nats_server}, {cpu_count} x {cpu}, Python {python}; server, readers and publisher share
these cores. Ratios are the result; absolute rates belong to the machine.
{disturbed}
{partitions:,} partitions, {workers} workers, messages of {payload_bytes} B, file storage, one copy. The same readers
for all: a connection for each worker, {slots} overlapping pulls of {batch} on each consumer, an acknowledgement for
each message, no handler. Each topology had a fresh server and the same load.

{legend}

## Figures

{table}

*collapsed*: the backlog grew to the end (more than a fifth of a second's load had not come, and less than 95 % of
what was stored in the second half had come), or less than 80 % of what had come at a lower rate came; p50 and p99 are
those of the messages that came. *short*: the streams took less than 95 % of the offered rate, but what they took
came; latency is then mostly the wait for being stored.

## Latency

![Latency by offered rate](approaches-latency.svg)

## CPU of the server

![CPU time of the server for each message](approaches-cpu.svg)

## Recovery

All readers drop their pulls for {stall_s:g} s at {stall_rate:,} messages a second, as if the network had failed, then
pull again. Gone is a backlog of less than a tenth of a second's load; p99 is back when three half seconds in a row
have at most three times, or 20 ms more than, what it was before.

![Backlog around a stall](approaches-recovery.svg)

## What the figures say

{findings}

## How to read them

- Messages carry the time of sending; latency runs until the reader has them. The publisher waits for the stream with
  {window:,} messages on their way, so it cannot offer more than the stream takes: the table says where that was so.
- CPU is the server's, from `/proc/<pid>/stat`, over {measure_s:g} s after {warm_s:g} s of warming up, divided by the
  messages that came. It contains storing and acknowledging what the publisher sends.
- The drain: {backlog:,} messages gather while nobody pulls. What does not finish within {drain_limit_s:g} s is
  measured by what came until then.
- A leaving worker has {moved} partitions. Timed under {rebalance_rate:,} messages a second: the changes on the
  server, the new pulls, and a message on each moved partition, until the last of these has come. What a filter leaves
  behind when the last owner lags is not in it: see [moving](../moving.md).
- P needs `max_consumers` on its stream: without it the server refuses a stream's 1,001st consumer (error 10026).
- P and A let 400 messages for each *partition* be on their way to a worker, C 400 for each worker.
- The machine was not alone: the last row says how many cores other processes used while rates were measured. Where
  it is more than a tenth of a core, rates and latencies are worse than they would be alone.
- One copy of everything. In a cluster each consumer with replicas is a Raft group of its own, so that thousands of
  them cost more than here.
"""


def page(result: Found) -> str:
    """The page, in Markdown."""
    settings, plan, found = result["settings"], result["settings"]["plan"], result["topologies"]
    names = list(found)
    table = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    table += [f"| {what} | {' | '.join(cells)} |" for what, cells in rows(result)]
    return _PAGE.format(
        **{**result["machine"], "date": result["machine"]["date"][:10]},
        **{key: value for key, value in settings.items() if key != "plan"},
        **plan,
        disturbed=_disturbed(found.values()),
        moved=settings["partitions"] // settings["workers"],
        legend="\n".join(f"- **{name}**: {one['title']}" for name, one in found.items()),
        table="\n".join(table),
        findings="\n".join(f"- {text}" for text in findings(result)),
    )


def _mean_others(found: Iterable[Found]) -> str:
    cores = [row["others_cores"] for one in found for row in one.get("rates", ())]
    return f"{sum(cores) / len(cores):.2f}" if cores else "-"


def _disturbed(found: Iterable[Found]) -> str:
    means = [_mean_others([one]) for one in found]
    worst = max((float(mean) for mean in means if mean != "-"), default=0.0)
    if worst <= 0.25:
        return ""
    return (
        f"\n**A disturbed run**: other processes used up to {worst:.2f} cores in the mean of a topology (last row of "
        "the\ntable). Repeat it on a quiet machine before you quote a rate or a latency.\n"
    )


def findings(result: Found) -> list[str]:
    """Sentences that follow from the figures, whatever these are."""
    found: Mapping[str, Found] = result["topologies"]
    whole = {name: one for name, one in found.items() if "failure" not in one}
    texts = []
    for name, one in whole.items():
        held = [row["offered_per_s"] for row in one["rates"] if state(row) == "held"]
        most = f"held {short(max(held))} msg/s" if held else "held none of the rates"
        if failed := [row for row in one["rates"] if state(row) != "held"]:
            row, came = failed[0], max(row["delivered_per_s"] for row in failed)
            most += (
                f"; {state(row)} at {short(row['offered_per_s'])}, and at most {_thousands(came)} came from there on"
            )
        gone = one["stall"]["backlog_gone_s"]
        after = "did not recover from the stall" if gone is None else f"recovered from the stall in {gone:g} s"
        if one["stall"]["sent_before_per_s"] < 0.95 * one["stall"]["rate_per_s"]:
            after = "did not hold the rate of the stall in the first place"
        texts.append(f"{name} {most}. It drained {_thousands(one['drain']['drained_per_s'])} msg/s and {after}.")
    if {"C", "C+mirror"} <= set(whole):
        plain, mirror = whole["C"], whole["C+mirror"]
        ratio = mirror["drain"]["drained_per_s"] / max(1, plain["drain"]["drained_per_s"])
        texts.append(
            f"The mirror drains {ratio:.1f} times as fast as the same consumers on the file; it costs "
            f"{mirror['rss_most_mb'] - plain['rss_most_mb']:+.0f} MB of the server's largest memory."
        )
    if {"P", "C"} <= set(whole):
        many, few = whole["P"], whole["C"]
        texts.append(
            f"{many['consumers']:,} consumers take {many['create_s'] / few['create_s']:.0f} times as long to create "
            f"as {few['consumers']} and {many['rss_idle_mb'] / few['rss_idle_mb']:.1f} times the memory at rest."
        )
    return texts


def write_page(result: Found, directory: Path) -> Path:
    """Write the page and its plots; returns the page."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        (directory / f"approaches-{name}.svg").write_text(plot(result["topologies"]), encoding="utf-8")
    path = directory / "approaches.md"
    path.write_text(page(result), encoding="utf-8")
    return path
