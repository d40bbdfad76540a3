"""Evictions: what is taken from workers that are not there, so that they cannot act although they may believe so.

Their lease, early, when the servers say that a worker's side has ended its connection. Their consumers, where no two
may carry one subject. Guards OneOwner for those that cannot be asked: a partition is given to the next one only when
the last one can no longer act.
"""

from __future__ import annotations

from collections.abc import Set

import structlog

from parti.coordination.control_plane import ControlPlane
from parti.coordination.election import Office
from parti.coordination.lease import clock
from parti.coordination.membership import Membership
from parti.core.consumer_config import consumer_name, is_foreign, owner_of, shard_number
from parti.errors import NotFound, WrongRevision
from parti.jetstream.kv import MARKER_TTL_S, Entry, Write
from parti.model.fleet import key_of

_log = structlog.get_logger("parti.rebalancer")

_EVICT_AFTER_S = 0.5
_ENDED = {"Client Closed", "Read Error"}
"""What the server says when it was the client's side that ended a connection, by closing it or by dying: a process
that dies with unread data in its socket resets the connection, which is a read error."""


class Evictions:
    """Evicts on behalf of one holding of the rebalancer's office; without that nothing takes effect."""

    def __init__(
        self,
        plane: ControlPlane,
        office: Office,
        membership: Membership,
        *,
        stream: str,
        prefix: str,
        on_disconnect: bool,
    ) -> None:
        """`on_disconnect`: a connection that its client has ended is reason enough."""
        self._plane = plane
        self._office = office
        self._membership = membership
        self._stream = stream
        self._prefix = prefix
        self._on_disconnect = on_disconnect
        self._due_s: dict[str, float] = {}
        """Workers whose connection was closed, and when their lease is ended for it."""

    def disconnected(self, ref: str, reason: str) -> bool:
        """A connection has ended, by what the server says; True when a worker is to be evicted for it."""
        worker = self._membership.suspect(ref)
        if worker:
            _log.warning("the connection of a worker ended", worker=worker, reason=reason)
        if worker and self._on_disconnect and reason in _ENDED:
            self._due_s[worker] = clock() + _EVICT_AFTER_S
            return True
        return False

    async def end_leases(self) -> float | None:
        """End the leases of workers that closed their connection and were not heard of since.

        Returns when to look again. A process that is gone cannot mind; one that is not has stopped starting handlers
        when its connection broke, and may only go on after a renewal, which this makes impossible.
        """
        for worker, due_s in list(self._due_s.items()):
            if worker not in self._membership.suspected:
                del self._due_s[worker]
            elif clock() >= due_s:
                del self._due_s[worker]
                _log.warning("ending the lease of a worker whose connection was closed", worker=worker)
                gone = Write(
                    key_of("ids", worker), b"", self._membership.revision(worker), MARKER_TTL_S, deletes=True
                )
                try:
                    await self._office.write([gone])
                except WrongRevision:
                    continue  # it has renewed its lease: it is alive
                self._membership.entry(gone.key, Entry(b"", 0))
        return min(self._due_s.values(), default=None)

    async def remove_consumers(self, owners: Set[str]) -> None:
        """Remove the consumers of those owners that are not there; their messages stay.

        A worker that is not there but believes it is finds its consumer gone, and may not make it anew before it has
        got its id again.
        """
        members, api = self._membership.members, self._plane.api
        absent = {w for w in owners - {""} if (member := members.get(w)) is None or member.state == "away"}
        names = await api.consumer_names(self._stream) if absent else []
        for owner in sorted(absent):
            first = consumer_name(self._prefix, owner)
            for name in [n for n in names if n == first or shard_number(n, first)]:
                try:
                    # By its name alone, a shard of one worker may be the first consumer of another.
                    config = (await api.consumer_info(self._stream, name)).config
                    if owner_of(config, self._prefix)[0] == owner and not is_foreign(config, self._plane.bucket.name):
                        await api.delete_consumer(self._stream, name)
                        _log.info("removed the consumer of a worker that is not there", worker=owner)
                except NotFound:
                    pass
