"""Servers that lose their leader: who leads a stream, step-downs, and when all replicas have caught up again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from chaos.site import STREAM, Site
from parti.errors import PartiError

_LOOK_S = 0.1
_HEAL_S = 60.0


def streams(site: Site) -> tuple[str, str]:
    """The stream of the messages, and that of the control plane."""
    return STREAM, site.bucket.stream


async def leader_of(site: Site, stream: str) -> str:
    """The node that leads a stream; empty while there is none."""
    try:
        return str((await _cluster_info(site, stream)).get("leader", ""))
    except PartiError:
        return ""


async def step_down(site: Site, stream: str) -> None:
    """Ask the leader of a stream to give up; whoever has no leader at the moment is left alone."""
    site.faults.note("step-down", stream)
    try:
        await site.observer.api.call(f"STREAM.LEADER.STEPDOWN.{stream}")
    except PartiError:
        pass


async def kill_leader(site: Site, stream: str) -> int:
    """SIGKILL the node that leads a stream; returns its index. The workers may lose their leases by that."""
    names = [server.name for server in site.cluster.servers]
    leader = await leader_of(site, stream)
    index = names.index(leader) if leader in names else 0
    await site.cluster.kill(index)
    return index


async def healed(site: Site) -> bool:
    """Wait until all streams have a leader, and replicas that have caught up."""
    deadline_s = time.monotonic() + _HEAL_S
    while time.monotonic() < deadline_s:
        try:
            found = [await _cluster_info(site, stream) for stream in streams(site)]
        except PartiError:
            found = [{}]
        if all(info.get("leader") and _current(info) for info in found):
            return True
        await asyncio.sleep(_LOOK_S)
    return False


async def _cluster_info(site: Site, stream: str) -> dict[str, Any]:
    return dict((await site.observer.api.call(f"STREAM.INFO.{stream}"))["cluster"])


def _current(info: dict[str, Any]) -> bool:
    return all(replica.get("current") and not replica.get("offline") for replica in info.get("replicas", ()))
