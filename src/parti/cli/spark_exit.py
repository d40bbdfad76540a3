"""How a command that runs Spark ends at once."""

from __future__ import annotations

import signal
from typing import Never

from parti.app.signals import exit_at_once
from parti.spark.session import kill_jvm


def exit_with_spark(number: signal.Signals) -> Never:
    """End this process and its JVM without any tidying up and without a word; see `exit_at_once`."""
    kill_jvm()
    exit_at_once(number)
