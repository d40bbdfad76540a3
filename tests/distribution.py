"""How `make test` shares the tests out: Spark to two processes, and first of all what takes long.

A file stays whole, since its tests may share what is costly to set up. The files of Spark make two portions: each
process that gets one of them starts a Java of its own, which takes more than most of the files do; but one process
alone would still be busy with them when the others have finished everything else. pytest-xdist would begin with the
files that have the most tests, which are the quick ones, and end with one process that works on a slow file while the
others have nothing left to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

TOGETHER = "tests/spark"
_APART = {f"{TOGETHER}/test_{name}.py" for name in ("cluster", "java", "replay_tasks", "secrets")}
"""These need no session, or one of their own."""
_LEDGER = ("audit", "audit_live", "audit_properties", "demo_proof", "replay")
_SECOND = {f"{TOGETHER}/test_{name}.py" for name in _LEDGER}
"""What is about the ledger makes a portion of its own, as long as the other one."""
_FIRST = (TOGETHER, "tests/chaos", "tests/integration", "tests/sim", "tests/property")
_ROOT = Path(__file__).parents[1]


class TwoJavas(LoadFileScheduling):  # type: ignore[misc]
    """A file at a time, in the order of `longest_first`; the files of Spark count as two."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        if not file.startswith(f"{TOGETHER}/") or file in _APART:
            return file
        return f"{TOGETHER} 2" if file in _SECOND else TOGETHER


def longest_first(items: list[pytest.Item]) -> None:
    """Put the directories with the long tests in front; each keeps its order."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    ranks = (n for n, directory in enumerate(_FIRST) if item.path.is_relative_to(_ROOT / directory))
    return next(ranks, len(_FIRST))
