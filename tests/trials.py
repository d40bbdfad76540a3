"""How many examples a property is tried with: a quarter of them by `make test`, all of them by `make test-slow`."""

from __future__ import annotations

import os

_ALL = os.environ.get("PARTI_EXAMPLES") == "all"


def examples_of(many: int, at_least: int = 25) -> int:
    """How many of the examples that are wanted are tried in this run; those who want few get them all."""
    return many if _ALL else max(many // 4, min(many, at_least))
