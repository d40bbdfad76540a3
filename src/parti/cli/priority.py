"""`parti priority`: priority groups of consumers, who is pinned, and switches as they happen."""

from __future__ import annotations

import json as json_
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parti.app.signals import run_interruptibly
from parti.cli.control import count, listed, open_console, print_json, span, timestamp
from parti.cli.options import JsonOption, NatsOption
from parti.config import Settings, load_settings
from parti.core.priority import DEFAULT_TIMEOUT_S, Policy, check_name
from parti.errors import ConfigError, NotFound, PermissionDenied
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.jetstream.priority import GroupReport, find_groups, unpin
from parti.jetstream.switches import Switch, Switches
from parti.model.fleet import FleetRecord, decode
from parti.model.safe_text import strip_userinfo
from parti.telemetry.logs import configure_logging

app = typer.Typer(help="Look at priority groups of consumers, unpin a client, watch switches.", no_args_is_help=True)

_CONNECT_S = 3.0
_NO_STREAM = 10059
_FORBIDDEN = frozenset(".*> \t\r\n/\\")

OptionalStream = Annotated[str | None, typer.Argument(metavar="STREAM", help="Only this stream.")]
OptionalConsumer = Annotated[str | None, typer.Argument(metavar="CONSUMER", help="Only this consumer.")]


@app.command()
def status(
    stream: OptionalStream = None,
    consumer: OptionalConsumer = None,
    json: JsonOption = False,
    nats: NatsOption = None,
) -> None:
    """Show the consumers that have a priority group: its policy, who is pinned and since when, what is waiting.

    Exit codes: 0 shown, also when there is none; 2 no server, no such stream or consumer.
    """

    async def look() -> list[GroupReport]:
        async with _opened(settings) as place:
            return await place.groups(stream, consumer)

    settings = _settings(nats, stream, consumer)
    groups = run_interruptibly(look())
    if json:
        print_json({"groups": [_group_json(group) for group in groups]})
        return
    console = open_console()
    servers = ",".join(strip_userinfo(url) for url in settings.nats)
    where = f"consumer {consumer} of stream {stream}" if consumer else f"stream {stream}" if stream else servers
    console.print(Text(f"{where}: {count(len(groups), 'priority group')}", style="bold"))
    if groups:
        console.print(_table(groups))


@app.command("unpin")
def unpin_(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream of the consumer.")],
    consumer: Annotated[str, typer.Argument(metavar="CONSUMER", help="A consumer with the policy pinned_client.")],
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its group; without it the one that it has.")
    ] = None,
    json: JsonOption = False,
    nats: NatsOption = None,
) -> None:
    """Take the pin from the client that has it; the server pins the one whose pull it serves next.

    That may be the same client again, if no other waits. Messages that it has in hand stay with it. Exit codes: 0
    unpinned, also when nobody was pinned; 2 no server, no such consumer or group, or one of another policy.
    """
    if group is not None:
        check_name(group)

    async def work() -> GroupReport:
        async with _opened(settings) as place:
            found = await place.groups(stream, consumer)
            report = _pinned_group(stream, consumer, group, found)
            await unpin(place.api, stream, consumer, report.group.name)
            return report

    settings = _settings(nats, stream, consumer)
    report = run_interruptibly(work())
    was = report.state.pinned_id
    if json:
        answer = {"stream": stream, "consumer": consumer, "group": report.group.name, "unpinned": was or None}
        print_json(answer)
        return
    said = f"{was} is pinned no more" if was else "nobody was pinned"
    open_console().print(f"Group {report.group.name} of consumer {consumer}: {said}.")


@app.command()
def watch(
    stream: OptionalStream = None,
    consumer: OptionalConsumer = None,
    json: JsonOption = False,
    nats: NatsOption = None,
) -> None:
    """Print a line whenever a client is pinned or loses its pin, until Ctrl-C; first, who is pinned now.

    Without STREAM all streams are watched; a user who may not do that watches the stream of the fleet.
    With --json a line of JSON for each. Switches that happen while the connection is away are missed. Exit codes: 0
    after Ctrl-C, 2 no server, no such stream or consumer.
    """
    settings = _settings(nats, stream, consumer)
    console = open_console()

    async def show() -> None:
        async with _opened(settings) as place, place.switches(stream, consumer) as (watched, switches):
            for group in await place.groups(watched, consumer):
                if group.group.policy is Policy.PINNED:
                    _say_now(group, console, json=json)
            async for switch in switches:
                _say(switch, console, json=json)

    try:
        run_interruptibly(show())
    except KeyboardInterrupt:
        return


# ── the question ──────────────────────────────────────────────────────────────────────────────────────────────────


def _settings(nats: str | None, stream: str | None, consumer: str | None) -> Settings:
    for kind, name in (("stream", stream), ("consumer", consumer)):
        if name is not None and (not name or _FORBIDDEN & set(name)):
            raise ConfigError(f"{kind} name {name!r} is not valid: use letters, digits, '-' and '_'")
    settings = load_settings({"nats": nats})
    if "connect_timeout_s" not in settings.model_fields_set:
        settings = settings.model_copy(update={"connect_timeout_s": _CONNECT_S})
    return settings


