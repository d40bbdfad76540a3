"""`parti worker`: run a worker until it is told to leave."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from parti.errors import HandlerMissing
from parti.telemetry.logs import configure_logging
from parti.worker.app import App
from parti.worker.process import serve


def worker(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="Where the app is, for example orders.main:app.")
    ],
    nats: Annotated[str | None, typer.Option(help="Server URL, or several with commas between.")] = None,
    worker_id: Annotated[str | None, typer.Option(help="Identity of this worker; names its consumer.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics and /healthz here; 0 for any port.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, console or json.")] = None,
) -> None:
    """Run a worker.

    Every setting can also come from the environment (PARTI_NATS, PARTI_WORKER_ID, ...) or from parti.toml.
    SIGTERM or Ctrl-C drains: pulling stops, running handlers finish, positions are stored. A second one leaves at
    once. Exit codes: 0 drained, 1 something will be delivered again, 2 the worker could not start.
    """
    app = load_app(target)
    made = app.worker(
        nats=nats, worker_id=worker_id, metrics_port=metrics_port, log_level=log_level, log_format=log_format
    )
    settings = made.settings

    def speak() -> None:
        configure_logging(settings.log_level, settings.log_format)

    # A worker that cannot start says so in one line; what led there is only of interest to who asked for it.
    configure_logging("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
    code = asyncio.run(serve(made, on_started=speak))
    if code:
        raise typer.Exit(code)


def load_app(target: str) -> App:
    """Import `module:app`; raises `HandlerMissing` with the reason in one line."""
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
        raise HandlerMissing(f"module {module_name!r} cannot be imported: it needs {error.name!r}") from error
    except Exception as error:
        raise HandlerMissing(f"module {module_name!r} fails on import: {type(error).__name__}: {error}") from error
    app = getattr(module, name, None)
    if not isinstance(app, App):
        kind = "has nothing named" if app is None else f"has a {type(app).__name__}, not a parti.App, named"
        raise HandlerMissing(f"module {module_name!r} {kind} {name!r}; expected app = parti.App(...)")
    return app
