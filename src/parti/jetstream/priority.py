"""Consumers with a priority group: made, changed, looked at and unpinned.

Guards that a consumer never differs silently from what was asked for: rules that the server does not enforce are
checked first, its own refusals are passed on by name, and a server too old to know of groups is recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parti.core.priority import (
    Policy,
    PriorityGroup,
    check_config,
    check_server,
    check_taken,
    check_update,
    group_of,
    named,
    with_group,
)
from parti.errors import ApiError, ConfigError, NotFound, PermissionDenied
from parti.jetstream.api import ConsumerInfo, GroupState, JetStreamApi
from parti.jetstream.connection import Connection

_CONSUMER_NOT_FOUND = 10014


async def ensure_consumer(
    connection: Connection, stream: str, name: str, group: PriorityGroup | None, **config: Any
) -> ConsumerInfo:
    """Return the durable pull consumer with this group (None: without one), made or changed as needed.

    `config` are further fields as JetStream spells them, times in nanoseconds; what is not named keeps its value.
    Raises ConfigError before anything is touched for what the rules forbid, an update that would switch the group
    or the policy among it; ServerTooOld; PriorityRefused.

    Example:
        group = PriorityGroup("jobs", Policy.PINNED, timeout_s=5.0)
        await ensure_consumer(connection, "JOBS", "jobs", group, filter_subjects=["jobs.>"])
    """
    api = JetStreamApi(connection)
    wanted = {"name": name, "durable_name": name, "ack_policy": "explicit", **config}
    if group is not None:
        wanted |= group.fields()
    check_config(wanted)
    try:
        found = await api.consumer_info(stream, name)
    except NotFound as error:
        if error.code != _CONSUMER_NOT_FOUND:
            raise
        return await put_consumer(connection, stream, wanted, action="create")
    after = {**with_group(found.config, group), **wanted}
    check_update(found.config, after)
    if all(found.config.get(field) == value for field, value in after.items()):
        return found
    return await put_consumer(connection, stream, after, action="update")


async def put_consumer(
    connection: Connection, stream: str, config: Mapping[str, Any], *, action: str
) -> ConsumerInfo:
    """Create or change a consumer with everything checked that concerns its priority group; see `ensure_consumer`.

    For an update, `check_update` is the caller's to ask: only it knows what was there.
    """
    group = check_config(config)
    if group is not None:
        check_server(connection.server_version, group.policy)
    try:
        info = await JetStreamApi(connection).put_consumer(stream, config, action=action)
    except ApiError as error:
        raise named(error) from None
    if group is not None:
        check_taken(group, info.config)
    return info


async def unpin(api: JetStreamApi, stream: str, consumer: str, group: str) -> None:
    """Take the pin from whoever has it: the server pins whose pull it serves next, maybe the same client again.

    Raises NotFound for the consumer, PriorityRefused for the group. With another policy than `pinned_client` the
    server says yes and does nothing.
    """
    try:
        await api.call(f"CONSUMER.UNPIN.{stream}.{consumer}", {"group": group})
    except ApiError as error:
        raise named(error) from None


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A consumer's group, and what the server knows of it now."""

    stream: str
    consumer: str
    group: PriorityGroup
    state: GroupState
    pending: int
    ack_pending: int
    waiting: int
    """Pulls that stand."""


def report_of(stream: str, info: ConsumerInfo) -> GroupReport | None:
    """What there is to say of the group of a consumer; None when it has none, or one of a policy not known here."""
    try:
        group = group_of(info.config)
    except ConfigError:
        return None
    if group is None:
        return None
    state = next((each for each in info.groups if each.name == group.name), GroupState(group.name, "", None))
    name = str(info.config.get("name") or info.config.get("durable_name"))
    return GroupReport(stream, name, group, state, info.pending, info.ack_pending, info.waiting)


async def find_groups(api: JetStreamApi, stream: str = "", consumer: str = "") -> list[GroupReport]:
    """Every group of the account, as far as this user may list its streams, of a stream, or of one consumer.

    Raises NotFound for a named one that is not there, PermissionDenied when nothing may be listed.
    """
    found = {stream: await api.consumers(stream)} if stream else await _all_consumers(api)
    infos = [(name, info) for name, each in found.items() for info in each if consumer in {"", info.name}]
    if consumer and not infos:
        raise NotFound(_CONSUMER_NOT_FOUND, "consumer not found")
    return [report for name, info in infos if (report := report_of(name, info)) is not None]


async def _all_consumers(api: JetStreamApi) -> dict[str, list[ConsumerInfo]]:
    """Consumers of every stream that this user may list; PermissionDenied when that is none of those there are."""
    found: dict[str, list[ConsumerInfo]] = {}
    denied: PermissionDenied | None = None
    for stream in await api.stream_names():
        try:
            found[stream] = await api.consumers(stream)
        except PermissionDenied as error:
            denied = error
        except NotFound:
            pass  # deleted meanwhile
    if denied and not found:
        raise denied
    return found


async def release(api: JetStreamApi, stream: str, consumer: str, group: str, pin_id: str) -> bool:
    """Give up one's own pin, so that the next client need not wait for the timeout; whether it was still ours.

    Between the look and the unpinning somebody else may have been pinned, who then is pinned anew.
    """
    info = await api.consumer_info(stream, consumer)
    if any(state.name == group and state.pinned_id == pin_id for state in info.groups):
        await unpin(api, stream, consumer, group)
        return True
    return False


__all__ = [
    "GroupReport",
    "Policy",
    "PriorityGroup",
    "ensure_consumer",
    "find_groups",
    "put_consumer",
    "release",
    "report_of",
    "unpin",
]
