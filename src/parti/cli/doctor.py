"""`parti doctor`: looks at all that a fleet rests on, and says what is wrong, what that means and what to do."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parti.app.signals import run_interruptibly
from parti.app.worker import MIN_SERVER_VERSION
from parti.cli.control import count, listed, open_console, open_control, open_server, print_json, timestamp
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.perms import names_of
from parti.config import Settings, load_settings
from parti.config.secret_files import exposed_keys
from parti.coordination.control_plane import read_keys
from parti.coordination.orders import Situation
from parti.coordination.records import KEYS
from parti.coordination.repairs import remove_unreadable, repair_of, unreadable_among
from parti.core.checkup import (
    Finding,
    Level,
    error,
    judge_bucket,
    judge_cliff,
    judge_clock,
    judge_fleets,
    judge_leftovers,
    judge_limits,
    judge_replicas,
    judge_server,
    judge_stream,
    judge_sync,
    note,
    ok,
    warning,
)
from parti.core.consumer_config import PREFIX, fleet_of, is_foreign, surely_of, workers_of
from parti.core.role_calls import ROLES, Call, Role, calls_of
from parti.errors import ConfigError, DecodeError, JetStreamUnavailable, NotFound, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.checkup import denied_among, read_clock, read_identity, read_sync
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.fleet import FleetRecord, decode, is_key
from parti.model.history import history_stream
from parti.model.safe_text import abbreviate, strip_userinfo
from parti.spark.java import find_java
from parti.telemetry.logs import configure_logging
from parti.version import __version__

_MARKS = {
    Level.OK: ("✓", "green"),
    Level.NOTE: ("·", "cyan"),
    Level.WARNING: ("!", "yellow"),
    Level.ERROR: ("✗", "bold red"),
}


_OTHER_KEYS = ("progress.>", "state.>", "migration", "migration.>", "migrator", "mirror")
"""Records that nothing else in here looks at."""
_KEY_BYTES = 60
"""Most bytes that are shown of a key which others have made."""


def doctor(
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE", help=f"Insist on the permissions of a role: {', '.join(ROLES)}; may be repeated."
        ),
    ] = None,
    stream: Annotated[
        str | None, typer.Option(metavar="NAME", help="The stream to look at, if not that of the fleet.")
    ] = None,
    repair: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Delete one record of the bucket, if it cannot be read; nothing else."),
    ] = None,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Look at server, account, stream, bucket, permissions, clock, Java and leftovers, and say what to do.

    Nothing is changed, but by --repair: permissions are tried with messages that have no effect. Exit codes: 0 no
    errors, 1 there are errors, 2 no server, no such stream, no such role or nothing to repair.
    """
    for each in role or ():
        if each not in ROLES:
            raise ConfigError(f"--role {each!r}: expected one of {', '.join(ROLES)}")
    settings = load_settings({"nats": nats, "bucket": bucket})
    if repair is not None:
        run_interruptibly(_repair(settings, repair))
        return

    async def look() -> list[Finding]:
        async with open_server(settings) as (connection, api):
            configure_logging("critical", settings.log_format)  # denials are findings here, not errors
            return [finding async for finding in _Visit(settings, connection, api, stream, role or ()).findings()]

    findings = run_interruptibly(look())
    if json:
        print_json(_json(settings, findings))
    else:
        _print(open_console(), settings, findings)
    if any(finding.level is Level.ERROR for finding in findings):
        raise typer.Exit(1)


async def _repair(settings: Settings, key: str) -> None:
    async with open_control(settings) as control:
        reason = await remove_unreadable(control.plane.bucket, key)
    typer.echo(f"Deleted {key}, which was unreadable ({reason}).")


