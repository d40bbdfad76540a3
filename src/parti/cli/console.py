"""`parti console`: a web page of the fleet, for looking only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parti.app.signals import run_interruptibly
from parti.cli.control import open_control
from parti.cli.options import BucketOption, NatsOption
from parti.config import Settings, load_settings
from parti.errors import ConfigError
from parti.telemetry.logs import configure_logging


def console(
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on (127.0.0.1); any other needs --token-file or --basic-auth-file.",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port to listen on (8787); 0 for any free one.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with a token that whoever looks has to name.")
    ] = None,
    basic_auth_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with lines user:password, one of which they have to name."),
    ] = None,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Show the fleet in a browser until Ctrl-C: partitions, workers, lags, moves, dead letters, jobs.

    The page only looks: nothing can be changed with it. Without options it listens on http://127.0.0.1:8787 and asks
    nobody anything. It is plain HTTP: put a proxy that speaks TLS in front of it before others use it. Exit codes: 0
    ended, 2 no server, no fleet, or the address cannot be used.
    """
    settings = load_settings(
        {
            "nats": nats,
            "bucket": bucket,
            "console_host": host,
            "console_port": port,
            "console_token_file": token_file,
            "console_basic_auth_file": basic_auth_file,
        }
    )
    run_interruptibly(_serve(settings))


async def _serve(settings: Settings) -> None:
    try:
        from parti.console import server  # noqa: PLC0415 - an extra that the other commands do without
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, the console needs it; install the extra: parti[console]"
        ) from None
    listener, access = server.prepare(settings)
    try:
        async with open_control(settings) as control:

            def tell() -> None:
                # Only now: whoever waits for this line may open the page.
                typer.echo(f"console of {control.place}: {server.url_of(listener)} (Ctrl-C ends)")
                configure_logging(settings.log_level, settings.log_format)

            await server.serve(control.plane, settings, listener, access, tell)
    finally:
        listener.close()
