"""How `make test` shares the tests out: Spark to one process, and first of all what takes long.

A file stays whole, since its tests may share what is costly to set up. The files of Spark are one portion: a Java
takes more than a processor for itself, and starting one takes longer than most of the files do. The other processes
have the tests that wait more than they work. pytest-xdist would begin with the files that have the most tests, which
are the quick ones, and end with one process that works on a slow file while the others have nothing left to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

TOGETHER = "tests/spark"
_FIRST = (TOGETHER, "tests/chaos", "tests/integration", "tests/sim", "tests/property")
_ROOT = Path(__file__).parents[1]


class OneJava(LoadFileScheduling):  # type: ignore[misc]
    """A file at a time, in the order of `longest_first`; the files of Spark count as one."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return TOGETHER if file.startswith(f"{TOGETHER}/") else file


def longest_first(items: list[pytest.Item]) -> None:
    """Put the directories with the long tests in front; each keeps its order."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    ranks = (n for n, directory in enumerate(_FIRST) if item.path.is_relative_to(_ROOT / directory))
    return next(ranks, len(_FIRST))