@dataclass(slots=True)
class _Visit:
    """One look at everything, in the order in which things rest on each other."""

    settings: Settings
    connection: Connection
    api: JetStreamApi
    wanted_stream: str | None
    wanted_roles: Sequence[str]
    situation: Situation | None = None
    """What the bucket says; None: there is none, or it cannot be read."""
    account: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """Of the stream; empty: it is not known."""

    async def findings(self) -> AsyncIterator[Finding]:
        connection, settings = self.connection, self.settings
        for finding in judge_server(
            connection.server_info, connection.server_version, MIN_SERVER_VERSION, settings.nats
        ):
            yield finding
        for exposure in exposed_keys(settings):
            yield warning("secrets", exposure.text, "whoever may read it can be this user", exposure.fix)
        parts = (
            self._account(),
            self._bucket(),
            self._stream(),
            self._companions(),
            self._sync(),
            self._permissions(),
            self._clock(),
            self._fleets(),
            self._leftovers(),
        )
        for part in parts:
            try:
                async for finding in part:
                    yield finding
            except JetStreamUnavailable as problem:
                yield error("account", "JetStream is off", str(problem), "enable JetStream for this account")
                return
            except ConfigError:
                raise
            except PartiError as problem:
                yield warning(
                    "doctor",
                    f"something could not be looked at: {problem}",
                    "nothing is known of it",
                    "grant this user the permissions of an observer, or ask again as another one",
                )
        yield await asyncio.to_thread(_java_and_spark)

    @property
    def _clustered(self) -> bool:
        return bool(self.connection.server_info.get("cluster"))

    @property
    def _running(self) -> bool:
        return bool(self.situation and self.situation.records.members)

    @property
    def _stream_name(self) -> str | None:
        if self.wanted_stream:
            return self.wanted_stream
        return self.situation.fleet.stream if self.situation and self.situation.fleet else None

    async def _info(self, stream: str) -> dict[str, Any] | None:
        try:
            return await self.api.call(f"STREAM.INFO.{stream}")
        except NotFound:
            return None

    async def _account(self) -> AsyncIterator[Finding]:
        self.account = await self.api.account_info()
        for finding in judge_limits(self.account):
            yield finding

    async def _bucket(self) -> AsyncIterator[Finding]:
        name = self.settings.bucket
        info = await self._info(f"KV_{name}")
        if info is None:
            others = [s.removeprefix("KV_") for s in await self.api.stream_names() if s.startswith("KV_")]
            here = f"buckets here: {listed(others, 10)}" if others else "there are no buckets at all"
            yield note(
                f"bucket {name}", "it does not exist", f"no worker has ever run here; {here}", "start a worker"
            )
            return
        for finding in judge_bucket(name, info, replicas=self.settings.replicas, clustered=self._clustered):
            yield finding
        entries = await read_keys(self.connection, self.api, name, (*KEYS, "orders", "fleet"))
        self.situation = Situation.of(entries)
        members = self.situation.records.members
        if members:
            yield ok(f"bucket {name}", f"{count(len(members), 'worker')} here; 'parti status' tells how it goes")
        else:
            yield note(f"bucket {name}", "no worker runs at the moment")
        entries |= await read_keys(self.connection, self.api, name, _OTHER_KEYS)
        for key, reason in unreadable_among(entries).items():
            meaning = "its readers go on without it"
            yield error(f"record {key}", f"it cannot be read: {reason}", meaning, repair_of(key))
        if odd := sorted(abbreviate(key, _KEY_BYTES) for key in entries if not is_key(key)):
            text = f"{count(len(odd), 'key')} that parti never writes: {listed(odd)}"
            yield note("keys", text, "nothing reads them, and they are left alone", "find out who writes here")

    async def _stream(self) -> AsyncIterator[Finding]:
        name, settings = self._stream_name, self.settings
        if name is None:
            yield note("stream", "none was looked at", "no fleet says which one it reads", "name one with --stream")
            return
        info = await self._info(name)
        if info is None and self.wanted_stream:
            here = listed([s for s in await self.api.stream_names() if not s.startswith("KV_")], 10)
            raise ConfigError(f"there is no stream {name!r}; streams here: {here or 'none'}")
        if info is None:
            yield error(f"stream {name}", "it is gone", "the fleet of this bucket reads it", "make it again")
            return
        self.config = info["config"]
        for finding in judge_stream(name, info, replicas=settings.replicas, clustered=self._clustered):
            yield finding
        limit = (self.account.get("limits") or {}).get("max_memory", -1)
        yield judge_cliff(
            name,
            storage=info["config"].get("storage", "file"),
            retention=info["config"].get("retention", "limits"),
            subjects=info["state"].get("num_subjects", 0),
            hot_mirror=settings.hot_mirror,
            mirror_bytes=settings.hot_mirror_max_bytes,
            memory_left=-1 if limit < 0 else max(0, limit - self.account.get("memory", 0)),
        )

    async def _companions(self) -> AsyncIterator[Finding]:
        """The streams beside the bucket."""
        settings, there = self.settings, self.situation is not None
        letters = await self._info(settings.dead_letter_stream)
        area = f"stream {settings.dead_letter_stream}"
        if letters is None:
            if there:
                yield note(area, "there is no such dead-letter stream", "workers name another one, or have not begun")
        else:
            subject = f"{settings.dead_letter_subject}.>"
            if subject not in (letters["config"].get("subjects") or ()):
                yield error(
                    area,
                    f"it does not take {subject}",
                    "workers refuse to start: dead letters would be lost",
                    "choose another dead_letter_stream or dead_letter_subject",
                )
            for finding in judge_replicas(area, letters, replicas=settings.replicas, clustered=self._clustered):
                yield finding
            number = letters["state"].get("messages", 0)
            if number:
                yield note(area, f"{number:,} dead letters wait for somebody", "", "parti dlq ls")
            else:
                yield ok(area, "no dead letters")
        if settings.history and there:
            name = history_stream(settings.bucket)
            history = await self._info(name)
            if history is None:
                yield note(f"stream {name}", "no history is kept yet", "'parti explain' cannot tell why things moved")
            else:
                for finding in judge_replicas(
                    f"stream {name}", history, replicas=settings.replicas, clustered=self._clustered
                ):
                    yield finding

    async def _sync(self) -> AsyncIterator[Finding]:
        info = await self._info(f"KV_{self.settings.bucket}")
        replicas = (info or {}).get("config", {}).get("num_replicas", self.settings.replicas)
        found = await read_sync(self.settings)
        yield judge_sync(found[0] if found else None, bool(found and found[1]), replicas=replicas)

    async def _permissions(self) -> AsyncIterator[Finding]:
        settings = self.settings
        stream = self._stream_name
        if stream is None:
            yield note("permissions", "not tried", "which stream they are for is not known", "name it with --stream")
            return
        names = names_of(
            settings,
            stream,
            subjects=self.config.get("subjects") or (),
            retention=self.config.get("retention", "limits"),
            creates=self.situation is None,
        )
        calls = {role: calls_of(role, names) for role in ROLES}
        denied = await denied_among(self.connection, [call for each in calls.values() for call in each])
        able: list[str] = []
        for role, wanted in calls.items():
            missing = [call for call in wanted if call in denied]
            if missing:
                yield self._lacks(role, missing)
            elif wanted:
                able.append(role)
            elif role in self.wanted_roles:
                yield note(
                    "permissions",
                    f"the role {role} was not tried",
                    "this user may not see what the stream takes",
                    "publish something as this user",
                )
        if able:
            yield ok("permissions", f"this user can be: {', '.join(able)}")

    def _lacks(self, role: Role, missing: Sequence[Call]) -> Finding:
        first = next(iter(missing))
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        text = f"this user cannot be {role}: it may not {_verb(first)} {first.subject} ({first.purpose}){more}"
        fixes = [
            f"let it {verb} {', '.join(subjects)}"
            for verb in ("publish to", "subscribe to")
            if (subjects := [call.subject for call in missing if _verb(call) == verb])
        ]
        fix = f"{' and '.join(fixes)} ('parti perms --role {role}' prints all of it)"
        if role in self.wanted_roles:
            return error("permissions", text, "what it does there is refused", fix)
        return note("permissions", text, "that is as it should be, unless it is meant to", fix)

    async def _clock(self) -> AsyncIterator[Finding]:
        identity = await read_identity(self.connection)
        difference_s = identity.clock_difference_s if identity else await self._stream_clock()
        if difference_s is None:
            yield note(
                "clock", "the server did not tell its time", "neither its streams nor $SYS.REQ.USER.INFO answer"
            )
        else:
            yield judge_clock(difference_s)
        if identity and identity.account:
            yield ok("account", f"{identity.user or 'nobody in particular'} of account {identity.account}")

    async def _stream_clock(self) -> float | None:
        """The server's clock by what it says of a stream."""
        names = await self.api.stream_names()
        return await read_clock(self.api, names[0]) if names else None

    async def _fleets(self) -> AsyncIterator[Finding]:
        """Other fleets whose consumers have the same names as those of this one."""
        stream = self._stream_name
        if stream is None or await self._info(stream) is None:
            return
        prefix = self.situation.fleet.prefix if self.situation and self.situation.fleet else self.settings.prefix
        marks: dict[str, list[str]] = {}
        for info in await self.api.consumers(stream):
            name = str(info.config.get("name", ""))
            ours = (info.config.get("metadata") or {}).get(PREFIX) == prefix and workers_of(name, prefix)
            if ours and is_foreign(info.config, self.settings.bucket):
                marks.setdefault(fleet_of(info.config), []).append(name)
        for finding in judge_fleets(stream, prefix, self.settings.bucket, marks, await self._twins(stream, prefix)):
            yield finding

    async def _twins(self, stream: str, prefix: str) -> list[str]:
        """Buckets of other fleets that say the same stream and prefix of themselves, as far as they can be read."""
        found = []
        for name in (s.removeprefix("KV_") for s in await self.api.stream_names() if s.startswith("KV_")):
            if name == self.settings.bucket:
                continue
            try:
                entry = await Bucket(self.api, name).get("fleet")
                fleet = decode(entry.value, FleetRecord) if entry and entry.value else None
            except DecodeError:
                continue
            except PartiError:
                break  # this user may not read other buckets
            if fleet and (fleet.stream, fleet.prefix) == (stream, prefix):
                found.append(name)
        return found

    async def _leftovers(self) -> AsyncIterator[Finding]:
        stream, settings = self._stream_name, self.settings
        names = await self.api.stream_names()
        mirrors = [name for name in names if self._is_our_mirror(name)]
        companions = (f"{settings.bucket}-state", history_stream(settings.bucket))
        orphans = [name for name in names if name in companions and f"KV_{settings.bucket}" not in names]
        consumers = await self._consumers_left(stream) if stream in names and stream else []
        for finding in judge_leftovers(
            consumers=consumers, mirrors=mirrors, streams=orphans, running=self._running, stream=stream or "STREAM"
        ):
            yield finding

    async def _consumers_left(self, stream: str) -> list[str]:
        here: set[str] = set()
        if self.situation:
            here = self.situation.records.members.keys() | self.situation.records.named_in_claims
        if not self._running:
            here = set()
        found = await self.api.consumers(stream)
        own = [info.config for info in found if not is_foreign(info.config, self.settings.bucket)]
        ours = {str(c.get("name", "")): workers_of(str(c.get("name", "")), self.settings.prefix) for c in own}
        return [
            name
            for name, workers in ours.items()
            if not here.intersection(workers) and any(surely_of(worker, self._known) for worker in workers)
        ]

    @property
    def _known(self) -> set[str]:
        """Workers that the bucket says something of."""
        if self.situation is None:
            return set()
        records = self.situation.records
        return {*records.members, *records.health, *records.assignments, *records.named_in_claims}

    def _is_our_mirror(self, name: str) -> bool:
        """A fleet's mirror, or that of a worker on its own; those of longer prefixes are others'."""
        owner, hot, _ = name.removeprefix(f"{self.settings.prefix}-").rpartition("hot-")
        if not hot or not name.startswith(f"{self.settings.prefix}-"):
            return False
        return not owner or surely_of(owner.removesuffix("-"), self._known)


