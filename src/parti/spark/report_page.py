"""The page that tells the result of an audit: one HTML file that needs nothing from elsewhere.

Takes values and makes text, without Spark: `audit_report` collects the values from an audit's tables, and whoever
judged a run by other means can fill in a `Picture` himself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import Any

from parti.spark.plots import COLOURS, STYLE, Moments, Span, areas, bars_with_share, legend, lines, timeline
from parti.spark.promises import Check

POINTS = 120
"""Steps of the plots over time, about."""
_OTHERS = "others"
_LONGEST = 10
"""Moves that are listed, those with the longest pauses."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How fast it went, over time; moments are seconds since 1970."""

    step_s: float = 1.0
    by_worker: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Finished messages a second."""
    latencies: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """p50, p95, p99 of the time until messages were finished, in seconds."""
    latency_from: str = "received"
    """Since when that time counts."""
    waiting: Sequence[tuple[float, float]] = ()
    """Messages that are stored and not finished, where somebody has counted them."""


def rates_by_worker(
    counts: Mapping[str, Mapping[int, int]], first_us: int, last_us: int, step_us: int
) -> dict[str, list[tuple[float, float]]]:
    """Messages a second, from their numbers in each step; workers beyond those that have a colour are added up."""
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


@dataclass(frozen=True, slots=True)
class Move:
    """One change of owner."""

    partition: str
    at_s: float
    """When the new owner started its first message, in seconds since 1970."""
    before: str
    after: str
    """The workers."""
    reason: str
    pause_s: float


@dataclass(frozen=True, slots=True)
class Section:
    """Something that is told in words: sentences, commands, rows of a table."""

    title: str
    sentences: Sequence[str] = ()
    commands: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    checks: Sequence[Check] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that the report shows."""

    title: str
    facts: Mapping[str, str]
    checks: Sequence[Check]
    seen: Mapping[str, int]
    traffic: Traffic
    moves: Sequence[Move]
    owners: Sequence[tuple[str, Sequence[tuple[float, float, str, int]]]]
    """Partition, and its holdings: start, end, worker, fence."""
    dead_letters: Sequence[Mapping[str, Any]] = ()
    lead: Sequence[str] = ()
    """Sentences under the verdict."""
    when: Moments = field(default_factory=Moments)
    sections: Sequence[Section] = ()
    """What follows the plots."""


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
h3 { font-size: 0.95rem; margin: 18px 0 4px; color: var(--muted); font-weight: 500; }
pre { background: var(--card); border-radius: 8px; padding: 10px 14px; overflow-x: auto; margin: 8px 0; }
figure + .scroll, figure + h3 { margin-top: 12px; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 6px; border-radius: 3px; }
"""
_TILES = {
    "messages": "stored messages",
    "rows": "ledger rows",
    "calls": "handler calls",
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
        *(f"<p>{escape(sentence)}</p>" for sentence in picture.lead),
        _tiles(picture.seen),
        "<h2>What was promised, and what was found</h2>",
        _check_table(picture.checks),
        *(_examples(check) for check in broken),
        *_plots(picture),
        *(_section(section) for section in picture.sections),
    ]
    if picture.dead_letters:
        parts += ["<h2>Dead letters</h2>", _table(picture.dead_letters)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(picture.title)}</title><style>{STYLE}{_PAGE_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _section(section: Section) -> str:
    return "".join(
        [
            f"<h2>{escape(section.title)}</h2>",
            *(f"<p>{escape(sentence)}</p>" for sentence in section.sentences),
            f"<pre><code>{escape(section.commands)}</code></pre>" if section.commands else "",
            _table(section.rows) if section.rows else "",
            _check_table(section.checks) if section.checks else "",
        ]
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
            f'<tr><td>{escape(check.rule)}<br><span class="muted">{escape(check.name)}</span></td>'
            f'<td>{escape(check.title)}</td><td class="n">{check.count:,}{also}</td><td>{held}</td></tr>'
        )
    head = '<tr><th>promise</th><th>what is counted</th><th class="n">found</th><th>verdict</th></tr>'
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _examples(check: Check) -> str:
    return f"<h2>{escape(check.name)}: the first of them</h2>{_table(check.examples)}" if check.examples else ""


_LEFT_OUT = frozenset({"invariant", "at_us", "other_process", "other_seq", "process", "fence"})
_NUMBERS = frozenset(
    {
        *("seq", "attempt", "first", "last", "position", "end_seq", "ledger_seq"),
        *("number", "p50", "p99", "longest", "pause", "until"),
    }
)


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
    traffic, when = picture.traffic, picture.when
    clock = "times are UTC" if when.since is None else "seconds since the load began"
    parts = [
        f"<h2>Who owned each of {len(owners)} partitions</h2>",
        _figure(
            legend([*place, *([_OTHERS] if len(workers) > len(place) else [])]) + timeline(owners, when=when),
            "a bar from the first start to the last finish of each holding; a gap is time without an owner, or "
            "without messages",
        ),
        "<h2>Pauses of moves</h2>",
        *_pauses(picture),
        "<h2>Finished messages a second, by worker</h2>",
        _figure(
            legend(list(traffic.by_worker))
            + areas(traffic.by_worker, label="messages a second by worker", when=when),
            f"in steps of {_ms(traffic.step_s)}; {clock}",
        ),
    ]
    if traffic.waiting:
        waiting = areas({"waiting": traffic.waiting}, height=200, label="messages that wait", when=when)
        parts += ["<h2>Messages that wait</h2>", _figure(waiting, f"stored and not finished; {clock}")]
    latencies = legend(list(traffic.latencies)) + lines(traffic.latencies, label="latency percentiles", when=when)
    return [
        *parts,
        f"<h2>Time from {traffic.latency_from} to finished</h2>",
        _figure(latencies, f"median, 95th and 99th percentile of each step; {clock}"),
    ]


def _pauses(picture: Picture) -> list[str]:
    pauses = [move.pause_s for move in picture.moves]
    if not pauses:
        return [_figure(bars_with_share([]), "no partition changed hands")]
    # The later a reason first comes up, the further down it stands.
    reasons = dict.fromkeys(move.reason for move in sorted(picture.moves, key=lambda move: move.at_s))
    by_reason = {reason: [move.pause_s for move in picture.moves if move.reason == reason] for reason in reasons}
    groups = [*by_reason.items(), *([("all", pauses)] if len(by_reason) > 1 else [])]
    summary = [
        {
            "moves because of": reason,
            "number": f"{len(found):,}",
            **{name: _ms(quantile(found, part)) for name, part in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))},
        }
        for reason, found in groups
    ]
    longest = sorted(picture.moves, key=lambda move: -move.pause_s)[:_LONGEST]
    return [
        _figure(
            bars_with_share(pauses),
            f"{len(pauses):,} changes of owner; a pause counts from when there was something to do: from the last "
            f"finish of the old owner, or from when the next message was stored, to the first start of the new one",
        ),
        _table(summary),
        "<h3>The longest</h3>",
        _table(
            [
                {
                    "partition": move.partition,
                    "from": move.before,
                    "to": move.after,
                    "because of": move.reason,
                    "pause": _ms(move.pause_s),
                    "until": _moment(move.at_s, picture.when),
                }
                for move in longest
            ]
        ),
    ]


def quantile(values: Sequence[float], part: float) -> float:
    """The value that `part` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * part) - 1)]


def _moment(at_s: float, when: Moments) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%H:%M:%S}" if when.since is None else f"{at_s - when.since:.1f} s"


def _figure(plot: str, caption: str) -> str:
    return f"<figure>{plot}<figcaption>{escape(caption)}</figcaption></figure>"


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1000:.3g} ms"
