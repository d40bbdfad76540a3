"""`parti alerts`: rules for Prometheus and dashboards for Grafana, with thresholds of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parti.errors import ConfigError
from parti.telemetry.alerts import Thresholds
from parti.telemetry.dashboards import dashboards
from parti.telemetry.grafana import dashboard_json
from parti.telemetry.rules import RUNBOOKS, alert_rules, objective_rules

_DEFAULT = Thresholds()


def alerts(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go; made if need be.")],
    latency_p95: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Usual p95 of your handlers; twice that is the limit of the objective."),
    ] = _DEFAULT.latency_p95_s,
    lag: Annotated[
        int, typer.Option(metavar="MESSAGES", min=0, help="More waiting messages than that are too many.")
    ] = _DEFAULT.lag_msgs,
    move: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Moves that take longer are slow.")
    ] = _DEFAULT.move_s,
    pipeline_lag: Annotated[
        int, typer.Option(metavar="ROWS", min=0, help="A table that is further behind lags.")
    ] = _DEFAULT.pipeline_lag,
    audit_age: Annotated[
        float, typer.Option(metavar="HOURS", min=0.1, help="An audit that ended longer ago is old.")
    ] = _DEFAULT.audit_age_s / 3600,
    runbooks: Annotated[
        str, typer.Option(metavar="URL", help="Where the runbook pages are; goes into each alert.")
    ] = RUNBOOKS,
) -> None:
    """Write rules for Prometheus and dashboards for Grafana.

    Files of the same names are replaced. Without options they are those that come with parti, in deploy/. Exit codes:
    0 written, 2 bad input.
    """
    t = Thresholds(
        latency_p95_s=latency_p95,
        lag_msgs=lag,
        move_s=move,
        pipeline_lag=pipeline_lag,
        audit_age_s=round(audit_age * 3600),
    )
    try:
        files = {
            "parti-alerts.yml": alert_rules(t, runbooks),
            "parti-objectives.yml": objective_rules(t, runbooks),
            **{name: dashboard_json(each) for name, each in dashboards().items()},
        }
    except ValueError as error:
        raise ConfigError(f"--latency-p95 {latency_p95:g} does not work: {error} (twice it must be one)") from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written to: {error.strerror}; name another directory") from None
    typer.echo(f"Written to {directory}: {', '.join(files)}")
