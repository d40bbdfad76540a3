"""`parti dev`: what a developer needs on their own machine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, Never

import typer

from parti.app.signals import leave_event
from parti.cli.demo.command import demo
from parti.embedded import Cluster, Server
from parti.errors import PartiError

app = typer.Typer(help="Tools for development on this machine.", no_args_is_help=True)
app.command()(demo)

_ALIVE_CHECK_S = 0.5
_BAD_INPUT = 2


@app.command()
def server(
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Client port; a free one if left out.")] = None,
    store_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the data here; a temporary directory if left out.")
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="N", help="1 for a single server, 3 for a cluster.")] = 1,
) -> None:
    """Run a NATS server with JetStream on this machine until Ctrl-C.

    Loopback only, without credentials, for development. With 3 nodes the ports are PORT, PORT+1 and PORT+2.
    Exit codes: 0 stopped, 1 the server died, 2 it could not start as asked.
    """
    if nodes not in {1, 3}:
        _fail(f"--nodes is {nodes}: expected 1 or 3")
    if port is not None and not 1 <= port <= 65536 - nodes:
        _fail(f"--port is {port}: expected 1 to {65536 - nodes}")
    running: Server | Cluster
    running = Server(port, store_dir) if nodes == 1 else Cluster(nodes, port=port, store_dir=store_dir)
    with leave_event() as stop:  # also while the server starts, so that it always stops in order
        try:
            running.start_sync()
        except PartiError as error:
            _fail(str(error))
        try:
            kept = f"data kept in {store_dir}" if store_dir else "data is removed then"
            typer.echo(running.url)
            typer.echo(f"NATS with JetStream is ready. Stop it with Ctrl-C; {kept}.")
            _watch(running, stop)
        finally:
            running.stop_sync()


def _watch(running: Server | Cluster, stop: threading.Event) -> None:
    servers = (running,) if isinstance(running, Server) else running.servers
    while not stop.wait(_ALIVE_CHECK_S):
        for each in servers:
            if not each.running:
                _fail(f"{each.url} ended by itself; start it again, with --store-dir to keep its log", code=1)


def _fail(reason: str, code: int = _BAD_INPUT) -> Never:
    typer.echo(f"parti: {reason}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
