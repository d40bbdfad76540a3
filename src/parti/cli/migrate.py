"""`parti migrate`: from one durable consumer per partition to one per worker, without loss, and back."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from parti.app.migration.runner import Manner, Migrator, Result, Wish
from parti.app.migration.shadow_ledger import ShadowLedger
from parti.app.migration.survey import check_plan, survey
from parti.app.migration.switch import Pace
from parti.app.signals import run_interruptibly
from parti.cli.control import open_console, open_control, open_server, print_json, read_settings
from parti.cli.migrate_view import Bar, plan_json, print_plan, print_result, print_status, result_json, status_json
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.questions import can_ask, confirmed
from parti.cli.worker import load_app
from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.migration_desk import MigrationDesk
from parti.coordination.orders import read_situation
from parti.core.migration_plan import Listed, Naming, Pattern
from parti.core.parity import Slo
from parti.core.retention import WORK_QUEUE
from parti.errors import ApiError, ConfigError, LeaseLost, RequestTimeout
from parti.jetstream.api import JetStreamApi
from parti.jetstream.kv import Bucket
from parti.model.migration import Action
from parti.model.safe_text import one_line

_ANSWER_S = 20.0

app = typer.Typer(
    help="Move from one durable consumer per partition to one per worker, without loss, and back.",
    no_args_is_help=True,
)

ConsumersOption = Annotated[
    str | None, typer.Option(metavar="PATTERN", help="Names of the old consumers, such as 'orders-{partition}'.")
]
ListOption = Annotated[
    Path | None, typer.Option("--list", metavar="FILE", help="Or their names, one on each line.", show_default=False)
]
WorkersOption = Annotated[int, typer.Option(metavar="N", min=1, help="How many workers the fleet will have.")]
PhaseOption = Annotated[
    Literal["shadow", "validate", "switch", "cleanup"] | None,
    typer.Option(metavar="shadow|validate|switch|cleanup", help="What to do.", show_default=False),
]


@app.command()
def plan(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the app is, as for 'parti worker'.")],
    consumers: ConsumersOption = None,
    list_: ListOption = None,
    workers: WorkersOption = 25,
    all: Annotated[bool, typer.Option("--all", help="List every partition.")] = False,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Match existing consumers to the app's partitions and show what a migration would meet; nothing is changed.

    A consumer's filter says which partition it reads, its name only whether it is meant. Exit codes: 0 it can begin,
    1 something has to be mended first, 2 refused: no server, no stream, no such consumers.
    """
    wish = _wish(target, consumers, list_, workers, nats, bucket)

    async def look() -> None:
        async with open_server(wish.settings) as (connection, _):
            found = await survey(connection, wish.settings, wish.job, wish.naming, workers=workers)
        if json:
            print_json(plan_json(wish.settings.bucket, found))
        else:
            print_plan(open_console(), found, everything=all)
        if found.plan.blocked:
            raise typer.Exit(1)

    run_interruptibly(look())


@app.command("run")
def run_(
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:APP", help="Where the app is; for --phase shadow.", show_default=False),
    ] = None,
    phase: PhaseOption = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="Give everything back to the old consumers.")] = False,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="End it where it stands: nothing is kept from the fleet any more.")
    ] = False,
    consumers: ConsumersOption = None,
    list_: ListOption = None,
    workers: WorkersOption = 25,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", "-y", help="Do not ask before consumers are deleted, or messages may be handled twice."
        ),
    ] = False,
    at_once: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=900,
            help="Partitions that rest at the same time; else the setting migrate_at_once.",
            show_default=False,
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Longest wait for messages in flight.")
    ] = 60.0,
    take_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for workers to take partitions.")
    ] = 60.0,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Have what is in flight then, too: its worker is dead.")
    ] = False,
    dual: Annotated[
        bool, typer.Option("--dual", help="Both handle, until the next switch without it; the sink tells repeats.")
    ] = False,
    windows: Annotated[int, typer.Option(metavar="N", min=1, help="Parity windows of --phase validate.")] = 3,
    window: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.1, help="Length of each; else the setting migrate_window_s.", show_default=False
        ),
    ] = None,
    ledger: Annotated[
        str | None,
        typer.Option(metavar="STREAM", help="Record what shadows are given, for an audit.", show_default=False),
    ] = None,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Do one phase of a migration, take everything back, or end it where it stands.

    Phases follow one another: shadow, validate, switch, cleanup; --rollback and --abandon are possible after each.
    What was killed goes on where it stopped, with the same command. How much lag and how many repeats validate bears
    are settings. Exit codes: 0 done, 1 not all of it, or there is a difference, 2 refused, and nothing was changed.
    """
    action = _action(phase, rollback=rollback, abandon=abandon)
    if action == "shadow":
        if target is None:
            raise ConfigError(
                "--phase shadow needs MODULE:APP and --consumers or --list, as 'parti migrate plan' does"
            )
        wish: Wish | None = _wish(target, consumers, list_, workers, nats, bucket)
    elif target or consumers or list_:
        raise ConfigError(
            f"'{action}' goes by what the shadow phase has recorded; leave out MODULE:APP and consumers"
        )
    else:
        wish = None
    settings = wish.settings if wish else read_settings(nats, bucket)
    pace = Pace(at_once or settings.migrate_at_once, drain_timeout, take_timeout, dual, take_over)
    slo = Slo(settings.migrate_max_lag_msgs, settings.migrate_max_redelivery_ratio, settings.migrate_breaches)
    recorded = ShadowLedger(ledger) if ledger else None
    manner = Manner(pace, windows, window or settings.migrate_window_s, slo, recorded)
    quiet = json or dry_run

    async def work(migrator: Migrator) -> Result | str:
        if dry_run:
            return await (migrator.foresee_shadow(wish) if wish else migrator.foresee(action, manner))
        if wish:
            return await migrator.shadow(wish)
        confirmed = await _confirm(migrator, action, manner, yes=yes)
        return await migrator.run(action, replace(manner, confirmed=confirmed))

    try:
        with Bar(quiet=quiet) as bar:
            outcome = run_interruptibly(_in_bucket(settings, work, bar, wish))
    except (RequestTimeout, LeaseLost, ApiError) as error:
        typer.echo(f"parti: {one_line(str(error))}; what was begun goes on with the same command", err=True)
        raise typer.Exit(1) from None
    if isinstance(outcome, str):
        print_json({"dry_run": True, "text": outcome}) if json else open_console().print(f"Dry run: {outcome}.")
        return
    if json:
        print_json(result_json(settings.bucket, outcome))
    else:
        print_result(open_console(), outcome)
    if not outcome.complete:
        raise typer.Exit(1)


@app.command()
def status(
    all: Annotated[bool, typer.Option("--all", help="List every partition.")] = False,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Show how far a migration is: its phase, who has the partitions, who did what and when.

    Exit codes: 0 there is one, 2 there is none, or no server or bucket.
    """
    settings = read_settings(nats, bucket)

    async def look() -> None:
        async with open_control(settings) as control:
            desk = MigrationDesk(control.plane, _who())
            if await desk.load() is None:
                raise ConfigError(
                    f"there is no migration in {control.place}; 'parti migrate plan MODULE:APP' shows what is there"
                )
            situation = await read_situation(control.plane)
            if json:
                print_json(status_json(settings.bucket, desk, situation, everything=all))
            else:
                print_status(open_console(), control.place, desk, situation, everything=all)

    run_interruptibly(look())


