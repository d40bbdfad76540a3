"""`parti replay`: hand a backlog to Spark and back, or read history again into a new table."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from parti.app.app import App
from parti.app.replay import Outcome, Replay, Request, Rounds, Standing
from parti.app.signals import on_leave_signals, run_interruptibly
from parti.cli.control import count, listed, open_console, print_json, span
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.spark_exit import exit_with_spark, stopped_by_signals
from parti.cli.worker import load_app
from parti.config import load_settings
from parti.errors import ConfigError, ReplayFailed
from parti.jetstream.target import Target
from parti.model.partition import Template
from parti.model.safe_text import one_line
from parti.spark.interruption import interrupted_by
from parti.spark.options import Offset, read_offset
from parti.spark.replay import SparkRounds
from parti.spark.replay_table import TableRequest, reprocess
from parti.spark.session import open_session
from parti.telemetry.logs import configure_logging

app = typer.Typer(help="Hand a backlog to Spark and back, or read history again into a table.", no_args_is_help=True)

MasterOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Where Spark runs: local[4], spark://host:7077, sc://host:15002.")
]
PyFilesOption = Annotated[
    str | None,
    typer.Option(metavar="FILES", help="Modules that a cluster needs for the handler, with commas between."),
]
UntilOption = Annotated[
    str, typer.Option(metavar="latest|SEQ|TIME", help="What comes before this is handled, and nothing else.")
]
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SAY_S = 5.0


@app.command("run")
def run_(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the app is, as for 'parti worker'.")],
    partitions: Annotated[
        str | None, typer.Option(metavar="P,P,...", help="Which partitions, with commas between.")
    ] = None,
    all_of: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="All that have this value for this key; may be repeated, see above."),
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Every partition.")] = False,
    until: UntilOption = "latest",
    batch: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Call this with Arrow batches instead of the app's handler."),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Of this replay; whoever comes back with it goes on.")
    ] = "spark",
    round: Annotated[
        int, typer.Option(metavar="N", min=1, help="Messages that are handled in one Spark job, about.")
    ] = 100_000,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="Wait for the partitions no longer than this.")
    ] = 60.0,
    master: MasterOption = None,
    py_files: PyFilesOption = None,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Handle the backlog of partitions with Spark, as a guest of the fleet, and give them back.

    The workers go on with the other partitions. Values of one key in --all-of are alternatives; different keys must
    all fit. SIGTERM or Ctrl-C ends it in good order: running handlers finish, positions are stored, the partitions go
    back. Killed, it costs repeats of the last moment and nothing else; the same command goes on. Exit codes: 0 all
    up to the bound is finished, 1 it ended before that, 2 refused, and nothing was changed.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: expected letters, digits, '-' and '_'")
    found = load_app(target)
    settings, job = found.job(nats=nats, bucket=bucket, fleet=True)
    request = Request(
        name=f"replay-{name}",
        choose=chooser(found, partitions, all_of or (), everything=all),
        until=_until(until),
        messages_per_round=round,
        claim_within_s=timeout,
        batch_handler=load_function(batch) if batch else None,
    )
    configure_logging("error", settings.log_format)
    with ExitStack() as stack:
        display = stack.enter_context(_Display(quiet=json))
        replay = Replay(settings, job, request, display.show)

        def open_rounds() -> Rounds:
            spark = stack.enter_context(open_session("parti-replay", master, conf=_conf(py_files)))
            return SparkRounds(spark)

        with importable_for_tasks():
            try:
                outcome = run_interruptibly(_run(replay, open_rounds))
            except ReplayFailed as error:
                typer.echo(f"parti: {one_line(str(error))}", err=True)
                raise typer.Exit(1) from None
    if json:
        print_json(_as_json(outcome))
    else:
        open_console().print(_summary(outcome))
    if not outcome.complete:
        raise typer.Exit(1)


async def _run(replay: Replay, open_rounds: Callable[[], Rounds]) -> Outcome:
    def leave(number: signal.Signals) -> None:
        typer.echo("parti: ending: running handlers finish, and the partitions go back", err=True)
        replay.stop()

    on_leave_signals(leave, exit_with_spark)
    return await replay.run(open_rounds)


# ── the question ──────────────────────────────────────────────────────────────────────────────────────────────────


def chooser(
    found: App, named: str | None, all_of: Sequence[str], *, everything: bool
) -> Callable[[Sequence[str]], Sequence[str]]:
    """A function that picks the partitions; raises `ConfigError` for a choice that is none."""
    ways = [bool(named), bool(all_of), everything]
    if sum(ways) != 1:
        raise ConfigError("say which partitions: --partitions P,P,..., --all-of KEY=VALUE, or --all; one of them")
    if everything:
        return lambda known: known
    if named:
        names = list(dict.fromkeys(part.strip() for part in named.split(",") if part.strip()))
        return lambda known: names
    wanted = _keys(found.template, all_of)

    def fits(partition: str) -> bool:
        keys = found.template.partition(partition).keys
        return all(keys[key] in values for key, values in wanted.items())

    def choose(known: Sequence[str]) -> Sequence[str]:
        chosen = [partition for partition in known if fits(partition)]
        if not chosen:
            raise ConfigError(f"no partition has {' '.join(all_of)}; there are {listed(known)}")
        return chosen

    return choose


def _keys(template: Template, all_of: Sequence[str]) -> Mapping[str, set[str]]:
    wanted: dict[str, set[str]] = defaultdict(set)
    for text in all_of:
        key, equals, value = text.partition("=")
        if not equals or not value or key not in template.keys:
            keys = ", ".join(template.keys) or "(none)"
            raise ConfigError(f"--all-of {text!r}: expected KEY=VALUE with a key of {template.text!r}: {keys}")
        wanted[key].add(value)
    return wanted


def _until(text: str) -> Offset:
    found = read_offset("--until", text)
    if found == "earliest":
        raise ConfigError("--until earliest: nothing comes before that; expected latest, a sequence or a time")
    return found


def load_function(target: str) -> Callable[[Any], Any]:
    """Import `module:function`; raises `ConfigError` with the reason in one line."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{target!r} does not name a function; expected MODULE:FUNCTION")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        raise ConfigError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"module {module_name!r} has no function named {name!r}")
    return function  # type: ignore[no-any-return]


