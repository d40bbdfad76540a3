"""What an incremental audit remembers: a directory with a few small Parquet tables and a mark.

    current.json        which run counts: stream, ledger, where to go on, the chains of the ledger
    run-<n>/<table>     unfinished, rows, holdings, reported: see `parti.spark.audit.Carried`

A run is written in full before `current.json` is replaced, so an audit that is killed leaves the one before in force.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parti.errors import ConfigError
from parti.spark.audit import Carried

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CURRENT = "current.json"
_TABLES = ("unfinished", "rows", "holdings", "reported")
_FORM = 1


@dataclass(frozen=True, slots=True)
class Chain:
    """What is known of the batches of one process."""

    worker: str
    last_number: int
    closed: bool
    last_us: int | None
    """When it last finished a message."""
    ledger_seq: int
    """Where its first batch is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far an audit got."""

    stream: str
    created: str
    ledger_stream: str
    ledger_created: str
    next_seq: int
    next_ledger_seq: int
    chains: Mapping[str, Chain] = field(default_factory=dict)

    def check(self, stream: str, created: str, ledger_stream: str, ledger_created: str) -> None:
        """Raise ConfigError unless these are the streams that the audit before has seen."""
        if (self.stream, self.ledger_stream) != (stream, ledger_stream):
            raise ConfigError(
                f"the state is of stream {self.stream!r} and ledger {self.ledger_stream!r}, not of {stream!r} and "
                f"{ledger_stream!r}; name another directory with --state"
            )
        if (self.created, self.ledger_created) != (created, ledger_created):
            raise ConfigError(
                f"stream {stream!r} or its ledger was made anew since the last audit; name an empty directory with "
                f"--state to begin again"
            )


def read_mark(directory: Path) -> Mark | None:
    """How far the audit before got; None when there was none. Raises ConfigError when it cannot be read."""
    return _read_mark(directory)[0]


def load_carried(spark: SparkSession, directory: Path) -> Carried:
    """What the audit before has left."""
    _, number = _read_mark(directory)
    tables = {name: spark.read.parquet(str(_run(directory, number) / name)) for name in _TABLES}
    return Carried(**tables)


def save_state(directory: Path, mark: Mark, carried: Carried) -> None:
    """Leave everything to the next audit; what is older is deleted."""
    directory.mkdir(parents=True, exist_ok=True)
    _, before = _read_mark(directory)
    number = before + 1
    run = _run(directory, number)
    shutil.rmtree(run, ignore_errors=True)
    for name in _TABLES:
        getattr(carried, name).coalesce(1).write.parquet(str(run / name))
    text = json.dumps({"form": _FORM, "run": number, "mark": asdict(mark)}, indent=1)
    draft = directory / f"{_CURRENT}.new"
    draft.write_text(text)
    os.replace(draft, directory / _CURRENT)  # noqa: PTH105 - the name of what it does
    shutil.rmtree(_run(directory, before), ignore_errors=True)


def _run(directory: Path, number: int) -> Path:
    return directory / f"run-{number}"


def _read_mark(directory: Path) -> tuple[Mark | None, int]:
    path = directory / _CURRENT
    if not path.exists():
        return None, 0
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if found["form"] != _FORM:
            raise ValueError(f"form {found['form']}")
        chains = {process: Chain(**chain) for process, chain in found["mark"].pop("chains").items()}
        return Mark(**found["mark"], chains=chains), int(found["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no state of an audit ({error}); name another directory with --state, or delete this one"
        ) from None