@dataclass(frozen=True, slots=True)
class _Place:
    """A server, as this command sees it."""

    connection: Connection
    bucket: str

    @property
    def api(self) -> JetStreamApi:
        return JetStreamApi(self.connection)

    async def groups(self, stream: str | None, consumer: str | None) -> list[GroupReport]:
        """The groups; ConfigError names what there is when stream or consumer are not."""
        try:
            return await find_groups(self.api, stream or "", consumer or "")
        except NotFound as error:
            if error.code == _NO_STREAM:
                kind, name, known = "stream", stream, await self.api.stream_names()
            else:
                kind, name, known = "consumer", consumer, await self.api.consumer_names(stream or "")
            there = f"{kind}s here: {listed(known, 10)}" if known else f"there is no {kind} at all"
            raise ConfigError(f"{kind} {name!r} does not exist; {there}") from None

    @asynccontextmanager
    async def switches(
        self, stream: str | None, consumer: str | None
    ) -> AsyncGenerator[tuple[str | None, Switches], None]:
        """Listen to switches; where all streams (None) are more than this user may, to the fleet's stream."""
        switches = Switches(self.connection, stream=stream or "*", consumer=consumer or "*")
        try:
            await switches.start()
        except PermissionDenied:
            stream = None if stream else await self._stream_of_fleet()
            if not stream:
                raise
            switches = Switches(self.connection, stream=stream)
            await switches.start()
        try:
            yield stream, switches
        finally:
            await switches.stop()

    async def _stream_of_fleet(self) -> str | None:
        entry = await Bucket(self.api, self.bucket).get("fleet")
        return decode(entry.value, FleetRecord).stream if entry and entry.value else None


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[_Place]:
    configure_logging("error", settings.log_format)
    connection = await Connection.open(settings, name=f"{settings.prefix}-cli")
    try:
        yield _Place(connection, settings.bucket)
    finally:
        await connection.close()


def _pinned_group(stream: str, consumer: str, group: str | None, found: list[GroupReport]) -> GroupReport:
    if not found:
        raise ConfigError(
            f"consumer {consumer!r} of stream {stream!r} has no priority group, so nobody can be pinned; see "
            f"'parti priority status'"
        )
    (report,) = found
    if group not in {None, report.group.name}:
        raise ConfigError(f"consumer {consumer!r} has no group {group!r}; its group is {report.group.name!r}")
    if report.group.policy is not Policy.PINNED:
        raise ConfigError(
            f"group {report.group.name!r} of consumer {consumer!r} has the policy {report.group.policy.value}, which "
            f"pins nobody; only pinned_client does"
        )
    return report


# ── the answer ────────────────────────────────────────────────────────────────────────────────────────────────────


def _table(groups: list[GroupReport]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("stream", "consumer", "group", "policy", "pinned"):
        table.add_column(title, no_wrap=True)
    for title in ("since", "timeout", "pending", "unacked", "pulls"):
        table.add_column(title, justify="right", no_wrap=True)
    now = datetime.now(UTC)
    for each in groups:
        pins, since = each.group.policy is Policy.PINNED, each.state.pinned_since
        table.add_row(
            each.stream,
            each.consumer,
            each.group.name,
            each.group.policy.value,
            each.state.pinned_id or ("nobody" if pins else ""),
            span((now - since).total_seconds()) if since else "",
            span(each.group.timeout_s or DEFAULT_TIMEOUT_S) if pins else "",
            f"{each.pending:,}",
            f"{each.ack_pending:,}",
            f"{each.waiting:,}",
        )
    return table


def _group_json(each: GroupReport) -> dict[str, Any]:
    pins, since = each.group.policy is Policy.PINNED, each.state.pinned_since
    return {
        "stream": each.stream,
        "consumer": each.consumer,
        "group": each.group.name,
        "policy": each.group.policy.value,
        "timeout_s": (each.group.timeout_s or DEFAULT_TIMEOUT_S) if pins else None,
        "pinned": each.state.pinned_id or None,
        "pinned_since": timestamp(since) if since else None,
        "pending": each.pending,
        "ack_pending": each.ack_pending,
        "waiting_pulls": each.waiting,
    }


def _say_now(group: GroupReport, console: Console, *, json: bool) -> None:
    if json:
        typer.echo(json_.dumps({"event": "now", **_group_json(group)}))
        return
    since = group.state.pinned_since
    said = f"{group.state.pinned_id} is pinned, since {_clock(since)}" if since else "nobody is pinned"
    console.print(f"{_clock(datetime.now(UTC))}  {group.stream} {group.consumer} {group.group.name}: {said}")


def _say(switch: Switch, console: Console, *, json: bool) -> None:
    if json:
        event = {
            "event": "pinned" if switch.pinned else "unpinned",
            "at": timestamp(switch.at),
            "stream": switch.stream,
            "consumer": switch.consumer,
            "group": switch.group,
            "pinned": switch.pin_id or None,
            "reason": switch.reason or None,
        }
        typer.echo(json_.dumps(event))
        return
    said = f"{switch.pin_id} is pinned" if switch.pinned else f"unpinned ({switch.reason})"
    console.print(f"{_clock(switch.at)}  {switch.stream} {switch.consumer} {switch.group}: {said}")


def _clock(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]
