"""The records of the control plane, as they lie in the key-value bucket.

    fleet                 FleetRecord    what this fleet works on; written once, by the first worker
    ids.<worker>          MemberRecord   lease of a stable worker id; written by its holder, expires by itself
    standby.<worker>.<x>  StandbyRecord  a process that waits for that id; written by it, expires by itself
    stalls.<worker>       StallRecord    what its watchdog has found; written by its thread, expires by itself
    health.<worker>       HealthRecord   what that worker has applied and how it fares
    progress.<worker>     Progress       its positions (`parti.core.progress`)
    load.<worker>         LoadRecord     how much work its partitions are, as measured, with strategy `load`
    leader.<role>         LeaderRecord   lease of a role; written by its holder, expires by itself
    claims.<partition>    Claim          who owns a partition; written by the rebalancer only
    assignment.<worker>   Assignment     what a worker is to own, derived from the claims; rebalancer only
    orders                Orders         what operators want: placements, drained workers, pauses
    migration             MigrationRecord  how far a migration from older consumers is (`parti.model.migration`)
    migration.<partition> OldConsumer    the consumer that had it before, and who has it now; `parti migrate` only
    state.<partition>     StatePointer   where the state of a stateful handler lies (`parti.model.state`)
    mirror                MirrorRecord   how far the hot mirror may be trimmed (`parti.core.hot_mirror`); cleanup only

The rebalancer writes claims and assignments in one atomic batch with a renewal of its lease, so that a write of
somebody who is no longer the rebalancer has no effect at all. What workers write themselves names their incarnation.
Each record names its kind, and what names none, or another, is refused (`parti.model.records`).
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from parti.model.records import TAG, Amount, Count, Moment, Real, Weight, Whole, check_time, decode, encode

__all__ = [
    "ROLES",
    "Assignment",
    "Claim",
    "ClaimState",
    "FleetRecord",
    "Grant",
    "HealthRecord",
    "LeaderRecord",
    "LoadRecord",
    "MemberRecord",
    "MemberState",
    "MirrorRecord",
    "Orders",
    "Role",
    "StandbyRecord",
    "decode",
    "encode",
    "key_of",
    "name_of",
]

MemberState = Literal["active", "draining", "away", "left"]
"""`away`: it left with an identity and is expected back; its partitions wait until the lease ends. `left`: it is gone
for good, and the record says so for a while."""
ClaimState = Literal["owned", "preparing", "moving", "free"]
"""`preparing`: the owner goes on handling it while `next` gets ready. `moving`: the owner is to let go of it, then
`next` gets it. `free`: nobody owns it."""
RECOVERED, LEFT = "recovered", "left"
"""How a stall ends."""
Role = Literal["rebalancer", "monitor", "cleanup"]
ROLES: tuple[Role, ...] = ("rebalancer", "monitor", "cleanup")


class FleetRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="fleet"
):
    """What the fleet of this bucket works on: workers of another stream or template have no business here."""

    prefix: str
    stream: str
    template: str
    stream_created: str
    first_seq: Count
    """Where a partition begins that nobody has ever had, as long as the stream is the one made at that time."""


class MemberRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="member"
):
    """The lease of a stable worker id."""

    token: str
    """Who holds it: random for each process, or handed down by a supervisor to the next process of a slot."""
    incarnation: Count
    """Grows with every new holder of the id, also after the bucket was made anew."""
    state: MemberState = "active"
    identity: str = ""
    """Name of host, pod or slot that gets this id back after a restart; empty for none."""
    host: str = ""
    pid: Count = 0
    version: str = ""
    capacity: Count = 500
    """Most partitions that it takes."""
    weight: Weight = 1.0
    """Share of the load that it should get, against the others."""
    service: str = ""
    """Instance id of its NATS micro service."""
    client: str = ""
    """`<server id>/<client id>` of its connection, by which system events name it."""
    guest: bool = False
    """It is here for a while, for partitions that are placed on it, and gets no others."""
    started_at: Moment
    ttl_seconds: Amount

    def __post_init__(self) -> None:
        check_time(self.started_at)


class StandbyRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="standby"
):
    """A process that stands by to take a worker id over: for people to see, nobody decides by it."""

    worker: str
    rank: Whole = 0
    """Of several, those with smaller numbers go first."""
    host: str = ""
    pid: Count = 0
    version: str = ""
    since: Moment
    ttl_seconds: Amount

    def __post_init__(self) -> None:
        check_time(self.since)


class HealthRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="health"
):
    """What a worker says of itself with each heartbeat."""

    incarnation: Count
    applied: Count = 0
    """Version of the assignment that is in force; its positions are stored."""
    busy: tuple[str, ...] = ()
    """Partitions that it was told to let go and whose handler still runs."""
    ready: Count = 0
    """Version of the assignment whose partitions, incoming ones included, its consumer carries."""
    refused: tuple[str, ...] = ()
    """Partitions of the assignment that it cannot take; nobody handles them."""
    state: str = ""
    pulling: bool = False
    subjects: Count = 0
    finished: Count = 0
    rate: Real = 0.0
    """Messages finished a second, since the heartbeat before."""
    failures: Count = 0
    """Failed handler calls."""
    dead_letters: Count = 0
    update_failures: Count = 0
    """Failed consumer updates in a row."""
    updates: Count = 0
    """Consumer updates since it started."""
    updates_skipped: Count = 0
    in_hand: Count = 0
    """Messages delivered to it and not yet acknowledged."""
    p50_ms: Real = 0.0
    """Time that half of its handler calls took at most, since the heartbeat before; 0: there were none."""
    p99_ms: Real = 0.0
    parked: tuple[str, ...] = ()
    """Partitions that it reads from the stream itself, because they hold up others or have just come; the first."""
    failing: dict[str, str] = {}
    """Partitions whose next message has failed and will be tried again, and the error; the first."""
    problems: tuple[str, ...] = ()
    """Reasons why it is unhealthy."""
    at: Moment

    def __post_init__(self) -> None:
        check_time(self.at)


class StallRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="stall"
):
    """A worker that stood still: for people to see, also when its process is gone; nobody decides by it."""

    stall: str
    """What stood still: a kind of `parti.core.stall`."""
    reason: str
    host: str = ""
    pid: Count = 0
    at: Moment
    ended: Literal["", "recovered", "left"] = ""
    """How it ended; empty while it lasts."""

    def __post_init__(self) -> None:
        check_time(self.at)


class LoadRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="load"
):
    """What a worker has learned of its partitions; written seldom, and when something has changed noticeably.

    It stays when its worker is gone: until somebody else has measured them, nobody knows more of these partitions.
    """

    incarnation: Count
    loads: dict[str, Amount] = {}
    """Seconds of handler work a second, by partition; none for those that it has not watched for long enough."""
    at: Moment

    def __post_init__(self) -> None:
        check_time(self.at)


class LeaderRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="leader"
):
    """The lease of a role."""

    holder: str
    """Worker id."""
    token: str
    term: Count
    """Grows with every new holder, also after the bucket was made anew."""
    state: str = ""
    """State of the fleet as the rebalancer sees it."""
    reason: str = ""
    """Why, in a sentence."""
    strategy: str = ""
    wanted: Count = 0
    """How many partitions there are to own."""
    since: Moment
    ttl_seconds: Amount

    def __post_init__(self) -> None:
        check_time(self.since)


class Claim(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="claim"
):
    """Ownership of one partition."""

    owner: str = ""
    incarnation: Count = 0
    """The holder of the owner's id that this claim was made for."""
    fence_token: Count = 0
    """Grows with every change of owner or incarnation, also after the bucket was made anew."""
    claimed_at: Moment
    ttl_seconds: Amount
    """The claim counts as long as the owner's lease of this length does."""
    state: ClaimState = "owned"
    position: Count = 0
    """Where the owner began: every message of the partition below it is finished."""
    stream_created: str = ""
    """Creation time of the stream that the position is in: sequences of a recreated stream mean nothing."""
    next: str = ""
    """Who gets it after a move."""
    home: str = ""
    """While a guest owns it: who had it before, and whose share it counts to."""
    awaits: Count = 0
    """Version of an assignment that this step of a move waits for: of `next`, which tells it to get ready, while
    preparing; of the owner, which tells it to let go, while moving."""
    careful_to: Count = 0
    """The owner before was lost: up to this sequence, what is about to be started is noted down first."""
    suspect: Count = 0
    """A message in whose handler processes have died; 0 for none."""
    deaths: Count = 0
    """How many are known to have died in it."""
    failed: Count = 0
    """A message that failed at an earlier owner and is to be tried again; 0 for none."""
    attempts: Count = 0
    """How many attempts of it were made."""
    term: Count
    reason: str = ""
    """Why it was given to its owner, in a few words."""
    cause: str = ""
    """The same in one word (`parti.core.causes`)."""

    def __post_init__(self) -> None:
        check_time(self.claimed_at)


