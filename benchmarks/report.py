"""What every benchmark writes down: the machine it ran on, and its result as JSON in `benchmarks/results/`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
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


def write_result(name: str, data: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Write `data`, with the machine added under `machine` unless it is there, to `<directory>/<name>.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **data}, indent=2) + "\n")
    return path


class LiveLine:
    """A line that says how far a run is: rewritten in place on a terminal, now and then a new one elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._next_s = 0.0

    def show(self, text: str) -> None:
        """Show the text unless the last one is too fresh."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + (0.2 if self._terminal else 10.0)
            print(f"\r{text:<100}" if self._terminal else text, end="" if self._terminal else "\n", flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._terminal:
            print()


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
