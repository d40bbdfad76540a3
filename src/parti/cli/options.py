"""Options that several commands take, in the same words everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

NatsOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Server URL, or several with commas between; else the setting nats (127.0.0.1:4222)."
    ),
]
BucketOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Bucket of the fleet's control plane; else the setting bucket (parti)."),
]
PARTITIONS_HELP = "As 'parti partitions' lists them."
LogLevelOption = Annotated[
    str | None,
    typer.Option(metavar="LEVEL", help="debug, info, warning, error or critical; else the setting (info)."),
]
LogFormatOption = Annotated[
    str | None, typer.Option(metavar="FORMAT", help="auto, console or json; else the setting (auto).")
]
MetricsPortOption = Annotated[
    int | None, typer.Option(metavar="PORT", help="Serve /metrics and /healthz here; 0 for any port.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Return as soon as the order is written.")]
TimeoutOption = Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="Wait no longer than this.")]
TIMEOUT_S = 60.0