@contextmanager
def importable_for_tasks() -> Iterator[None]:
    """Let tasks on this machine import what this process imports from the current directory."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(Path.cwd()), before) if part)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def _conf(py_files: str | None) -> Mapping[str, str]:
    return {"spark.submit.pyFiles": py_files} if py_files else {}


# ── the answer ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Display:
    """How far it is: a bar on a terminal, a line from time to time elsewhere, nothing with --json."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = open_console()
        self._began_s: float | None = None
        self._said_s = time.monotonic()
        self._doing = ""
        self._bar: Progress | None = None

    def __enter__(self) -> _Display:
        if self._console.is_terminal and not self._quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._bar.add_task("connecting", total=1.0, said="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, standing: Standing) -> None:
        now_s, done = time.monotonic(), standing.handled + standing.dead_lettered
        if done and self._began_s is None:
            self._began_s = now_s
        rate = done / (now_s - self._began_s) if self._began_s and now_s > self._began_s else 0.0
        said = f"{done:,} messages, {rate:,.0f}/s, {standing.at_bound:,} of {standing.partitions:,} partitions"
        if self._bar:
            task = self._bar.task_ids[0]
            self._bar.update(task, description=standing.doing or "handling", completed=standing.share, said=said)
        elif not self._quiet and (now_s - self._said_s >= _SAY_S or standing.doing not in {self._doing, ""}):
            self._said_s, self._doing = now_s, standing.doing or self._doing
            self._console.print(f"{self._doing}: {said}")


def _summary(outcome: Outcome) -> str:
    done = outcome.handled + outcome.dead_lettered
    letters = f", {outcome.dead_lettered:,} of them dead letters" if outcome.dead_lettered else ""
    head = (
        f"Handled {count(done, 'message')}{letters} of {count(outcome.partitions, 'partition')} in "
        f"{span(outcome.took_s)}, in {count(outcome.rounds, 'round')}"
    )
    back = "the partitions are with the workers again" if outcome.given_back else "the partitions wait for workers"
    if outcome.complete:
        return f"{head}; {back}."
    return f"{head}; it ended before the bound, and the same command goes on; {back}."


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "complete": outcome.complete,
        "partitions": outcome.partitions,
        "handled": outcome.handled,
        "dead_lettered": outcome.dead_lettered,
        "rounds": outcome.rounds,
        "took_s": round(outcome.took_s, 3),
        "given_back": outcome.given_back,
    }


# ── history into a table ──────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def table(
    stream: Annotated[str, typer.Option(metavar="NAME", help="Stream that is read.")],
    handler: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="Makes rows of messages.")],
    output: Annotated[str, typer.Option(metavar="DIR", help="The new table, for example lake/totals.")],
    schema: Annotated[str, typer.Option(metavar="DDL", help="Its columns, such as 'tool string, total double'.")],
    batch: Annotated[bool, typer.Option("--batch", help="The function takes and returns Arrow batches.")] = False,
    subject: Annotated[
        str, typer.Option(metavar="SUBJECT", help="Template of the subjects, such as dc.{tool}.{chamber}.done.")
    ] = "",
    since: Annotated[str, typer.Option("--from", metavar="earliest|SEQ|TIME", help="Where to begin.")] = "earliest",
    until: UntilOption = "latest",
    master: MasterOption = None,
    py_files: PyFilesOption = None,
    nats: NatsOption = None,
) -> None:
    """Read history again and write what a function makes of it into a new table.

    Nothing is claimed, acknowledged or moved: no worker notices. The function is called with each message of a
    subject, in order, and returns a row (a mapping), several, or None. One that raises ends it, and no table is left
    behind; so does SIGTERM or Ctrl-C. Exit codes: 0 the table is there, 1 the function or Spark failed, 2 refused,
    128 and its number after a signal.
    """
    settings = load_settings({"nats": nats})
    request = TableRequest(
        target=Target.of(settings),
        stream=stream,
        handler=load_function(handler),
        batches=batch,
        output=output,
        schema=schema,
        template=subject,
        starting=read_offset("--from", since),
        ending=_until(until),
    )
    request.check()
    configure_logging("error", settings.log_format)
    console = open_console()
    what = "the replay; no table is left behind"
    try:
        with (
            stopped_by_signals(what) as asked,
            importable_for_tasks(),
            open_session("parti-replay", master, conf=_conf(py_files)) as spark,
            interrupted_by(asked, spark),
        ):
            rows = reprocess(spark, request)
    except ReplayFailed as error:
        typer.echo(f"parti: {one_line(str(error))}", err=True)
        raise typer.Exit(1) from None
    console.print(f"Wrote {count(rows, 'row')} to {output}.")
