"""`parti dev demo`: sets the stage, has the story told, judges it, writes the report."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from parti.app.signals import run_interruptibly
from parti.cli.control import open_console
from parti.cli.demo.check import Findings, judge
from parti.cli.demo.fleet import Fleet
from parti.cli.demo.notes import Notes
from parti.cli.demo.proof import missing, prove
from parti.cli.demo.report import (
    UNSTORED_S,
    Tale,
    finish,
    lead_of,
    pauses_by_reason,
    picture_of,
    sections_of,
)
from parti.cli.demo.screen import Screen
from parti.cli.demo.stage import Stage
from parti.cli.demo.story import Plan, act, chapters_of
from parti.cli.demo.summary import Result, summarise
from parti.cli.demo.traffic import STREAM, SUBJECT, Publisher, make_messages, partition_names, read_back
from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.embedded import Server
from parti.errors import ConfigError, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.wire import Wire
from parti.model.partition import Template
from parti.spark.report_page import write_report
from parti.telemetry.logs import configure_logging

_INTERRUPTED = 130
_BOUNDS = {"--seconds": (5, 600), "--workers": (2, 8), "--partitions": (4, 400), "--seed": (0, 2**31)}
_KEPT = "workers"
"""Part of the data that a run leaves, by which its directory is recognised."""


def demo(
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="How long messages are sent, 5 to 600.")] = 30.0,
    workers: Annotated[
        int, typer.Option(metavar="N", help="Worker processes at the start, 2 to 8; half as many join.")
    ] = 3,
    partitions: Annotated[int, typer.Option(metavar="N", help="How many, 4 to 400.")] = 48,
    no_audit: Annotated[bool, typer.Option("--no-audit", help="Leave the audit in Spark out.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="Where the report goes: build/demo-report.html, or parti-demo-report.html."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="S", help="Chooses who is killed, who is drained, and how messages are mixed.")
    ] = 1,
    lose_one: Annotated[
        bool, typer.Option("--lose-one", hidden=True, help="Publish one more when all workers have left.")
    ] = False,
) -> None:
    """Show parti at work in about a minute: a fleet takes load, grows, loses a worker, lets one go; then the proof.

    Starts a NATS server and worker processes of its own, and stops them. Writes a report, and beside it what it was
    made from. Exit codes: 0 every promise was kept, 1 one was not, or something broke, 2 the demo could not start,
    130 interrupted.
    """
    for name, value in {
        "--seconds": seconds,
        "--workers": workers,
        "--partitions": partitions,
        "--seed": seed,
    }.items():
        low, high = _BOUNDS[name]
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value:g}: expected {low} to {high}")
    plan = Plan(seconds, workers, partitions, seed)
    place = _Place.of(report)
    configure_logging("error")
    screen = Screen(open_console())
    try:
        well = run_interruptibly(_run(plan, place, screen, audited=not no_audit, lose_one=lose_one))
    except asyncio.CancelledError:
        screen.say("interrupted: server and workers are stopped, nothing was written")
        raise typer.Exit(_INTERRUPTED) from None
    if not well:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the results go."""

    report: Path
    data: Path

    @classmethod
    def of(cls, report: Path | None) -> _Place:
        """Check what was asked for, before anything is started."""
        if report is None:
            report = Path("build/demo-report.html") if Path("build").is_dir() else Path("parti-demo-report.html")
        if report.is_dir():
            raise ConfigError(f"--report {report} is a directory; expected a file, such as {report / 'report.html'}")
        if not report.parent.is_dir():
            raise ConfigError(f"--report {report}: there is no directory {report.parent}; create it first")
        if not os.access(report.parent, os.W_OK):
            raise ConfigError(f"--report {report}: {report.parent} cannot be written to; name another place")
        data = report.with_name(f"{report.stem}-data")
        if data.exists() and not (data / _KEPT).is_dir():
            raise ConfigError(f"{data} is there and was not left by a demo; move it away, or name another --report")
        return cls(report, data)

    def keep(self, directory: Path) -> None:
        """Put what a run has left in place of what the last one left."""
        if self.data.exists():
            shutil.rmtree(self.data)
        shutil.move(directory, self.data)


