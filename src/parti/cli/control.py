"""The control plane as the operator's commands see it: opened for reading only, shown on one console."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from parti.config import Settings, load_settings
from parti.coordination.control_plane import ControlPlane
from parti.errors import ConfigError, NotFound
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.safe_text import escape, escape_line, strip_userinfo
from parti.telemetry.logs import configure_logging

_CONNECT_S = 3.0
"""Nobody at a terminal wants to wait longer, unless the settings say so."""
_PIPED_WIDTH = 1000
"""Whatever reads a pipe has no edge that lines would have to end at."""
_BLANKS = re.compile(r" +$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Control:
    """One fleet's control plane, for reading."""

    settings: Settings
    plane: ControlPlane

    @property
    def place(self) -> str:
        """Where this is, without credentials."""
        servers = ",".join(strip_userinfo(url) for url in self.settings.nats)
        return f"bucket {self.settings.bucket} on {servers}"


@asynccontextmanager
async def open_control(settings: Settings) -> AsyncIterator[Control]:
    """Connect and find the bucket; it is never created.

    Raises `ConfigError` when there is none, and what `Connection.open` raises.
    """
    async with open_server(settings) as (connection, api):
        bucket = Bucket(api, settings.bucket)
        try:
            created = (await bucket.info()).created
        except NotFound:
            raise ConfigError(await _missing(api, settings)) from None
        yield Control(settings, ControlPlane(connection, api, bucket, created))


@asynccontextmanager
async def open_server(settings: Settings) -> AsyncIterator[tuple[Connection, JetStreamApi]]:
    """Connect, within a time that somebody at a terminal is ready to wait; raises what `Connection.open` raises."""
    configure_logging("error", settings.log_format)
    if "connect_timeout_s" not in settings.model_fields_set:
        settings = settings.model_copy(update={"connect_timeout_s": _CONNECT_S})
    connection = await Connection.open(settings, name=f"{settings.prefix}-cli")
    try:
        yield connection, JetStreamApi(connection)
    finally:
        await connection.close()


async def _missing(api: JetStreamApi, settings: Settings) -> str:
    others = [n.removeprefix("KV_") for n in await api.stream_names() if n.startswith("KV_")]
    known = f"; buckets here: {', '.join(others[:10])}" if others else ""
    return (
        f"bucket {settings.bucket!r} does not exist: no worker has ever run here{known}; start one with "
        f"'parti worker MODULE:APP', or name another place with --bucket or --nats"
    )


def read_settings(nats: str | None, bucket: str | None) -> Settings:
    """The settings, with the options of the command on top."""
    return load_settings({"nats": nats, "bucket": bucket})


# ── output ────────────────────────────────────────────────────────────────────────────────────────────────────────


def open_console() -> Console:
    """The console on stdout; lines that go into a pipe are not cut."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    if not piped:
        return _SafeConsole(highlight=False, markup=False, emoji=False)
    file = cast("IO[str]", _Trimmed())
    return _SafeConsole(highlight=False, markup=False, emoji=False, width=_PIPED_WIDTH, file=file)


class _SafeConsole(Console):
    """A console that shows control characters of outside text as escapes, whoever has forgotten to.

    Columns are as wide as what `shown` makes of a text; what only ends here may be cut at the edge of its column.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The parts of what is to be shown."""
        for part in super().render(renderable, options):
            safe = part.text if part.control else escape(part.text)
            yield part if safe == part.text else Segment(safe, part.style)


def shown(text: str, style: str = "") -> Text:
    """Outside text on one line, for a table or a line on the console: no markup, control characters as escapes."""
    return Text(escape_line(text), style=style)


class _Trimmed:
    """Stdout, without the blanks that fill the columns of a table up to their width."""

    def write(self, text: str) -> int:
        sys.stdout.write(_BLANKS.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def print_json(answer: Mapping[str, Any]) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(answer, indent=2))


def timestamp(moment: datetime) -> str:
    """A moment in JSON: UTC, whole milliseconds."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def span(seconds: float) -> str:
    """A length of time for people: `0.4 s`, `45 s`, `12 min`, `30 h`, `9 d`; never below zero."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def count(number: int, noun: str) -> str:
    """`1 partition`, `1,200 partitions`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Collection[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def no_such_worker(name: str, workers: Collection[str], identities: Collection[str] = ()) -> ConfigError:
    """The error for a name that no worker has."""
    close = difflib.get_close_matches(name, [*workers, *identities], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    here = f"workers here: {listed(workers, 10)}" if workers else "no worker is running here"
    return ConfigError(f"there is no worker {name!r}; {hint}{here}")
