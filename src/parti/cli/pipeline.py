"""`parti pipeline`: take a stream into the tables of a lake, look at them, put their small files together."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parti.app.signals import leave_event
from parti.cli.control import count, open_console, print_json, span
from parti.cli.options import JsonOption, NatsOption
from parti.cli.spark_exit import exit_with_spark, stopped_by_signals
from parti.config import Settings, load_settings
from parti.errors import ConfigError, PartiError, PipelineFailed
from parti.jetstream.target import Target
from parti.model.safe_text import one_line
from parti.spark.lake import is_local
from parti.spark.pipelines.bronze import look_at
from parti.spark.pipelines.progress import Step
from parti.spark.pipelines.run import STAGES, Stage, all_stages, compact, ledger_of, make_plan, run
from parti.spark.pipelines.settings import PipelineSettings, load_pipeline
from parti.spark.pipelines.status import TableStatus, look
from parti.spark.session import open_session
from parti.telemetry.batch_metrics import BatchMetrics, check_metrics_file

app = typer.Typer(help="Take a stream into the tables of a lake, with Spark.", no_args_is_help=True)

LakeOption = Annotated[
    str | None, typer.Option(metavar="DIR", help="Directory of the tables; else as in [pipeline] of parti.toml.")
]
MasterOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Where Spark runs: local[4], spark://host:7077, sc://host:15002.")
]
_CONNECT_S = 3.0
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}


@app.command("run")
def run_(
    stage: Annotated[
        str, typer.Argument(metavar="bronze|silver|ledger|gold|all", help="What is brought up to date.")
    ] = "all",
    once: Annotated[bool, typer.Option("--once", help="Take in what is there now, then end (the default).")] = False,
    every: Annotated[str | None, typer.Option(metavar="10s", help="Go on for ever, with a batch that often.")] = None,
    master: MasterOption = None,
    lake: LakeOption = None,
    stream: Annotated[str | None, typer.Option(metavar="NAME", help="Stream that is read.")] = None,
    nats: NatsOption = None,
) -> None:
    """Take what is new in the stream into the tables of the lake.

    Everything is checked before Spark is started. It may be killed at any moment: the next run goes on where it was,
    with each message once. SIGTERM or Ctrl-C stops it as soon as Spark allows, a second one at once. Exit codes: 0
    done, or stopped with --every, 1 a step failed later, or stopped without --every, 2 settings, server or stream are
    not all right.
    """
    if once and every is not None:
        raise ConfigError("--once and --every exclude each other; give one of them")
    every_s = _seconds(every) if every is not None else None
    own, settings = _settings(nats, lake, stream)
    stages = _stages(stage, settings, own)
    plan = make_plan(settings, own, stages)
    shown = Progress(open_console(), settings)
    with leave_event(exit_with_spark) as asked:
        try:
            with shown:
                done = run(plan, master=master, every_s=every_s, stop=asked, report=shown.take, say=shown.say)
        except PipelineFailed as error:
            typer.echo(f"parti: {one_line(str(error))}", err=True)
            raise typer.Exit(1) from None
    shown.conclude(plan.stages, done=done)
    if not done:
        assert asked.number is not None
        tables = ", ".join(plan.stages)
        typer.echo(f"parti: {asked.number.name} stopped {tables}; the same command goes on where it was", err=True)
        raise typer.Exit(0 if every_s is not None else 1)


@app.command()
def status(
    json: JsonOption = False,
    lake: LakeOption = None,
    stream: Annotated[str | None, typer.Option(metavar="NAME", help="Stream that is read.")] = None,
    nats: NatsOption = None,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE.prom", help="Write metrics for Prometheus' text file collector.")
    ] = None,
) -> None:
    """Show each table of the lake: commits, rows, files, bytes, last batch, lag and watermark.

    Exit codes: 0 shown, 1 shown, but the server could not be asked, so the lag is unknown, 2 settings not all right.
    """
    check_metrics_file(metrics)
    own, settings = _settings(nats, lake, stream)
    ends, problem = _ends(settings, own)
    if is_local(settings.lake):
        rows = look(settings.lake, ends)
    else:
        with open_session("parti-pipeline") as spark:
            rows = look(settings.lake, ends, spark)
    if metrics is not None:
        _write_metrics(settings.stream, rows, metrics)
    if json:
        tables = [row.as_json() for row in rows]
        print_json({"lake": settings.lake, "stream": settings.stream, "tables": tables, "problem": problem})
    else:
        _print_status(open_console(), settings, rows, problem)
    if problem:
        raise typer.Exit(1)


@app.command("compact")
def compact_(master: MasterOption = None, lake: LakeOption = None) -> None:
    """Put small commits of all tables together; no row changes, and a killed compaction does no harm.

    Exit codes: 0 done, also when there was nothing to do, 2 settings not all right, or somebody is at work on
    the lake, 128 and its number after a signal.
    """
    _, settings = _settings(None, lake, None)
    console = open_console()
    with stopped_by_signals("the compaction; what is done stays done, and the same command does the rest") as asked:
        done = compact(settings, master=master, stop=asked, say=lambda text: console.print(text, style="dim"))
    for table in done:
        console.print(f"{table.table}: {count(table.before, 'commit')} became {table.after:,} ({table.rows:,} rows)")
    if not done:
        console.print("Nothing to put together.")


# ── the question ──────────────────────────────────────────────────────────────────────────────────────────────────


def _settings(nats: str | None, lake: str | None, stream: str | None) -> tuple[Settings, PipelineSettings]:
    own = load_settings({"nats": nats})
    if "connect_timeout_s" not in own.model_fields_set:
        own = own.model_copy(update={"connect_timeout_s": _CONNECT_S})
    return own, load_pipeline({"lake": lake, "stream": stream})


def _stages(name: str, settings: PipelineSettings, own: Settings) -> tuple[Stage, ...]:
    if name == "all":
        return all_stages(settings, own)
    for stage in STAGES:
        if name == stage:
            return (stage,)
    raise ConfigError(f"there is no table {name!r} to run; expected one of {', '.join(STAGES)} or all")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|)", text.strip())
    seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    if not 0.1 <= seconds <= 86_400:
        raise ConfigError(f"--every {text!r} is no interval; expected 100ms to 24h, such as 10s or 5min")
    return seconds


def _ends(settings: PipelineSettings, own: Settings) -> tuple[dict[str, int], str | None]:
    """The last sequences of the streams, and why they are unknown."""
    ends: dict[str, int] = {}
    try:
        target = Target.of(own)
        ends[settings.stream] = look_at(target, settings.stream).last_seq
    except PartiError as error:
        return ends, str(error)
    try:
        name = ledger_of(settings, own)
        ends[name] = look_at(target, name).last_seq
    except PartiError:
        pass  # most streams have no ledger
    return ends, None


def _write_metrics(stream: str, rows: list[TableStatus], path: Path) -> None:
    """What there is to alarm somebody with; a lag that is unknown is left out."""
    found = BatchMetrics()
    for row in rows:
        found.pipeline_rows.set(row.rows, stream, row.name)
        if row.lag is not None:
            found.pipeline_lag.set(row.lag, stream, row.name)
    found.pipeline_looked.set(time.time(), stream)
    found.write(path)


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Line:
    """One table while it is being filled."""

    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    last: Step | None = None
    counts: dict[str, int] = field(default_factory=dict)


class Progress:
    """How a run goes: a table that is drawn anew on a terminal, a line for each batch elsewhere."""

    def __init__(self, console: Console, settings: PipelineSettings) -> None:
        self._console = console
        self._place = f"stream {settings.stream} into lake {settings.lake}"
        self._lines: dict[str, _Line] = {}
        self._doing = ""
        self._started_s = time.monotonic()
        self._live = Live(console=console, refresh_per_second=2, transient=True) if sys.stdout.isatty() else None

    def __enter__(self) -> Progress:
        self._console.print(self._place, style="dim", soft_wrap=True)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *reason: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Show what is being done."""
        self._doing = text
        if self._live:
            self._live.update(self._draw())
        else:
            self._console.print(text, style="dim", soft_wrap=True)

    def take(self, step: Step) -> None:
        """Show a batch that was taken in."""
        line = self._lines.setdefault(step.table, _Line())
        line.rows += step.rows
        line.batches += 1
        line.seconds += step.seconds
        line.last = step
        for name, number in step.counts.items():
            line.counts[name] = line.counts.get(name, 0) + number
        if self._live:
            self._live.update(self._draw())
        else:
            self._console.print(
                f"{step.table}: batch {step.batch}, {step.rows:,} rows in {step.seconds:.1f} s "
                f"({step.rows_per_s:,.0f} rows/s), {_lag_text(step.lag)}",
                soft_wrap=True,
            )

    def conclude(self, stages: tuple[str, ...], *, done: bool) -> None:
        """Say what was done in all; unless all is done, nothing of tables that got no further."""
        for stage in stages:
            line = self._lines.get(stage)
            if line is None:
                if done:
                    self._console.print(f"{stage}: nothing new")
                continue
            rate = line.rows / line.seconds if line.seconds else 0.0
            refused = ", ".join(f"{n:,} {name}" for name, n in line.counts.items() if n and name != "read")
            self._console.print(
                f"{stage}: {count(line.rows, 'row')} in {count(line.batches, 'batch').replace('batchs', 'batches')}, "
                f"{rate:,.0f} rows/s, {_lag_text(line.last.lag if line.last else None)}"
                f"{f' ({refused})' if refused else ''}",
                soft_wrap=True,
            )
        if done:
            self._console.print(f"Done in {span(time.monotonic() - self._started_s)}.", style="green")

    def _draw(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("table", no_wrap=True)
        for title in ("rows", "rows/s", "lag", "batch", "took"):
            table.add_column(title, justify="right", no_wrap=True)
        for name, line in self._lines.items():
            step = line.last
            assert step is not None
            lag = "?" if step.lag is None else f"{step.lag:,}"
            table.add_row(
                name, f"{line.rows:,}", f"{step.rows_per_s:,.0f}", lag, str(step.batch), f"{step.seconds:.1f} s"
            )
        table.caption = Text(self._doing, style="dim")
        table.caption_justify = "left"
        return table


def _lag_text(lag: int | None) -> str:
    return "lag unknown" if lag is None else "nothing left" if lag == 0 else f"{lag:,} left"


def _print_status(console: Console, settings: PipelineSettings, rows: list[TableStatus], problem: str | None) -> None:
    console.print(f"lake {settings.lake}, stream {settings.stream}", style="bold", soft_wrap=True)
    if rows:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("table", no_wrap=True)
        for title in ("commits", "rows", "files", "size", "last batch", "lag", "watermark", "written"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*_cells(row))
        console.print(table)
        for row in rows:
            if refused := {name: n for name, n in row.counts.items() if n and name != "read"}:
                text = ", ".join(f"{n:,} {name}" for name, n in refused.items())
                console.print(f"{row.name}: of {row.counts.get('read', 0):,} rows read {text}", style="yellow")
    else:
        console.print("There is no table yet; 'parti pipeline run' makes them.")
    if problem:
        console.print(f"The lag is unknown: {problem}", style="bold red", soft_wrap=True)


def _cells(row: TableStatus) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.commits:,}",
        f"{row.rows:,}",
        f"{row.files:,}",
        _size(row.bytes),
        str(row.last_batch),
        "-" if row.lag is None else f"{row.lag:,}",
        row.watermark or "-",
        row.written_at,
    )


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"
