"""Write the reference pages that are derived from the code: `python docs/generate.py`."""

from __future__ import annotations

from pathlib import Path

from parti.config import settings_reference
from parti.jobs.settings import jobs_reference
from parti.spark.pipelines.settings import pipeline_reference
from parti.telemetry.metrics import metrics_reference

REFERENCE = Path(__file__).parent / "reference"


def main() -> None:
    """Write every generated page."""
    REFERENCE.mkdir(exist_ok=True)
    (REFERENCE / "settings.md").write_text(settings_reference(), encoding="utf-8")
    (REFERENCE / "jobs.md").write_text(jobs_reference(), encoding="utf-8")
    (REFERENCE / "pipeline.md").write_text(pipeline_reference(), encoding="utf-8")
    (REFERENCE / "metrics.md").write_text(metrics_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
