"""The report of an audit: one HTML file with verdict, examples and plots, that needs nothing from elsewhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

import pyspark.sql.functions as sf

from parti.spark.plots import COLOURS, STYLE, Span, areas, bars_with_share, legend, lines, timeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from parti.spark.audit import AuditResult, Check

PARTITIONS = 50
"""Partitions whose owners are drawn."""
_POINTS = 120
_MOST_SPANS = 4000
_MOST_PAUSES = 100_000
_OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the ledger tells of speed, over time; moments are seconds since 1970."""

    step_s: float = 1.0
    by_worker: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Finished messages a second."""
    latencies: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """p50, p95, p99 of the time from being received to being finished, in seconds."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that the report shows."""

    title: str
    facts: Mapping[str, str]
    checks: Sequence[Check]
    seen: Mapping[str, int]
    traffic: Traffic
    pauses_s: Sequence[float]
    owners: Sequence[tuple[str, Sequence[tuple[float, float, str, int]]]]
    """Partition, and its holdings: start, end, worker, fence."""
    dead_letters: Sequence[Mapping[str, Any]]


def measure_traffic(ledger: DataFrame, first_us: int | None, last_us: int | None) -> Traffic:
    """Messages a second by worker, and latencies, in about a hundred steps; takes `LEDGER_COLUMNS`."""
    if first_us is None or last_us is None or last_us <= first_us:
        return Traffic()
    step_us = max(1_000, -(-(last_us - first_us) // _POINTS))
    bucket = sf.floor((sf.unix_micros("finished") - first_us) / step_us).cast("int").alias("bucket")
    took = (sf.unix_micros("finished") - sf.unix_micros("received")).alias("took_us")
    rows = ledger.select(bucket, "worker", took)
    # One pass for both: the shares of the workers, and (worker null) the latencies of all of them together.
    found = (
        rows.groupingSets([[sf.col("bucket"), sf.col("worker")], [sf.col("bucket")]], "bucket", "worker")
        .agg(sf.count("*").alias("messages"), sf.percentile_approx("took_us", [0.5, 0.95, 0.99], 1000).alias("took"))
        .orderBy("bucket")
        .collect()
    )
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    latencies: dict[str, list[tuple[float, float]]] = {"p50": [], "p95": [], "p99": []}
    for row in found:
        if row["worker"] is not None:
            counts[row["worker"]][row["bucket"]] = row["messages"]
            continue
        at_s = (first_us + (row["bucket"] + 0.5) * step_us) / 1e6
        for name, took_us in zip(latencies, row["took"], strict=True):
            latencies[name].append((at_s, max(took_us, 1) / 1e6))
    return Traffic(step_us / 1e6, _rates(counts, first_us, last_us, step_us), latencies)


def _rates(
    counts: Mapping[str, Mapping[int, int]], first_us: int, last_us: int, step_us: int
) -> dict[str, list[tuple[float, float]]]:
    total = Counter({worker: sum(by.values()) for worker, by in counts.items()})
    shown = [worker for worker, _ in total.most_common(COLOURS)]
    rates: dict[str, list[tuple[float, float]]] = {}
    buckets = range((last_us - first_us) // step_us + 1)
    for name in [*sorted(shown), *([_OTHERS] if len(total) > len(shown) else [])]:
        who = [name] if name != _OTHERS else [worker for worker in total if worker not in shown]
        rates[name] = [
            (
                (first_us + (bucket + 0.5) * step_us) / 1e6,
                sum(counts[worker].get(bucket, 0) for worker in who) / (step_us / 1e6),
            )
            for bucket in buckets
        ]
    return rates


def take_picture(title: str, facts: Mapping[str, str], result: AuditResult, traffic: Traffic) -> Picture:
    """Collect what the report shows: the pauses of all moves, the owners of the first partitions."""
    holdings, moves = result.tables["holdings"], result.tables["moves"]
    first = sorted(
        row["partition"]
        for row in holdings.select("partition").distinct().orderBy("partition").limit(PARTITIONS).collect()
    )
    owners: dict[str, list[tuple[float, float, str, int]]] = {partition: [] for partition in first}
    rows = (
        holdings.where(sf.col("partition").isin(first)).orderBy("partition", "started").limit(_MOST_SPANS).collect()
    )
    for row in rows:
        span = (row["started"].timestamp(), row["finished"].timestamp(), row["worker"], row["fence"])
        owners[row["partition"]].append(span)
    pauses = moves.select("pause_s").limit(_MOST_PAUSES).collect()
    dead = result.tables["dead_letters"].orderBy("at").limit(10).collect()
    return Picture(
        title=title,
        facts=facts,
        checks=result.checks,
        seen=result.seen,
        traffic=traffic,
        pauses_s=[row["pause_s"] for row in pauses],
        owners=list(owners.items()),
        dead_letters=[row.asDict() for row in dead],
    )


# ── HTML ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_PAGE_STYLE = """
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 880px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; } h2 { font-size: 1.1rem; margin: 34px 0 8px; }
p { margin: 6px 0; } .muted { color: var(--muted); }
.verdict { display: inline-block; margin: 10px 0 4px; padding: 4px 12px; border-radius: 6px; color: var(--ground);
  font-weight: 600; }
.good { background: var(--good); } .bad { background: var(--bad); }
.ok { color: var(--good); font-weight: 600; } .broken { color: var(--bad); font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--faint); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.scroll { overflow-x: auto; } code { font-size: 0.88em; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 10px; margin: 16px 0 0; }
.tile { background: var(--card); border-radius: 8px; padding: 9px 12px; }
.tile b { display: block; font-size: 1.15rem; }
.tile span { color: var(--muted); font-size: 0.83rem; }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: 12px 14px 8px; }
figcaption { color: var(--muted); font-size: 0.85rem; margin-top: 4px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-bottom: 4px; color: var(--muted); font-size: 0.85rem }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 6px; border-radius: 3px; }
"""
_TILES = {
    "messages": "stored messages",
    "rows": "ledger rows",
    "partitions": "partitions",
    "holdings": "holdings",
    "moves": "changes of owner",
    "dead_letters": "dead letters",
    "excused": "repeats after crashes",
    "unfinished": "not finished yet",
}


def write_report(picture: Picture) -> str:
    """The page."""
    broken = [check for check in picture.checks if not check.held]
    verdict = "Every promise was kept" if not broken else f"{', '.join(check.name for check in broken)} violated"
    facts = " · ".join(f"{escape(name)} {escape(value)}" for name, value in picture.facts.items())
    parts = [
        f"<h1>{escape(picture.title)}</h1>",
        f'<p class="muted">{facts} · written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC</p>',
        f'<p class="verdict {"bad" if broken else "good"}">{escape(verdict)}</p>',
        _tiles(picture.seen),
        "<h2>Invariants</h2>",
        _check_table(picture.checks),
        *(_examples(check) for check in broken),
        *_plots(picture),
    ]
    if picture.dead_letters:
        parts += ["<h2>Dead letters</h2>", _table(picture.dead_letters)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(picture.title)}</title><style>{STYLE}{_PAGE_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _tiles(seen: Mapping[str, int]) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{seen[name]:,}</b><span>{text}</span></div>'
        for name, text in _TILES.items()
        if name in seen
    )
    return f'<div class="tiles">{tiles}</div>'


def _check_table(checks: Sequence[Check]) -> str:
    rows = []
    for check in checks:
        held = '<span class="ok">held</span>' if check.held else '<span class="broken">violated</span>'
        also = f' <span class="muted">(+{check.consequences:,} that follow)</span>' if check.consequences else ""
        rows.append(
            f"<tr><td>{escape(check.name)}</td><td>{escape(check.title)}</td>"
            f'<td class="n">{check.count:,}{also}</td><td>{held}</td></tr>'
        )
    head = '<tr><th>invariant</th><th>what is counted</th><th class="n">found</th><th>verdict</th></tr>'
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _examples(check: Check) -> str:
    return f"<h2>{escape(check.name)}: the first of them</h2>{_table(check.examples)}" if check.examples else ""


_LEFT_OUT = frozenset({"invariant", "at_us", "other_process", "other_seq", "process", "fence"})
_NUMBERS = frozenset({"seq", "attempt", "first", "last", "position", "end_seq", "ledger_seq"})


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in rows[0] if name not in _LEFT_OUT]
    # Where and which come first, whatever the order of the columns.
    names.sort(key=lambda name: (name not in ("partition", "seq"), name == "detail"))
    cells = "".join(f'<th class="{_kind(name)}">{escape(name)}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f'<td class="{_kind(name)}">{_cell(row.get(name))}</td>' for name in names) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{cells}</tr>{body}</table></div>'


def _kind(name: str) -> str:
    return "n" if name in _NUMBERS else ""


def _cell(value: Any) -> str:
    if value is None:
        return '<span class="muted">none</span>'
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%H:%M:%S.%f}"[:-3]
    return escape(str(value))


def _plots(picture: Picture) -> list[str]:
    workers = sorted({worker for _, spans in picture.owners for _, _, worker, _ in spans})
    # The busiest workers have the same colours in both plots.
    ranked = list(picture.traffic.by_worker) or workers
    place = {name: index for index, name in enumerate(name for name in ranked if name != _OTHERS)}
    owners = [
        (
            partition,
            [Span(s, e, place.get(worker, COLOURS), f"{worker}, fence {fence}") for s, e, worker, fence in spans],
        )
        for partition, spans in picture.owners
    ]
    pauses = sorted(picture.pauses_s)
    said = "no partition changed hands"
    if pauses:
        said = (
            f"{len(pauses):,} changes of owner: median {_ms(pauses[len(pauses) // 2])}, "
            f"99 % within {_ms(pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))])}, longest {_ms(pauses[-1])}; "
            f"counted from when there was something to do"
        )
    names = list(picture.traffic.by_worker)
    return [
        "<h2>Pauses of moves</h2>",
        _figure(bars_with_share(pauses), said),
        "<h2>Finished messages a second, by worker</h2>",
        _figure(
            legend(names) + areas(picture.traffic.by_worker, label="messages a second by worker"),
            f"in steps of {_ms(picture.traffic.step_s)}; times are UTC",
        ),
        "<h2>Time from received to finished</h2>",
        _figure(
            legend(list(picture.traffic.latencies)) + lines(picture.traffic.latencies, label="latency percentiles"),
            "median, 95th and 99th percentile of each step",
        ),
        f"<h2>Owners of the first {len(owners)} partitions</h2>",
        _figure(
            legend([*place, *([_OTHERS] if len(workers) > len(place) else [])]) + timeline(owners),
            "from the first start to the last finish of each holding",
        ),
    ]


def _figure(plot: str, caption: str) -> str:
    return f"<figure>{plot}<figcaption>{escape(caption)}</figcaption></figure>"


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1000:.3g} ms"
