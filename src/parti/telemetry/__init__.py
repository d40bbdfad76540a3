"""What a running worker tells its operators: metrics, health, logs and traces; and what they make of them.

Every metric is declared in `metrics`, every health signal passes through `Health`, and every log line through the
redaction in `logs`. Alerts, objectives and dashboards are values that name declared metrics only. May import
`errors`, `setting_types`, `version`, `model` and `core`, nothing else of parti.
Invariant guarded here: telemetry never breaks or blocks the work it reports on, and never shows a secret.
"""

from parti.telemetry.health import Health
from parti.telemetry.http import MetricsServer
from parti.telemetry.logs import configure_logging
from parti.telemetry.metrics import Metrics

__all__ = ["Health", "Metrics", "MetricsServer", "configure_logging"]
