"""What every benchmark writes down: the machine it ran on, and its result as JSON in `benchmarks/results/`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parti.embedded.binary import find_binary
from parti.errors import PartiError

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Describe where and on what a figure was measured; no host or user names."""
    load_1m, _, _ = os.getloadavg()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "load_1m": round(load_1m, 2),
        "nats_server": _server_version(),
        "commit": _commit(),
    }


def write_result(name: str, data: Mapping[str, Any]) -> Path:
    """Write `data`, with the machine added under `machine` unless it is there, to `results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **data}, indent=2) + "\n")
    return path


def _server_version() -> str:
    try:
        return find_binary().version_text
    except PartiError:
        return "unknown"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