class Orders(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="orders"
):
    """What operators want of the fleet; it stands until it is taken back."""

    placed: dict[str, str] = {}
    """Partitions that belong to a certain worker as long as it is there."""
    drained: tuple[str, ...] = ()
    """Workers that are to own nothing."""
    paused: tuple[str, ...] = ()
    """Partitions that nobody is to handle."""
    hold_moves: bool = False
    """No planned moves between live workers."""
    withheld: tuple[str, ...] = ()
    """Partitions that consumers outside of the fleet still handle (`parti migrate`): nobody here is to."""

    @property
    def resting(self) -> frozenset[str]:
        """Partitions that nobody of the fleet is to handle, for whatever reason."""
        return frozenset(self.paused) | frozenset(self.withheld)


class MirrorRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="mirror"
):
    """What the keeper of the hot mirror is about to do; nobody begins to read it below `trim` or `room`."""

    stream_created: str
    trim: Count
    """How far it may be trimmed."""
    room: Count = 0
    """Those who need something older are asked to begin here."""
    remaking: bool = False
    """It is about to be deleted and made anew."""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Permission to handle one partition: fence token, and the position to begin at."""

    fence_token: Count
    position: Count
    careful_to: Count = 0
    suspect: Count = 0
    deaths: Count = 0
    failed: Count = 0
    attempts: Count = 0


class Assignment(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="assignment"
):
    """Everything that a worker is to own."""

    version: Count
    """Grows with every change."""
    term: Count
    incarnation: Count
    """It is meant for this holder of the id and for no other."""
    stream_created: str = ""
    """Creation time of the stream that the positions are in."""
    partitions: dict[str, Grant] = {}
    incoming: dict[str, Count] = {}
    """Partitions to get ready for, and a position below which everything is finished; others still handle them."""


_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")
_ESCAPED = re.compile(r"(?:=[0-9A-F]{2})+")


def key_of(kind: str, name: str) -> str:
    """The key of a record: `kind.name`, with characters that a key must not have as `=XX`."""
    return f"{kind}.{_UNSAFE.sub(lambda m: ''.join(f'={b:02X}' for b in m[0].encode()), name)}"


def name_of(key: str) -> str:
    """The name inside a key that `key_of` made."""
    _, _, name = key.partition(".")
    return _ESCAPED.sub(lambda m: bytes.fromhex(m[0].replace("=", "")).decode(errors="replace"), name)


def is_key(key: str) -> bool:
    """Whether `key_of` may have made a key; else another one has the name that this would be read as."""
    kind, dot, _ = key.partition(".")
    try:
        return not dot or key_of(kind, name_of(key)) == key
    except UnicodeError:
        return False