def _verb(call: Call) -> str:
    return "subscribe to" if call.kind == "listen" else "publish to"


def _java_and_spark() -> Finding:
    try:
        spark = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        spark = ""
    try:
        java = f"Java {find_java().version}"
    except ConfigError as problem:
        if not spark:
            return note("spark", "neither PySpark nor Java is here", "only pipelines, replays and audits need them")
        return warning("spark", f"PySpark {spark}, but: {problem}", "pipelines, replays and audits do not run", "")
    if not spark:
        return note(
            "spark", f"{java}, but PySpark is not installed", "pipelines need it", "pip install 'parti[spark]'"
        )
    return ok("spark", f"PySpark {spark} on {java}")


# ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _print(console: Console, settings: Settings, findings: Sequence[Finding]) -> None:
    servers = ",".join(strip_userinfo(url) for url in settings.nats)
    console.print(f"parti {__version__}, bucket {settings.bucket} on {servers}", style="bold")
    console.print()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.level]
        table.add_row(Text(mark, style=style), Text(finding.area), Text(finding.text, style=style))
        for title, text in (("means", finding.meaning), ("fix", finding.fix)):
            if text:
                table.add_row("", "", Text(f"{title}: {text}", style="dim" if title == "means" else ""))
    console.print(table)
    console.print()
    console.print(_summary(findings), style=_MARKS[_worst(findings)][1])


def _worst(findings: Sequence[Finding]) -> Level:
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    said = [_counted(counts[level], level) for level in (Level.ERROR, Level.WARNING, Level.NOTE) if counts[level]]
    return f"{', '.join(said)}." if said else "All is well."


def _counted(number: int, level: Level) -> str:
    return f"{number} {level}{'s' * (number != 1)}"


def _json(settings: Settings, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "version": __version__,
        "bucket": settings.bucket,
        "at": timestamp(datetime.now(UTC)),
        "ok": _worst(findings) is not Level.ERROR,
        "summary": _summary(findings),
        "findings": list(_findings_json(findings)),
    }


def _findings_json(findings: Sequence[Finding]) -> Iterator[dict[str, str]]:
    for finding in findings:
        yield {
            "level": finding.level.value,
            "area": finding.area,
            "text": finding.text,
            "meaning": finding.meaning,
            "fix": finding.fix,
        }
