"""Write the reference pages that are derived from the code: `python docs/generate.py`."""

from __future__ import annotations

from pathlib import Path

from states_page import pages

from parti.cli.reference import cli_reference, errors_reference
from parti.config.reference import settings_reference
from parti.core.role_matrix import permissions_reference
from parti.jobs.settings import jobs_reference
from parti.spark.pipelines.settings import pipeline_reference
from parti.telemetry.dashboards import dashboards
from parti.telemetry.grafana import dashboard_json
from parti.telemetry.reference import metrics_reference
from parti.telemetry.rules import alert_rules, objective_rules

REFERENCE = Path(__file__).parent / "reference"
DEPLOY = Path(__file__).parents[1] / "deploy"


def main() -> None:
    """Write every generated page."""
    REFERENCE.mkdir(exist_ok=True)
    (REFERENCE / "settings.md").write_text(settings_reference(), encoding="utf-8")
    (REFERENCE / "cli.md").write_text(cli_reference(), encoding="utf-8")
    (REFERENCE / "errors.md").write_text(errors_reference(), encoding="utf-8")
    (REFERENCE / "permissions.md").write_text(permissions_reference(), encoding="utf-8")
    (REFERENCE / "jobs.md").write_text(jobs_reference(), encoding="utf-8")
    (REFERENCE / "pipeline.md").write_text(pipeline_reference(), encoding="utf-8")
    (REFERENCE / "metrics.md").write_text(metrics_reference(), encoding="utf-8")
    for path, text in pages().items():
        (Path(__file__).parent / path).write_text(text, encoding="utf-8")
    for directory, files in deployed().items():
        (DEPLOY / directory).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (DEPLOY / directory / name).write_text(text, encoding="utf-8")


def deployed() -> dict[str, dict[str, str]]:
    """Rules and dashboards by directory and name of the file."""
    return {
        "prometheus": {"parti-alerts.yml": alert_rules(), "parti-objectives.yml": objective_rules()},
        "grafana": {name: dashboard_json(each) for name, each in dashboards().items()},
    }


if __name__ == "__main__":
    main()
