"""`parti audit`: did the fleet keep its promises? Checked in Spark, from the stream and the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parti.cli.control import open_console, print_json, span, timestamp
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.spark_exit import stopped_by_signals
from parti.config import Settings, load_settings
from parti.errors import ConfigError
from parti.jetstream.target import Target
from parti.model.ledger import ledger_stream as ledger_stream_of
from parti.spark.interruption import interrupted_by
from parti.spark.lake import is_local
from parti.spark.session import open_session
from parti.telemetry.batch_metrics import BatchMetrics, check_metrics_file

if TYPE_CHECKING:
    from parti.spark.audit import AuditResult
    from parti.spark.audit_sources import Question
    from parti.spark.promises import Check

_CONNECT_S = 3.0
_SEEN = {
    "messages": "stored messages",
    "rows": "ledger rows",
    "partitions": "partitions",
    "moves": "changes of owner",
    "dead_letters": "dead letters",
    "excused": "repeats that crashes excuse",
    "unfinished": "not finished yet",
}


def audit(
    stream: Annotated[str, typer.Option(metavar="NAME", help="Stream that the fleet works on.")],
    ledger_stream: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its ledger; as in the settings, or <stream>-ledger.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="SUBJECT", help="Template of the partitions; as the fleet says, if left out."),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="SEQ|TIME", help="Begin here; what the ledger can speak for, if left out."),
    ] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Everything stored must be finished, whatever the positions say.")
    ] = False,
    incremental: Annotated[
        bool, typer.Option("--incremental", help="Go on where the last audit with this --state ended.")
    ] = False,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What incremental audits remember.", file_okay=False)
    ] = None,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Write result tables (Parquet) here.")] = None,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE.prom", help="Write metrics for Prometheus' text file collector.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a report with plots.", dir_okay=False)
    ] = None,
    unstored: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="Before a crash, what was finished so long before may repeat."),
    ] = 30.0,
    clock_skew: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How much the clocks of workers may differ.")
    ] = 0.005,
    master: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where Spark runs: local[4], spark://host:7077, sc://host:15002."),
    ] = None,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Check from the stream and the ledger whether the fleet kept its promises.

    The workers must have run with ledger=full (or sampled). SIGTERM or Ctrl-C stops it as soon as Spark allows, a
    second one at once. Exit codes: 0 every promise was kept, 1 some were not, 2 bad input, 130 or 143 stopped.
    """
    if incremental != (state is not None):
        raise ConfigError("--incremental and --state belong together: give both, or neither")
    if incremental and from_ is not None:
        raise ConfigError("--from and --incremental exclude each other: an incremental audit knows where to go on")
    if report is not None and not report.absolute().parent.is_dir():
        raise ConfigError(f"--report {report}: there is no directory {report.absolute().parent}; create it first")
    if output is not None and is_local(output) and Path(output).is_file():
        raise ConfigError(f"--output {output} is a file; expected a directory")
    check_metrics_file(metrics)
    if find_spec("pyspark") is None:
        raise ConfigError("pyspark is not installed, an audit runs on it; install the extra: parti[spark]")
    # They need pyspark, which takes a second to import and is not there where only workers run.
    from parti.spark.audit_run import Wishes, run  # noqa: PLC0415
    from parti.spark.audit_sources import prepare  # noqa: PLC0415
    from parti.spark.audit_state import read_mark  # noqa: PLC0415

    question = _question(load_settings({"nats": nats, "bucket": bucket}), stream, ledger_stream, complete, template)
    question = replace(question, unstored_s=unstored, start=_start(from_))
    before = read_mark(state) if state is not None else None
    prepared = prepare(question, before)
    console, began_s = open_console(), time.perf_counter()
    wishes = Wishes(skew_s=clock_skew, state=state, output=output, report=report)
    what = "the audit; the same command does all of it again"
    with stopped_by_signals(what) as asked, _saying(console, quiet=json) as say:
        say("starting Spark")
        with open_session("parti-audit", master) as spark, interrupted_by(asked, spark):
            result = run(spark, prepared, wishes, say)
    if metrics is not None:
        write_metrics(question.stream, result, metrics)
    if json:
        print_json(_json(question, result))
    else:
        _print(console, question, result, time.perf_counter() - began_s)
        for written in filter(None, (output, report, metrics)):
            console.print(f"Written: {written}", style="dim", soft_wrap=True)
    raise typer.Exit(0 if result.held else 1)


