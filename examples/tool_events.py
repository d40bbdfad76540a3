"""Events of semiconductor tools, as a factory sends them: for the demo, tests and benchmarks.

A lot of 25 wafers runs through the chambers of one tool, and each wafer that leaves one gives an event on
`dc.{tool}.{chamber}.completion`. Few tools do most of the work, lots come in bursts, some events come late, some
twice, some broken. The same arguments always give the same events.

    python -m examples.tool_events publish --server nats://127.0.0.1:4222 --count 100000
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import accumulate, islice
from math import inf
from time import gmtime, perf_counter, strftime
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.main import get_command

from parti.config import load_settings
from parti.errors import ConfigError, ConnectionFailed, PartiError, RequestTimeout
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.wire import Wire
from parti.model.subjects import within
from parti.telemetry.logs import configure_logging

STREAM = "DC"
SUBJECT = "dc.{tool}.{chamber}.completion"
SCHEMA = (
    "lot string not null, wafer int not null, recipe string, step int not null, started_at timestamp, "
    "finished_at timestamp not null, status string, "
    "measurements struct<temperature_c: double, pressure_mtorr: double, thickness_nm: double, particles: int>"
)
"""Type of the payload, as `schema` in `[pipeline]` takes it."""
KEY = ("lot", "wafer", "step")
"""What makes two events the same one."""
EVENT_TIME = "finished_at"
WAFERS = 25
START = datetime(2026, 1, 5, 6, tzinfo=UTC)
RATE = 200.0
"""Events a second of the factory's own time."""
MOST = 100_000
"""Tools, and chambers of a tool, at most."""

_KINDS = ("etch", "cvd", "pvd", "litho", "cmp")
_OPEN_LOTS = 12
"""Lots that are in work at one time: their events come mixed."""
_REMEMBERED = 256
"""A repeated event is one of so many last ones."""
_PAUSE = 0.8
"""Share of the time that lies between lots, not between the wafers of one."""
_LATE_MS = (2 * 60_000, 30 * 60_000)
_WINDOW = 4096
"""Messages on their way to the server and not yet acknowledged."""
_CHUNK = 256
_TICK_S = 0.01
_PATIENCE_S = 10.0
_CONNECT_S = 3.0
_SERVER = "nats://127.0.0.1:4222"
_ALL = "dc.*.*.completion"
_MILLISECOND = timedelta(milliseconds=1)
_RESULT = (
    b'","status":"%b","measurements":{"temperature_c":%.2f,"pressure_mtorr":%.2f,"thickness_nm":%.2f,"particles":%d}}'
)
_RESULTS = 2048
"""Different results of wafers: taken from a table, because formatting them is half of the time."""


