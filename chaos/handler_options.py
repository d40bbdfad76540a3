"""What the workers' handlers are told, as JSON in the environment."""

from __future__ import annotations

import msgspec

ENV_OPTIONS = "CHAOS_HANDLER"
ENV_PROCESS = "CHAOS_PROCESS"
"""Name of the process, and of the file with its notes."""
LOOP = ".loop"
"""Ending of the file that says whose event loop a worker process runs on."""


class HandlerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be handled, how long that takes, and where it is noted."""

    stream: str
    template: str
    partitions: tuple[str, ...]
    notes: str
    """Directory of the files."""
    takes_ms: tuple[float, float] = (0.0, 4.0)
    """A message takes between so many and so many milliseconds, always the same for the same message."""
    seed: int = 0