def _question(settings: Settings, stream: str, ledger: str | None, complete: bool, template: str | None) -> Question:
    from parti.spark.audit_sources import Question  # noqa: PLC0415 - needs pyspark

    if "connect_timeout_s" not in settings.model_fields_set:
        settings = settings.model_copy(update={"connect_timeout_s": _CONNECT_S})
    if complete and template is None:
        raise ConfigError("--complete reads no bucket, so it needs --template, such as 'dc.{tool}.{chamber}.done'")
    target = Target.of(settings)
    target.check()
    return Question(
        target=target,
        stream=stream,
        ledger_stream=ledger or settings.ledger_stream or ledger_stream_of(stream),
        bucket=None if complete else settings.bucket,
        template=template,
        sample=settings.ledger_sample if settings.ledger == "sampled" else 1,
    )


def _start(text: str | None) -> int | datetime | None:
    if text is None:
        return None
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--from is {text!r}: expected a sequence of at least 1, or a time such as 2026-11-16T08:00:00Z"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@contextmanager
def _saying(console: Console, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done: a line that moves on a terminal, lines elsewhere, nothing before JSON."""
    if quiet:
        yield lambda text: None
    elif console.is_terminal:
        with console.status("") as status:
            yield lambda text: status.update(f"{text} …")
    else:
        yield lambda text: console.print(text, style="dim", soft_wrap=True)


# ── what was found ────────────────────────────────────────────────────────────────────────────────────────────────


def _print(console: Console, question: Question, result: AuditResult, took_s: float) -> None:
    seen = ", ".join(f"{result.seen[name]:,} {text}" for name, text in _SEEN.items() if name in result.seen)
    console.print(f"stream {question.stream}, ledger {question.ledger_stream}: {seen}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("invariant", no_wrap=True)
    table.add_column("what is counted")
    table.add_column("found", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for check in result.checks:
        verdict = Text("held", style="green") if check.held else Text("violated", style="bold red")
        table.add_row(check.name, check.title, f"{check.count:,}", verdict)
    console.print(table)
    for check in result.checks:
        for example in check.examples:
            console.print(f"{check.name}: {_line(example)}", style="red", soft_wrap=True)
        if check.count > len(check.examples):
            console.print(f"{check.name}: and {check.count - len(check.examples):,} more", style="red")
        if check.consequences:
            console.print(f"{check.name}: {check.consequences:,} more starts only follow from this", style="dim")
    broken = [check.name for check in result.checks if not check.held]
    if broken:
        console.print(f"Violated: {', '.join(broken)} ({span(took_s)}).", style="bold red")
    else:
        console.print(f"Every promise was kept ({span(took_s)}).", style="green")


def _line(example: Mapping[str, Any]) -> str:
    if "detail" in example:
        where = f"partition {example['partition']}, message {example['seq']}"
        return f"{where}: {example['detail']}"
    return ", ".join(f"{name} {value}" for name, value in example.items() if value is not None)


def write_metrics(stream: str, result: AuditResult, path: Path) -> None:
    """Write what an audit found for Prometheus: a sample for each promise, also for those that were kept."""
    found = BatchMetrics()
    for check in result.checks:
        found.audit_violations.set(check.count, stream, check.name)
    found.audit_messages.set(result.seen.get("messages", 0), stream)
    found.audit_finished.set(time.time(), stream)
    found.write(path)


def _json(question: Question, result: AuditResult) -> dict[str, Any]:
    return {
        "stream": question.stream,
        "ledger": question.ledger_stream,
        "held": result.held,
        "seen": dict(result.seen),
        "checks": [_check_json(check) for check in result.checks],
    }


def _check_json(check: Check) -> dict[str, Any]:
    examples = [
        {name: timestamp(value) if isinstance(value, datetime) else value for name, value in example.items()}
        for example in check.examples
    ]
    return {
        "invariant": check.name,
        "counts": check.title,
        "found": check.count,
        "consequences": check.consequences,
        "held": check.held,
        "examples": examples,
    }