class Event(NamedTuple):
    """One message to publish; `at` is when it is sent, by the factory's clock."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]
    at: datetime


class _Lot:
    """A lot in work: what all its wafers have in common is formatted once."""

    __slots__ = ("duration_ms", "head", "middle", "subjects", "wafer")

    def __init__(self, number: int, seed: int, tool: int, subjects: Sequence[str], chance: random.Random) -> None:
        recipe = b"%b-%c%02d" % (_kind(tool).upper().encode(), 65 + chance.randrange(6), chance.randrange(20))
        self.wafer = 0
        self.subjects = subjects
        self.duration_ms = chance.randrange(30_000, 120_000)
        self.head = b'{"lot":"L%d-%06d","wafer":' % (seed, number)
        self.middle = b',"recipe":"%b","step":%d,"started_at":"' % (recipe, chance.randrange(1, 600))


def generate(
    count: int,
    *,
    tools: int = 50,
    chambers: int = 4,
    seed: int = 1,
    skew: float = 1.1,
    late_ratio: float = 0.01,
    malformed_ratio: float = 0.002,
    duplicate_ratio: float = 0.005,
    start: datetime = START,
    rate: float = RATE,
    msg_ids: bool = False,
) -> Iterator[Event]:
    """Give `count` events in the order in which they are sent; the same arguments give the same events.

    Tool number n gets work in proportion to 1 / n ** `skew`. A late event is 2 to 30 minutes older than its sending;
    a malformed one is cut off, no JSON, without a field or with a wrong type; a duplicate has the key and the bytes
    of an event shortly before it. No event is two of these. With `msg_ids` each has a `Nats-Msg-Id` of its own, a
    duplicate too, so that the stream stores both. Raises `ConfigError` for arguments that make no sense.
    """
    shares = {"late": late_ratio, "malformed": malformed_ratio, "duplicate": duplicate_ratio}
    _check(count, tools, chambers, skew, shares, rate)
    if start.tzinfo is None:
        raise ConfigError(f"start is {start.isoformat()}: expected a time with its time zone; add tzinfo=UTC")
    names = [[SUBJECT.format(tool=name_tool(n), chamber=f"c{c + 1}") for c in range(chambers)] for n in range(tools)]
    weights = list(accumulate((n + 1) ** -skew for n in range(tools)))
    return _generate(count, names, weights, seed, shares, start, 1000 / rate, msg_ids)


def _check(count: int, tools: int, chambers: int, skew: float, shares: Mapping[str, float], rate: float) -> None:
    if count < 0:
        raise ConfigError(f"count is {count}: expected 0 or more events")
    for name, number in (("tools", tools), ("chambers", chambers)):
        if not 1 <= number <= MOST:
            raise ConfigError(f"{name} is {number}: expected 1 to {MOST}")
    if not 0 <= skew <= 10:
        raise ConfigError(f"skew is {skew:g}: expected 0 (all tools alike) to 10")
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ConfigError(f"{name}_ratio is {share:g}: expected a share from 0 to 1")
    if sum(shares.values()) > 1:
        raise ConfigError(f"the ratios {', '.join(shares)} are more than 1 together: no event is two of these")
    if not 0 < rate < inf:
        raise ConfigError(f"rate is {rate:g}: expected events a second, more than 0")


def name_tool(rank: int) -> str:
    """Name of a tool by its rank, 0 for the one with the most work: `etch01`, `cvd01`, ..."""
    return f"{_kind(rank)}{rank // len(_KINDS) + 1:02}"


def _kind(rank: int) -> str:
    return _KINDS[rank % len(_KINDS)]


def _generate(
    count: int,
    subjects: Sequence[Sequence[str]],
    weights: Sequence[float],
    seed: int,
    shares: Mapping[str, float],
    start: datetime,
    gap_ms: float,
    msg_ids: bool,
) -> Iterator[Event]:
    chance = random.Random(seed)
    draw, results = chance.random, _results(chance)
    broken_below = shares["malformed"]
    repeated_below = broken_below + shares["duplicate"]
    late_below = repeated_below + shares["late"]
    start_ms, now_ms = round(start.timestamp() * 1000), 0.0
    wafer_ms, pause_ms = 2 * gap_ms * (1 - _PAUSE), 2 * gap_ms * _PAUSE * WAFERS
    open_lots: list[_Lot] = []
    sent: deque[tuple[str, bytes]] = deque(maxlen=_REMEMBERED)
    trace, lots = f"00-{seed & 0xFFFFFFFF:08x}", 0
    for number in range(count):
        now_ms += wafer_ms * draw()
        fate = draw()
        if broken_below <= fate < repeated_below and sent:
            subject, payload = sent[chance.randrange(len(sent))]
        else:
            place = min(int(draw() * _OPEN_LOTS), len(open_lots))
            if place == len(open_lots) or open_lots[place].wafer == WAFERS:
                tool = min(bisect(weights, draw() * weights[-1]), len(weights) - 1)
                lots += 1
                open_lots[place : place + 1] = [_Lot(lots, seed, tool, subjects[tool], chance)]
                now_ms += pause_ms * draw()
            lot = open_lots[place]
            subject = lot.subjects[lot.wafer % len(lot.subjects)]
            lot.wafer += 1
            age_ms = chance.randrange(*_LATE_MS) if repeated_below <= fate < late_below else 50 + 1950 * draw()
            finished_ms = int(start_ms + now_ms - age_ms)
            payload = b'%b%d%b%b","finished_at":"%b%b' % (
                lot.head,
                lot.wafer,
                lot.middle,
                _iso(finished_ms - lot.duration_ms),
                _iso(finished_ms),
                results[int(draw() * _RESULTS)],
            )
            if fate < broken_below:
                payload = _break(payload, chance)
            else:
                sent.append((subject, payload))
        headers = {"traceparent": f"{trace}{number + 1:024x}-{number + 1:016x}-01"}
        if msg_ids:
            headers["Nats-Msg-Id"] = f"{seed}-{number}"
        yield Event(subject, payload, headers, start + int(now_ms) * _MILLISECOND)


def _results(chance: random.Random) -> list[bytes]:
    draw, found = chance.random, []
    for _ in range(_RESULTS):
        luck = draw()
        status = b"completed" if luck < 0.97 else b"rework" if luck < 0.99 else b"aborted"
        found.append(_RESULT % (status, 380 + 40 * draw(), 18 + 4 * draw(), 95 + 10 * draw(), int(luck * 7)))
    return found


def _iso(at_ms: int) -> bytes:
    second, ms = divmod(at_ms, 1000)
    return b"%b.%03dZ" % (_iso_second(second), ms)


@lru_cache(maxsize=1 << 14)
def _iso_second(second: int) -> bytes:
    return strftime("%Y-%m-%dT%H:%M:%S", gmtime(second)).encode()


def _break(payload: bytes, chance: random.Random) -> bytes:
    """The payload with one of the faults that real senders make."""
    fault = chance.randrange(4)
    if fault == 0:
        return payload[: chance.randrange(1, len(payload))]
    if fault == 1:
        return chance.randbytes(len(payload))
    event = json.loads(payload)
    if fault == 2:
        del event[chance.choice((*KEY, EVENT_TIME))]
    else:
        event |= chance.choice(({"wafer": "seventeen"}, {"step": {"number": 7}}, {EVENT_TIME: "yesterday"}))
    return json.dumps(event, separators=(",", ":")).encode()


class Publisher:
    """Publishes events to a stream, many at a time, and counts what the server has acknowledged."""

    def __init__(self, connection: Connection) -> None:
        self.acknowledged = 0
        self.repeated = 0
        """Acknowledged, but not stored: the stream had a message of that id already."""
        self._wire = Wire(connection.client)
        self._inbox = self._wire.new_inbox()
        self._wire.subscribe(self._inbox, self._on_ack)
        self._reply = self._inbox.encode()
        self._sent = 0
        self._refused = ""
        self._heard = asyncio.Event()

    def _on_ack(self, _subject: bytes, _reply: bytes, header: bytes | None, payload: bytes) -> None:
        if header or b'"error"' in payload:
            self._refused = " ".join((payload or header or b"").decode(errors="replace").split())
        else:
            self.acknowledged += 1
            self.repeated += b'"duplicate":' in payload
        self._heard.set()

    async def publish(
        self, events: Iterable[Event], *, rate: float | None = None, on_progress: Callable[[int], None] | None = None
    ) -> None:
        """Send the events, at `rate` a second or as fast as the server takes them; returns when it has them all.

        Raises `PartiError` when the server refuses one, `ConnectionFailed` or `RequestTimeout` when it is gone.
        """
        chunk = max(1, min(_CHUNK, int(rate * _TICK_S))) if rate else _CHUNK
        clock = asyncio.get_running_loop().time
        began_s, waiting = clock(), iter(events)
        while batch := list(islice(waiting, chunk)):
            if rate:
                await asyncio.sleep(max(0.0, began_s + self._sent / rate - clock()))
            await self._wait_until_fewer_than(_WINDOW)
            if not self._wire.write(b"".join([protocol(event, self._reply) for event in batch])):
                raise ConnectionFailed("the connection to the server broke while events were being published")
            self._sent += len(batch)
            if on_progress:
                on_progress(self.acknowledged)
        await self._wait_until_fewer_than(1)
        if on_progress:
            on_progress(self.acknowledged)

    async def _wait_until_fewer_than(self, limit: int) -> None:
        while self._sent - self.acknowledged >= limit:
            if self._refused:
                raise PartiError(f"the server refused an event: {self._refused}")
            self._heard.clear()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._heard.wait()
            except TimeoutError:
                raise RequestTimeout(f"the server has acknowledged no event for {_PATIENCE_S:g} s") from None


def protocol(event: Event, reply: bytes) -> bytes:
    """Bytes that publish the event, as they stand in the NATS protocol."""
    header = "".join([f"{name}: {value}\r\n" for name, value in event.headers.items()]).encode()
    size = len(header) + 12
    return b"HPUB %b %b %d %d\r\nNATS/1.0\r\n%b\r\n%b\r\n" % (
        event.subject.encode(),
        reply,
        size,
        size + len(event.payload),
        header,
        event.payload,
    )


async def publish_events(
    servers: str,
    events: Iterable[Event],
    *,
    stream: str = STREAM,
    rate: float | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> int:
    """Create the stream if it is missing, publish the events to it, return how many it has stored.

    An existing stream is left as it is; raises `ConfigError` when it does not take the events' subjects. Credentials
    and TLS are those of parti's settings.
    """
    if not stream or any(each in " .*>/\\" for each in stream):
        raise ConfigError(f"stream is {stream!r}: expected a name without spaces, dots, * and >")
    settings = load_settings({"nats": servers, "connect_timeout_s": _CONNECT_S})
    connection = await Connection.open(settings, name="parti-tool-events")
    try:
        info = await JetStreamApi(connection).ensure_stream(
            {"name": stream, "subjects": [_ALL], "storage": "file", "allow_direct": True}
        )
        if not within(_ALL, info.subjects):
            raise ConfigError(
                f"stream {stream!r} takes {', '.join(info.subjects)}, the events need {_ALL}; name another stream"
            )
        publisher = Publisher(connection)
        await publisher.publish(events, rate=rate, on_progress=on_progress)
        return publisher.acknowledged - publisher.repeated
    finally:
        await connection.close()


app = typer.Typer(help="Events of semiconductor tools.", no_args_is_help=True)


@app.callback()
def _tool_events() -> None:
    # Only there so that `publish` stays a command of its own.
    pass


@app.command()
def publish(
    server: Annotated[str, typer.Option(help="Server URL, or several with commas between.")] = _SERVER,
    stream: Annotated[str, typer.Option(help="Created if it is missing.")] = STREAM,
    count: Annotated[int, typer.Option(min=1, help="How many events.")] = 100_000,
    rate: Annotated[float, typer.Option(min=0, help="Events a second; 0: as fast as the server takes them.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds give other lots.")] = 1,
    tools: Annotated[int, typer.Option(help="How many tools.")] = 50,
    chambers: Annotated[int, typer.Option(help="How many chambers each tool has.")] = 4,
    skew: Annotated[float, typer.Option(help="0: all tools work alike; 1 and more: few do most of it.")] = 1.1,
) -> None:
    """Publish events; the last of them happened just now. Exit codes: 0 all are stored, 2 they are not."""
    pace = rate or RATE
    start = datetime.now(UTC) - (timedelta() if rate else timedelta(seconds=count / pace))
    events = generate(
        count, tools=tools, chambers=chambers, seed=seed, skew=skew, start=start, rate=pace, msg_ids=True
    )
    configure_logging("error")
    console = Console(highlight=False, stderr=True)
    columns = TextColumn("publishing"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn()
    began_s = perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=count)
        stored = asyncio.run(
            publish_events(
                server,
                events,
                stream=stream,
                rate=rate or None,
                on_progress=lambda done: progress.update(task, completed=done),
            )
        )
    elapsed_s = perf_counter() - began_s
    known = f"; {count - stored:,} were there already: take another --seed" if stored < count else ""
    typer.echo(f"{stored:,} events stored in {stream}, {count / elapsed_s:,.0f} a second{known}")


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; every error becomes one line on stderr."""
    try:
        code = get_command(app).main(args=list(arguments), prog_name="tool_events", standalone_mode=False)
    except PartiError as error:
        return _complain(str(error))
    except typer.Exit as leaving:
        return leaving.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", code=130)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _complain(f"{' '.join(error.format_message().split()).rstrip('.')}; see --help")
    return code if isinstance(code, int) else 0


def _complain(text: str, *, code: int = 2) -> int:
    print(f"tool_events: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
