"""Options that several commands take, in the same words everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

NatsOption = Annotated[str | None, typer.Option(help="Server URL, or several with commas between.")]
BucketOption = Annotated[str | None, typer.Option(help="Bucket of the fleet's control plane.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Return as soon as the order is written.")]
TimeoutOption = Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="Wait no longer than this.")]
TIMEOUT_S = 60.0
