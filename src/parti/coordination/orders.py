"""Orders of operators: read together with all they concern, changed by compare-and-set, and what stands in their way.

Nobody but operators writes the record, and nobody answers it: the rebalancer makes the fleet follow, and the claims
tell how far it has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from parti.coordination.control_plane import ControlPlane
from parti.coordination.records import KEYS, Records
from parti.coordination.repairs import repair_of
from parti.core.fleet_view import FleetState
from parti.errors import ConfigError, DecodeError, PartiError, RequestTimeout, WrongRevision
from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.watch import Watch
from parti.model.fleet import Claim, FleetRecord, Orders, decode, encode

KEY = "orders"
_FLEET = "fleet"
_TRIES: Mapping[type[PartiError], int] = {WrongRevision: 100, RequestTimeout: 2}
"""Who loses a compare-and-set has lost it to an operator who is done, so that the first takes as many operators."""


@dataclass(slots=True)
class Situation:
    """The fleet as an operator finds it: its records, and the orders that stand."""

    records: Records = field(default_factory=Records)
    orders: Orders = field(default_factory=Orders)
    revision: int = 0
    """Of the orders; 0: there have never been any."""
    fleet: FleetRecord | None = None
    """None: no fleet has ever worked here."""

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Situation:
        """Decode what was read from the bucket."""
        situation = cls()
        for key, entry in entries.items():
            situation.take(key, entry)
        return situation

    def take(self, key: str, entry: Entry) -> None:
        """Take in one key as it is now; orders that cannot be read leave the last ones standing."""
        if key not in {KEY, _FLEET}:
            self.records.take(key, entry)
            return
        self.records.unreadable.pop(key, None)
        try:
            if key == KEY:
                self.orders = decode(entry.value, Orders) if entry.value else Orders()
                self.revision = entry.revision
            else:
                self.fleet = decode(entry.value, FleetRecord) if entry.value else None
        except DecodeError as error:
            self.records.refuse(key, entry.revision, error)


async def read_situation(plane: ControlPlane) -> Situation:
    """Everything that tells of the fleet and of what is wanted of it, as it is now."""
    return Situation.of(await plane.read(*KEYS, KEY, _FLEET))


def watch_situation(
    plane: ControlPlane,
    on_entry: Callable[[str, Entry], None],
    on_reset: Callable[[str], None],
    on_synced: Callable[[], None] = lambda: None,
) -> Watch:
    """A watch of the same; the caller starts and stops it."""
    keys = (*KEYS, KEY, _FLEET)
    return Watch(
        plane.connection, plane.api, plane.bucket.name, keys, on_entry, on_reset=on_reset, on_synced=on_synced
    )


# ── changing them ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Change:
    """Orders as they were, as they are, and since which revision."""

    before: Orders
    after: Orders
    revision: int


async def change_orders(bucket: Bucket, change: Callable[[Orders], Orders]) -> Change:
    """Replace the orders by what `change` makes of them, however many operators do the same at once.

    `change` is called again with what another operator has written meanwhile, so that no order is lost; it must do no
    harm when its own result is what it finds. What it raises is raised, and nothing is written then. `ConfigError`
    when the record is of another version, `WrongRevision` when somebody else was faster each time, `RequestTimeout`
    when the server is silent: then the orders may have been changed or not.
    """
    failures: Counter[type[PartiError]] = Counter()
    while True:
        entry = await bucket.get(KEY)
        before, revision = (orders_in(entry), entry.revision) if entry else (Orders(), 0)
        after = change(before)
        if after == before:
            return Change(before, after, revision)
        try:
            return Change(before, after, await bucket.put(KEY, encode(after), revision=revision))
        except (WrongRevision, RequestTimeout) as error:
            # After a silence it may have taken effect or not: the next look tells.
            failures[type(error)] += 1
            if failures[type(error)] >= _TRIES[type(error)]:
                raise


def orders_in(entry: Entry) -> Orders:
    """The orders that an entry holds; raises `ConfigError` when they are unreadable."""
    if not entry.value:
        return Orders()
    try:
        return decode(entry.value, Orders)
    except DecodeError as error:
        raise ConfigError(
            f"the key {KEY!r} cannot be read ({error}); nothing was changed: {repair_of(KEY)}"
        ) from None


# ── what stands in their way ──────────────────────────────────────────────────────────────────────────────────────


def obstacle(situation: Situation, partition: str, to: str = "") -> str:
    """What a partition that is to be let go, or to go to a certain worker, is waiting for, in a few words."""
    records = situation.records
    leader, claim = records.leaders.get("rebalancer"), records.claims.get(partition)
    if leader is None:
        return "there is no rebalancer"
    if leader.holder not in records.members:
        return f"the rebalancer {leader.holder} is gone, and another takes over when its lease ends"
    why = ""
    if claim and claim.owner in records.members:
        why = _why_kept(records, partition, claim) or _why_not_begun(situation, claim, claim.next or to)
    if not why and leader.state != FleetState.STABLE and leader.reason:
        why = f"the rebalancer says: {leader.reason}"
    return why or (f"it is still with {claim.owner}" if claim and claim.owner else "nobody has been given it yet")


def _why_kept(records: Records, partition: str, claim: Claim) -> str:
    """Why an owner cannot let go, or has not; empty when it was not told to."""
    owner, said = records.members[claim.owner], records.health.get(claim.owner)
    if owner.state == "away":
        return f"{claim.owner} is away and has to come back first"
    if claim.state != "moving":
        return ""
    if said is None or said.incarnation != owner.incarnation or said.applied < claim.awaits:
        return f"{claim.owner} has not let go of it yet"
    return f"its handler still runs on {claim.owner}" if partition in said.busy else ""


def _why_not_begun(situation: Situation, claim: Claim, heir: str) -> str:
    """Why an owner has not been told to let go; empty when nothing is known that would keep it."""
    if not heir or claim.state == "moving":
        return ""
    if not _pulls(situation.records, heir):
        return f"{heir} does not pull"
    if claim.state == "preparing":
        return f"{heir} is not ready for it yet"
    held = situation.orders.hold_moves and claim.owner not in situation.orders.drained
    return "moves are paused" if held else ""


def _pulls(records: Records, worker: str) -> bool:
    member, said = records.members.get(worker), records.health.get(worker)
    return bool(member and said and said.pulling and said.incarnation == member.incarnation)