async def _run(plan: Plan, place: _Place, screen: Screen, *, audited: bool, lose_one: bool) -> bool:
    """Everything; returns whether all went well."""
    task = asyncio.current_task()
    assert task
    for number in (signal.SIGINT, signal.SIGTERM):
        # Once only: a second Ctrl-C must not interrupt the tidying up, which is bounded.
        asyncio.get_running_loop().add_signal_handler(number, lambda: task.cancelling() or task.cancel())
    with tempfile.TemporaryDirectory(prefix="parti-demo-") as temporary:
        directory = Path(temporary) / "data"
        (directory / _KEPT).mkdir(parents=True)
        async with Server(store_dir=directory / "store") as server, _connected(server.url) as connection:
            screen.say(f"nats-server {server.version} with JetStream at {server.url}", style="dim")
            try:
                result = await _tell_and_judge(connection, directory, server, plan, place, screen, audited, lose_one)
            except PartiError as error:
                typer.echo(f"parti: {' '.join(str(error).split())}", err=True)
                result = None
        place.keep(directory)
        if result is None:
            typer.echo(f"parti: the logs of the workers are in {place.data / _KEPT}", err=True)
            raise typer.Exit(1)
        place.report.write_text(result.page)
    summarise(screen, result, place.report, place.data)
    return not result.broken and not result.failed


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Connection]:
    # Constructed without the usual sources: the user's own settings are for another server.
    connection = await Connection.open(Settings.model_construct(nats=(url,)), name="parti-demo")
    try:
        yield connection
    finally:
        await connection.close()


async def _tell_and_judge(
    connection: Connection,
    directory: Path,
    server: Server,
    plan: Plan,
    place: _Place,
    screen: Screen,
    audited: bool,
    lose_one: bool,
) -> Result:
    api, wire = JetStreamApi(connection), Wire(connection.client)
    pattern = Template(SUBJECT).pattern
    await api.ensure_stream({"name": STREAM, "subjects": [pattern], "allow_direct": True, "storage": "file"})
    bucket = str(Settings.model_fields["bucket"].default)
    stage = Stage(
        plane=await ControlPlane.open(connection, api, bucket, replicas=1),
        fleet=Fleet(directory / _KEPT, server.url, plan.partitions, plan.seed),
        notes=Notes(directory / _KEPT),
        publisher=Publisher(wire, make_messages(plan.partitions, plan.seed)),
        partitions=tuple(partition_names(plan.partitions)),
        chapters=chapters_of(plan),
        tell=lambda text: screen.tell(text, stage.elapsed_s),
        announce=screen.announce,
    )
    watching = asyncio.create_task(stage.watch())
    stage.keep(watching)
    try:
        async with screen.showing(stage):
            await act(stage, plan)
            stage.open_chapter(6)
            if lose_one:
                stage.publisher.send(1)
                await stage.publisher.all_acknowledged()
            stored = await read_back(wire, STREAM)
            # In a thread, so that the picture goes on.
            findings = await asyncio.to_thread(
                judge, stage.publisher.acknowledged, stored, stage.notes.calls, stage.fleet.died_ns, UNSTORED_S
            )
            stage.tell(f"handlers' notes: {_count_broken(findings.broken)}")
            tale = _tale(stage, plan, findings, place, server.version)
            left_out = missing() if audited else "--no-audit was given"
            if left_out:
                return _without_audit(findings, tale, left_out)

            def say(text: str) -> None:
                stage.look = f"The audit: {text} …"
                stage.tell(f"audit: {text}")

            try:
                proof, page = await prove(directory, server.url, tale, say)
            except PartiError as error:
                return _without_audit(findings, tale, str(error), failed=True)
            return Result(findings, proof, "", proof.pauses_s, page)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.to_thread(stage.fleet.end)


def _tale(stage: Stage, plan: Plan, findings: Findings, place: _Place, version: str) -> Tale:
    killed, drained = stage.killed, stage.drained
    assert killed
    assert drained
    last_s = max(call.end_ns for call in stage.notes.calls) / 1e9 if stage.notes.calls else 0.0
    return Tale(
        title=f"parti demo: {plan.partitions} partitions, {plan.workers + plan.joining} workers, a kill and a drain",
        facts={"stream": STREAM, "messages": f"{findings.seen['messages']:,}", "seed": str(plan.seed)},
        lead=lead_of(plan, findings, killed.worker, drained.worker),
        marks=stage.marks,
        span=(stage.began_s, max(last_s, *(at_s for at_s, _ in stage.marks))),
        killed_s=killed.at_s,
        drained_s=drained.at_s,
        waiting=findings.traffic.waiting,
        notes=findings.checks,
        sections=sections_of(place.data, version, plan.seed),
    )


def _without_audit(findings: Findings, tale: Tale, left_out: str, *, failed: bool = False) -> Result:
    picture = finish(picture_of(findings), tale, audited=False)
    return Result(findings, None, left_out, pauses_by_reason(picture.moves), write_report(picture), failed)


def _count_broken(broken: Sequence[str]) -> str:
    return f"broken: {', '.join(broken)}" if broken else "every promise kept"