# ── the question ──────────────────────────────────────────────────────────────────────────────────────────────────


def _action(phase: str | None, *, rollback: bool, abandon: bool) -> Action:
    if rollback + abandon + (phase is not None) != 1:
        raise ConfigError(
            "say what to do: --phase shadow, validate, switch or cleanup, --rollback or --abandon; one of them"
        )
    return "rollback" if rollback else "abandon" if abandon else phase  # type: ignore[return-value]


def _wish(
    target: str, consumers: str | None, path: Path | None, workers: int, nats: str | None, bucket: str | None
) -> Wish:
    if (consumers is None) == (path is None):
        raise ConfigError("say which consumers: --consumers PATTERN, such as 'orders-{partition}', or --list FILE")
    naming = _naming(consumers, path)
    settings, job = load_app(target).job(nats=nats, bucket=bucket, fleet=True)
    return Wish(settings, job, naming, workers)


def _naming(consumers: str | None, path: Path | None) -> Naming:
    if consumers is not None:
        return Pattern(consumers)
    assert path
    try:
        return Listed(str(path), path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--list {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


async def _confirm(migrator: Migrator, action: Action, manner: Manner, *, yes: bool) -> bool:
    """Ask before old consumers are deleted, or messages may be handled twice; whether somebody said yes.

    Raises `ConfigError` where nobody can be asked.
    """
    record, _ = await migrator.check(action)
    assert record
    deletes = action == "cleanup" or (action == "switch" and record.retention == WORK_QUEUE.name)
    if yes or not (deletes or (action == "abandon" and (await migrator.foresee_abandonment()).doubts)):
        return yes
    would = (await migrator.foresee(action, manner)).removeprefix("would ")
    if not can_ask():
        raise ConfigError(f"this would {would}; say --yes if that is meant")
    if not await confirmed(f"This will {would}. Go on?", err=True):
        raise ConfigError("nothing was done")
    return True


async def _in_bucket(
    settings: Settings, work: Callable[[Migrator], Awaitable[Result | str]], bar: Bar, wish: Wish | None
) -> Result | str:
    """Do something in the bucket; the first phase makes it when it is missing."""
    if wish is None:
        async with open_control(settings) as control:
            return await work(Migrator(_patient(control.plane), _who(), told=bar.show))
    async with open_server(settings) as (connection, api):
        # Before the bucket is made: what is refused leaves nothing behind.
        if f"KV_{settings.bucket}" not in await api.stream_names():
            check_plan((await survey(connection, settings, wish.job, wish.naming, workers=wish.workers)).plan)
        plane = await ControlPlane.open(connection, api, settings.bucket, replicas=settings.replicas)
        return await work(Migrator(_patient(plane), _who(), told=bar.show))


def _patient(plane: ControlPlane) -> ControlPlane:
    """The same, for a server that has thousands of consumers to look after."""
    api = JetStreamApi(plane.connection, timeout_s=_ANSWER_S)
    return ControlPlane(plane.connection, api, Bucket(api, plane.bucket.name), plane.created)


def _who() -> str:
    """User and host, for the record."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
