"""Views: what operators and browsers see of a fleet whose records anybody may have written."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

import msgspec

from fuzz.target import Target, WrongError
from fuzz.targets.records import readable
from fuzz.targets.screen import screen
from fuzz.targets.situations import entries_in, odd_records, single_records, whole_fleet
from parti.cli import status, top
from parti.cli.control import open_console
from parti.cli.workers import worker_table
from parti.console import picture
from parti.console.document import Document
from parti.coordination.orders import Situation, obstacle
from parti.coordination.worker_rows import worker_rows
from parti.model.fleet import decode
from parti.model.history import HistoryRecord, missing_before

_PLACE = "bucket parti-fleet on nats://127.0.0.1:4222"
_TITLES = ("worker", "state", "owns", "load", "heartbeat", "capacity", "host:pid", "identity", "version", "problems")


def one(data: bytes) -> None:
    """Show the same fleet everywhere."""
    entries = entries_in(data)
    situation = Situation.of(entries)
    history = [
        record
        for key, entry in entries.items()
        if key.startswith("history.")
        and (record := readable(lambda value: decode(value, HistoryRecord), entry.value)) is not None
    ]
    missing_before(history)
    for partition in situation.records.claims:
        obstacle(situation, partition, "w-1")
    kind = zlib.crc32(data) % 4  # one view of each fleet: rich takes longer than all the rest
    if kind == 0:
        _browser(situation, history)
        return
    with screen():
        console = open_console()
        if kind == 1:
            shown = status.take_picture(_PLACE, situation.records, situation.orders)
            console.print(status.draw(shown, console, fit=True))
        elif kind == 2:
            console.print(top.draw(top.take_picture(_PLACE, situation, {"w-0": 7}, "a note"), 5))
        else:
            rows = worker_rows(situation.records, datetime.now(UTC), situation.orders)
            console.print(worker_table(rows, _TITLES, console.width)[0])


def _browser(situation: Situation, history: list[HistoryRecord]) -> None:
    reading = picture.Reading(bucket="parti", situation=situation, moves=dict(enumerate(history)), lags={"w-0": 3})
    shown = picture.draw(reading, picture.Colours(), datetime.now(UTC))
    picture.difference({}, shown)
    text = msgspec.json.encode(shown)
    json.loads(text)
    page = _document().fill(text)
    if page.count(b"<script") != _document().fill(b"{}").count(b"<script"):
        raise WrongError("a record has written a script into the page")


@cache
def _document() -> Document:
    static = files("parti.console").joinpath("static")
    return Document(
        {file.name: file.read_text() for file in static.iterdir() if file.name.endswith((".html", ".js", ".css"))}
    )


def seeds() -> list[bytes]:
    """A whole fleet, each record alone, and fleets with odd keys."""
    return [whole_fleet(), *single_records(), *odd_records()]


TARGET = Target("views", one, seeds)
