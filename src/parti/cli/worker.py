"""`parti worker`: run a worker until it is told to leave."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import typer

from parti.app.app import App
from parti.app.process import run_worker
from parti.app.supervisor import die_with_parent, own_slot, supervise
from parti.cli.options import LogFormatOption, LogLevelOption, MetricsPortOption, NatsOption
from parti.config import Settings
from parti.core.retry import describe
from parti.core.stall import gil_timeout_s
from parti.errors import ConfigError, HandlerMissing
from parti.telemetry.logs import configure_logging

_T = TypeVar("_T")
_PARTI = str(Path(__file__).parents[1])


def worker(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="Where the app is, for example orders.main:app.")
    ],
    nats: NatsOption = None,
    worker_id: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Insist on this worker id; without it the lowest free one is taken."),
    ] = None,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Share --worker-id with other processes: one holds it and works, the others stand by."
        ),
    ] = False,
    identity: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of host or pod; gets its worker id and partitions back after a restart."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Run this many worker processes and restart those that die."),
    ] = None,
    solo: Annotated[bool, typer.Option("--solo", help="Take part in no fleet: read all partitions alone.")] = False,
    metrics_port: MetricsPortOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Run a worker: start the same command as often as you like, and the workers share the partitions.

    Every setting can also come from the environment (PARTI_NATS, PARTI_WORKER_ID, ...) or from parti.toml.
    SIGTERM or Ctrl-C drains: pulling stops, running handlers finish, positions are stored. A second one leaves at
    once. Exit codes: 0 drained, 1 something will be delivered again or no thread could run, 2 the worker could not
    start, 70 it stood still.
    """
    die_with_parent()  # first: importing the app may take long
    options: dict[str, Any] = {
        "nats": nats,
        "worker_id": worker_id,
        "standby": True if standby else None,
        "identity": identity,
        "metrics_port": metrics_port,
        "log_level": log_level,
        "log_format": log_format,
        "fleet": False if solo else None,
    }
    if slot := own_slot():
        # What the supervisor chose beats the app's own arguments, which all slots share.
        options |= {"identity": slot.identity, "metrics_port": slot.metrics_port, "owner_token": slot.owner_token}
    app = load_app(target)
    made = app.worker(**options)
    if processes is not None:
        raise typer.Exit(_supervise(processes, target, options, made.settings))
    timeout_s = gil_timeout_s(made.settings.stall_after_s, made.settings.lease_ttl_s)
    if code := run_worker(made, gil_timeout_s=timeout_s):
        raise typer.Exit(code)


def _supervise(processes: int, target: str, options: Mapping[str, object], settings: Settings) -> int:
    if processes > 1 and settings.worker_id is not None and not settings.standby:
        raise ConfigError(
            f"worker_id={settings.worker_id!r} cannot be shared by {processes} processes; leave it out, or use "
            f"--identity, or let all but one of them stand by with --standby"
        )
    if processes > 1 and not settings.fleet:
        raise ConfigError(f"{processes} processes cannot each read everything alone; leave out --solo (fleet=false)")
    configure_logging(settings.log_level, settings.log_format)
    # Identity and port come from the slot.
    apart = {"identity", "metrics_port", "fleet", "standby"}
    shared = {k: v for k, v in options.items() if v is not None and k not in apart}
    environment = dict(os.environ)
    if settings.metrics_port is not None:
        environment["PARTI_METRICS_PORT"] = str(settings.metrics_port)
    return supervise(
        # -P: as with the installed command, no file in the current directory can stand in for parti itself.
        [
            *(sys.executable, "-P", "-m", "parti", "worker", target),
            *(f"--{name.replace('_', '-')}={value}" for name, value in shared.items()),
            *([] if settings.fleet else ["--solo"]),
            *(["--standby"] if settings.standby else []),
        ],
        processes=processes,
        identity=settings.identity or socket.gethostname().replace(".", "-"),
        environment=environment,
        drain_timeout_s=settings.drain_timeout_s,
    )


def load_app(target: str) -> App:
    """Import `module:app`; raises `HandlerMissing` with the reason in one line."""
    return load_named(target, App, "parti.App")


def load_named(target: str, kind: type[_T], called: str) -> _T:
    """Import `module:app`, which must be of this kind; raises `HandlerMissing` with the reason in one line."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise HandlerMissing(f"{target!r} does not name an app; expected MODULE:APP, for example orders.main:app")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise HandlerMissing(
                f"there is no module {error.name!r} here; run the command where it can be imported"
            ) from error
        raise HandlerMissing(
            f"module {module_name!r} cannot be imported: it needs {error.name!r}{_place_of(error, module_name)}"
        ) from error
    except Exception as error:
        raise HandlerMissing(
            f"module {module_name!r} fails on import: {describe(error)}{_place_of(error, module_name)}"
        ) from error
    app = getattr(module, name, None)
    if not isinstance(app, kind):
        found = "has nothing named" if app is None else f"has {_a(type(app).__name__)}, not a {called}, named"
        raise HandlerMissing(f"module {module_name!r} {found} {name!r}; expected {name} = {called}(...)")
    return app


def _place_of(error: Exception, module_name: str) -> str:
    """File and line where a module failed: the innermost one of the user's own code, else of a library."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno and not error.filename.startswith("<"):
        return f" (at {_short(error.filename)}, line {error.lineno})"
    calls = [
        (frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_given(_file_of(frame))
    ]
    package = module_name.partition(".")[0]
    # An app may be installed like a library.
    own = [
        (frame, line)
        for frame, line in calls
        if not _is_installed(_file_of(frame)) or str(frame.f_globals.get("__name__")).partition(".")[0] == package
    ]
    found = own or calls
    return f" (at {_short(_file_of(found[-1][0]))}, line {found[-1][1]})" if found else ""


def _file_of(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _is_given(file: str) -> bool:
    """Whether this belongs to Python or to parti, wherever parti itself is installed."""
    if file.startswith(("<", f"{_PARTI}{os.sep}")):
        return True
    # Outside of a virtual environment, libraries lie inside of the directory of the standard library.
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return not _is_installed(file) and any(file.startswith(f"{path}{os.sep}") for path in standard)


def _short(filename: str) -> str:
    here = f"{Path.cwd()}{os.sep}"
    return filename.removeprefix(here)


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"
