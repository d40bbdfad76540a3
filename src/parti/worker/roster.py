"""The partitions of a worker and the lane of each: opened when one is gained, closed when it is let go.

A partition is owned (it is handled here), incoming (it is delivered here while somebody else still handles it), or
leaving (it was released, but its handler still runs). The position of one that was released is remembered until it
is gained again, or somebody knows better. All of it happens on the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from parti.core.lane import Lane, Phase
from parti.core.loads import Effort
from parti.errors import SubjectMismatch
from parti.model.message import Ownership
from parti.model.partition import Partition, Template
from parti.model.safe_text import text_of
from parti.model.subjects import covers, has_wildcard
from parti.worker.floors import Floors, Reached

_EVICT_ABOVE = 10_000


class Queues(Protocol):
    """The lanes at work: what is asked of them when a partition comes or goes."""

    lets_go: bool
    lock: threading.Lock
    on_starved: Callable[[Lane], None]

    def wake(self, lane: Lane) -> None:
        """Let a lane that was held go on, unless something else holds it."""

    def skip_to(self, positions: Mapping[str, int]) -> None:
        """Others have finished these partitions up to there."""

    def refence(self, lane: Lane, ownership: Ownership) -> None:
        """What has not been started carries this ownership."""

    def abandon(self, lane: Lane) -> None:
        """Drop what waits in a closed lane."""

    def closed(self, lane: Lane) -> int:
        """A lane is closed; returns its position."""


class Roster:
    """Which partitions have a lane here, found by the subject of a delivery or by the partition's id.

    With `each_subject`, every subject that fits the template is a partition of its own, found as it arrives. With
    `measures`, what handlers take is counted for each partition. `lanes` is filled here and never replaced, so that
    others may hold on to it; so are `by_subject` and `strangers`.
    """

    def __init__(
        self,
        queues: Queues,
        floors: Floors,
        lanes: dict[str, Lane],
        *,
        template: Template,
        stream: str,
        worker_id: str,
        each_subject: bool,
        measures: bool,
    ) -> None:
        self.lanes = lanes
        """The lanes, by partition id."""
        self.by_subject: dict[bytes, tuple[Lane, str]] = {}
        """A short cut to lanes that were found before."""
        self.strangers: set[bytes] = set()
        """Subjects that arrive and are nobody's business here: others', or those to get ready for."""
        self.leaving: dict[str, Lane] = {}
        """Released, but their handler still runs."""
        self.released: dict[str, int] = {}
        """Positions of partitions that were released and not gained again."""
        self.fences: Mapping[str, int] = {}
        """Fence tokens by partition id."""
        self.careful: Mapping[str, int] = {}
        """Partitions whose last owner died, and the sequence up to which each message is noted before its start."""
        self.failed: dict[str, tuple[int, int]] = {}
        """Heads that failed, here or at an earlier owner, by partition id: sequence, and attempts made."""
        self.measures = measures
        self._queues = queues
        self._floors = floors
        self._template = template
        self._stream = stream
        self._worker_id = worker_id
        self._each_subject = each_subject
        self._partitions: dict[str, Partition] = {}
        self._position_of: Callable[[str, str], int] = lambda partition_id, subject: 0
        # What was owned here, or by an earlier run, and is not: the stored record may still speak for it. True: not
        # the one that is being stored.
        self._let_go: dict[str, bool] = {}
        # Carried for partitions that somebody else still handles, by subject.
        self._incoming: dict[str, Partition] = {}
        # Lanes that were forgotten had finished everything below this.
        self._evicted_below = 0

    # ── what there is ─────────────────────────────────────────────────────────────────────────────────────────

    def all(self) -> list[Lane]:
        """Every lane."""
        return list(self.lanes.values())

    def has(self, partition_id: str) -> bool:
        """Whether a partition has a lane already."""
        return partition_id in self.lanes

    @property
    def owned(self) -> tuple[str, ...]:
        """Ids of the partitions that are owned, those without a lane included."""
        return tuple(partition.id for partition in self._partitions.values())

    def positions(self) -> Iterator[tuple[str, int]]:
        """Partition id and position of every lane."""
        return ((pid, lane.position) for pid, lane in self.lanes.items() if not lane.incoming)

    def behind(self) -> dict[str, int]:
        """Positions that the floor does not speak for: of released partitions and of parked lanes."""
        own = {pid: lane.position for pid, lane in self.lanes.items() if lane.behind and not lane.incoming}
        return self.released | own

    def known_position(self, partition_id: str) -> int:
        """Where a partition stands that is owned, or was once; 0 when it has no position here."""
        lane = self.lanes.get(partition_id)
        return lane.position if lane else self.released.get(partition_id, 0)

    def restore(self, released: dict[str, int], let_go: Iterable[str] = ()) -> None:
        """Remember positions of partitions that an earlier run had released, parked or owned.

        `let_go`: subjects that are not owned, and that the record which that run has left speaks for.
        """
        self.released.update(released)
        self._let_go |= dict.fromkeys(let_go, False)

    def summarised(self) -> None:
        """A record is about to be stored that does not speak for what is let go by now."""
        self._let_go = dict.fromkeys(self._let_go, True)

    def stored(self) -> None:
        """The record that was summarised last is stored."""
        self._let_go = {subject: False for subject, summarised in self._let_go.items() if not summarised}

    def forget_position(self, partition_id: str) -> None:
        """Whatever is known of a released partition counts no more: somebody knows better."""
        self.released.pop(partition_id, None)

    def note_failed(self, partition_id: str, seq: int, attempts: int) -> None:
        """A message has failed so often; whoever tries it again, here or elsewhere, counts on."""
        self.failed[partition_id] = max((seq, attempts), self.failed.get(partition_id, (0, 0)))

    def still_failed(self) -> dict[str, tuple[int, int]]:
        """Heads that failed and are not finished, as far as is known here."""
        self.failed = {p: known for p, known in self.failed.items() if known[0] >= self.known_position(p)}
        return self.failed

    # ── coming ────────────────────────────────────────────────────────────────────────────────────────────────

    def own(self, partitions: dict[str, Partition], position_of: Callable[[str, str], int]) -> None:
        """Replace the set of owned partitions (by subject) and where each of them starts.

        A partition that is no longer owned starts nothing more; a handler that runs finishes, and its position
        counts.
        """
        gone = [partition for subject, partition in self._partitions.items() if subject not in partitions]
        for partition in gone:
            self._release(partition)
        if gone:
            self.by_subject.clear()  # only a short cut: the next delivery finds its lane again
        self._let_go |= dict.fromkeys((p.subject for p in gone), False)
        for subject in self._let_go.keys() & partitions.keys():
            del self._let_go[subject]
        self.strangers.clear()
        self._partitions = dict(partitions)
        self._position_of = position_of
        for subject in self._incoming.keys() & partitions.keys():
            lane = self.lanes.get(self._incoming.pop(subject).id)
            if lane and lane.incoming:
                lane.incoming = False
                self.released.pop(lane.ownership.partition.id, None)
                self._queues.refence(lane, self._ownership(lane.ownership.partition))
                position = position_of(lane.ownership.partition.id, subject)
                self._queues.skip_to({lane.ownership.partition.id: position})
                self._hold_back(lane)
                self._queues.wake(lane)

    def expect(self, incoming: Mapping[str, Partition]) -> None:
        """Replace the set of partitions (by subject) that are delivered here while somebody else handles them."""
        for subject in self._incoming.keys() - incoming.keys():
            lane = self.lanes.get(self._incoming[subject].id)
            if lane and lane.incoming:
                lane.phase = Phase.CLOSED
                del self.lanes[lane.ownership.partition.id]
                self._queues.abandon(lane)
        self._incoming = dict(incoming)
        self.by_subject.clear()
        self.strangers.clear()

    def gain(self, partition: Partition, position: int, *, feed_to: int = 0) -> None:
        """Take up a partition whose unfinished messages lie below what has been delivered already."""
        lane = self.lanes.get(partition.id) or self._open(partition, position)
        reached = self._floors.reached(partition.subject)
        lane.start_behind(reached.next_seq, feed_to)
        # At once, not only when the server has been told: until then nobody may think that it has caught up.
        reached.cursor = min(reached.cursor, position)
        if feed_to:
            self._queues.on_starved(lane)

    def begin_at(self, start: int, partitions: Iterable[Partition], reached: Reached) -> None:
        """The next session of a consumer begins at `start` and may count on nothing below: feed what it lacks."""
        floor = self._floors.floor_of(reached)  # by what was delivered, not by what is about to be skipped
        reached.next_seq = max(reached.next_seq, start)
        for partition in partitions:
            lane = self.lanes.get(partition.id)
            known = self._position_of(partition.id, partition.subject)
            position = known if lane is not None and lane.behind else max(known, floor)
            if position < start:
                self.gain(partition, position, feed_to=reached.next_seq - 1)

    def _open(self, partition: Partition, position: int) -> Lane:
        """Give a partition its lane; one whose last handler still runs goes on with the same."""
        if partition.subject not in self._incoming:
            position = max(position, self.released.pop(partition.id, 0))
        lane = self.leaving.pop(partition.id, None)
        if lane is None:
            lane = Lane(self._ownership(partition), position)
            lane.effort = Effort() if self.measures else None
            lane.incoming = partition.subject in self._incoming
            if lane.incoming:
                lane.phase = Phase.HELD
            else:
                self._hold_back(lane)
        else:
            lane.phase = Phase.RUNNING
            self._queues.refence(lane, self._ownership(partition))
        self.lanes[partition.id] = lane
        return lane

    def _hold_back(self, lane: Lane) -> None:
        """Hold a new lane if its head must not simply be started as a first attempt."""
        partition_id = lane.ownership.partition.id
        lane.careful_to = self.careful.get(partition_id, 0)
        failed = self.failed.get(partition_id)
        lane.retry = failed if failed and failed[0] >= lane.position else None
        if lane.careful_to or lane.retry:
            lane.phase = Phase.HELD

    def _ownership(self, partition: Partition) -> Ownership:
        return Ownership(partition, self._stream, self._worker_id, self.fences.get(partition.id, 0))

    def fence(self, tokens: Mapping[str, int]) -> None:
        """Give these partitions their fence tokens; what has not been started carries the new one.

        Others keep theirs: they are about to be released, but what still starts until then is rightly started.
        """
        self.fences = {**self.fences, **tokens}
        for partition_id, lane in self.lanes.items():
            if lane.ownership.fence != self.fences.get(partition_id, 0):
                self._queues.refence(lane, self._ownership(lane.ownership.partition))

    # ── by subject ────────────────────────────────────────────────────────────────────────────────────────────

    def route(self, subject: bytes) -> tuple[Lane, str] | None:
        """Find or make the lane of a subject that was not seen before; None when it is not ours."""
        name = text_of(subject)
        partition = self._partitions.get(name)
        if partition is None and not self._queues.lets_go:
            partition = self._incoming.get(name)
        if partition is None:
            owner = _covering(self._partitions, name)
            if owner is None and not self._queues.lets_go:
                owner = _covering(self._incoming, name)
            if owner is None:
                if not self._is_let_go(name):
                    self.strangers.add(subject)
                return None
            partition = owner
            if self._each_subject:
                try:
                    partition = self._template.parse_any(name)
                except SubjectMismatch:
                    return None
        lane = self.lanes.get(partition.id)
        if lane is None:
            start = self._position_of(partition.id, partition.subject)
            lane = self._open(partition, max(start, self._evicted_below if self._each_subject else 0))
        entry = self.by_subject[subject] = (lane, name)
        return entry

    def _is_let_go(self, name: str) -> bool:
        return name in self._let_go or any(has_wildcard(s) and covers(s, name) for s in self._let_go)

    def evict(self) -> None:
        """Forget idle lanes whose position the floor implies, when there are very many subjects."""
        if len(self.by_subject) > 2 * max(_EVICT_ABOVE, len(self.lanes)):
            self.by_subject.clear()
        if len(self.lanes) <= _EVICT_ABOVE or not self._each_subject:
            return
        floor = self._evicted_below = self._floors.floor
        gone = {
            pid: lane
            for pid, lane in self.lanes.items()
            if lane.phase is Phase.IDLE and lane.position <= floor and not lane.behind
        }
        for partition_id in gone:
            del self.lanes[partition_id]
        dead = set(map(id, gone.values()))
        kept = {s: entry for s, entry in self.by_subject.items() if id(entry[0]) not in dead}
        self.by_subject.clear()
        self.by_subject.update(kept)

    # ── going ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _release(self, partition: Partition) -> None:
        lanes = [lane for lane in self.lanes.values() if covers(partition.subject, lane.ownership.partition.subject)]
        for lane in lanes:
            self._close(lane)
        position = self._position_of(partition.id, partition.subject)
        if not lanes and position:
            self.released[partition.id] = position

    def _close(self, lane: Lane) -> None:
        partition_id = lane.ownership.partition.id
        with self._queues.lock:
            running = lane.phase is Phase.RUNNING
            lane.phase = Phase.CLOSED
        del self.lanes[partition_id]
        if running:
            self.leaving[partition_id] = lane
        else:
            self._queues.abandon(lane)
        self.released[partition_id] = self._queues.closed(lane)

    def is_leaving(self, lane: Lane) -> bool:
        """Whether a lane was released and its handler has not ended; the next owner waits for it."""
        return self.leaving.get(lane.ownership.partition.id) is lane

    def left(self, lane: Lane) -> bool:
        """The handler of a closed lane has ended; whether it was one that somebody may wait for."""
        partition_id = lane.ownership.partition.id
        if self.leaving.get(partition_id) is not lane:
            return False
        del self.leaving[partition_id]
        self.released[partition_id] = lane.position
        return True

    def start_over(self) -> None:
        """The stream was made anew: forget all lanes and positions, but not what is owned."""
        for known in (self.lanes, self.leaving, self.released, self.by_subject, self.failed):
            known.clear()
        self._evicted_below = 0


def _covering(partitions: Mapping[str, Partition], name: str) -> Partition | None:
    """The partition whose subject, with wildcards, covers another."""
    return next((p for s, p in partitions.items() if covers(s, name)), None)
