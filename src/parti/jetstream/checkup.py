"""What a client can find out about its server, its account and its own permissions, without changing anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from nats import errors as nats_errors

from parti.core.role_calls import Call
from parti.errors import PartiError, PermissionDenied
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from parti.config import Settings

_ANSWER_S = 2.0
_PROBE_S = 0.5
_NO_JSON = b"{"
_NEVER = str(2**53 - 1)
"""A sequence that no stream has reached."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are to the server, and what its clock says."""

    user: str
    account: str
    clock_difference_s: float
    """How far the server's clock is ahead of ours."""


async def read_identity(connection: Connection) -> Identity | None:
    """Ask the server who we are; None when it does not tell us."""
    before = datetime.now(UTC)
    try:
        reply = await connection.request("$SYS.REQ.USER.INFO", timeout_s=_ANSWER_S)
        answer = json.loads(reply.data)
        there = _moment(answer["server"]["time"])
    except (PartiError, ValueError, KeyError, TypeError):
        return None
    here = before + (datetime.now(UTC) - before) / 2
    data = answer.get("data") or {}
    return Identity(str(data.get("user", "")), str(data.get("account", "")), (there - here).total_seconds())


async def read_clock(api: JetStreamApi, stream: str) -> float | None:
    """How far the server's clock is ahead of ours, by what it says of a stream; None when it does not say."""
    before = datetime.now(UTC)
    answer = await api.call(f"STREAM.INFO.{stream}")
    here = before + (datetime.now(UTC) - before) / 2
    return (_moment(answer["ts"]) - here).total_seconds() if answer.get("ts") else None


async def read_sync(settings: Settings) -> tuple[int, bool] | None:
    """The server's sync interval in nanoseconds, and whether it syncs every write; None without a system account."""
    if not settings.has_system_account:
        return None
    try:
        connection = await Connection.open(settings.for_system_account(), name=f"{settings.prefix}-doctor")
    except PartiError:
        return None
    try:
        reply = await connection.request("$SYS.REQ.SERVER.PING.JSZ", b"{}", timeout_s=_ANSWER_S)
        config: dict[str, Any] = json.loads(reply.data)["data"]["config"]
    except (PartiError, ValueError, KeyError, TypeError):
        return None
    finally:
        await connection.close()
    return int(config.get("sync_interval", 0)), bool(config.get("sync_always"))


async def denied_among(connection: Connection, calls: Iterable[Call]) -> set[Call]:
    """Those of the calls that the server does not let us make; each is tried in a way that changes nothing."""
    every = list(calls)
    asked = {call.probe: call for call in every if call.kind not in {"none", "listen"}}
    tried = await asyncio.gather(*(_is_denied(connection, call) for call in asked.values()))
    denied = {probe for probe, is_denied in zip(asked, tried, strict=True) if is_denied}
    unheard = await _unheard(connection, {call.probe for call in every if call.kind == "listen"})
    return {call for call in every if call.probe in (unheard if call.kind == "listen" else denied)}


async def _unheard(connection: Connection, subjects: Collection[str]) -> set[str]:
    """Those of the subjects that we may not subscribe to."""
    found: list[PermissionDenied] = []
    remove = connection.on_permission_denied(found.append)
    subscriptions = []
    try:
        for subject in subjects:
            subscriptions.append(await connection.client.subscribe(subject, cb=_ignore))
        await connection.flush(_ANSWER_S)
    finally:
        remove()
        for subscription in subscriptions:
            with contextlib.suppress(nats_errors.Error):
                await subscription.unsubscribe()
    refused = {denied.subject.lower() for denied in found if denied.operation == "subscribe to"}
    return {subject for subject in subjects if subject.lower() in refused}


async def _ignore(message: Msg) -> None:
    """Whatever comes while we try is not for us."""


async def _is_denied(connection: Connection, call: Call) -> bool:
    headers = {"Nats-Expected-Last-Sequence": _NEVER} if call.kind == "expecting" else None
    payload = _NO_JSON if call.kind == "broken" else b""
    try:
        await connection.request(call.probe, payload, headers=headers, timeout_s=_PROBE_S)
    except PermissionDenied:
        return True
    except PartiError:
        return False  # nobody listens, or nobody answers: it got through all the same
    return False


def _moment(stamp: str) -> datetime:
    """The server writes nanoseconds; datetime keeps microseconds."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", stamp))
