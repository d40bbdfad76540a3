"""Matching old consumers to partitions, and everything that may go wrong with them.

A consumer's filter says which partition it reads; its name only says whether it is meant. Guards that no partition is
switched whose finished messages are not known exactly.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from parti.core.migration import ConsumerState, is_reset
from parti.errors import ConfigError
from parti.model.partition import Partition
from parti.model.subjects import covers, has_wildcard

PLACEHOLDER = "{partition}"
_NAME = re.compile(r"[^\s.*>/\\]+")
_NS = 1_000_000_000
_SERVERS_MOST = 1000
"""Consumers of a stream without `max_consumers`: the 1,001st is refused (nats-server 2.15, error 10026)."""

Level = Literal["blocks", "note"]
"""`blocks`: nothing is switched before it is mended."""


class Naming(Protocol):
    """Which consumers are meant."""

    text: str

    def means(self, name: str) -> bool:
        """Whether this consumer is to be migrated."""

    def said(self, name: str) -> str:
        """The partition that its name, or the list, claims it reads; empty when nothing is claimed."""

    @property
    def listed(self) -> tuple[str, ...]:
        """Consumers that must exist."""


class Pattern:
    """Names such as `orders-{partition}`."""

    def __init__(self, text: str) -> None:
        head, found, tail = text.partition(PLACEHOLDER)
        if not found or PLACEHOLDER in tail or any(c in head + tail for c in "{}.*> \t/\\"):
            raise ConfigError(
                f"--consumers {text!r}: expected a name with {PLACEHOLDER} in it once, such as 'orders-{PLACEHOLDER}'"
            )
        self.text = text
        self.listed: tuple[str, ...] = ()
        self._shape = re.compile(f"{re.escape(head)}(.+){re.escape(tail)}", re.DOTALL)

    def means(self, name: str) -> bool:
        """Whether the name fits."""
        return self._shape.fullmatch(name) is not None

    def said(self, name: str) -> str:
        """What stands in the place of the partition."""
        found = self._shape.fullmatch(name)
        return found[1] if found else ""


class Listed:
    """Names from a file: a consumer on each line, and its partition after it if you like."""

    def __init__(self, text: str, content: str) -> None:
        self.text = text
        self._partitions: dict[str, str] = {}
        for number, line in enumerate(content.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) > 2 or not _NAME.fullmatch(words[0]):
                raise ConfigError(
                    f"{text}, line {number}: expected a consumer, or it and its partition, got {line.strip()!r}"
                )
            if words[0] in self._partitions:
                raise ConfigError(f"{text}, line {number}: {words[0]} is listed twice; leave one of the lines out")
            self._partitions[words[0]] = words[1] if len(words) > 1 else ""
        if not self._partitions:
            raise ConfigError(f"{text} lists no consumer; expected one on each line")
        self.listed = tuple(self._partitions)

    def means(self, name: str) -> bool:
        """Whether it is listed."""
        return name in self._partitions

    def said(self, name: str) -> str:
        """The partition that is listed with it."""
        return self._partitions.get(name, "")


@dataclass(frozen=True, slots=True)
class Risk:
    """Something to know, or to mend, before anything is done."""

    level: Level
    text: str
    about: tuple[str, ...] = ()
    """Consumers or partitions."""


@dataclass(frozen=True, slots=True)
class Match:
    """A partition and the one consumer that reads it now."""

    partition: Partition
    consumer: ConsumerState


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else has to be known: the stream, and the fleet that is to come."""

    retention: str
    workers: int
    capacity: int
    """Partitions that one worker takes."""
    partitions: Sequence[Partition]
    consumers: Sequence[ConsumerState]
    """All of the stream."""
    claimed: Collection[str] = ()
    """Partitions that workers of the fleet own now."""
    most_consumers: int = -1
    """The stream's `max_consumers`."""
    begun: bool = False
    """The migration has begun: what it has paused and given to the fleet is no surprise."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be migrated, and what speaks against it."""

    matches: tuple[Match, ...] = ()
    unmatched: Mapping[str, str] = field(default_factory=dict)
    """Consumers that are meant and have no partition of their own, and why."""
    overlapping: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Partitions that several of them read."""
    uncovered: tuple[Partition, ...] = ()
    """Partitions that none of them reads."""
    missing: tuple[str, ...] = ()
    """Listed, but not there."""
    others: tuple[str, ...] = ()
    """Consumers of the stream that are not meant."""
    risks: tuple[Risk, ...] = ()
    before: int = 0
    """Consumers of the stream now, and …"""
    after: int = 0
    """… when all is done."""

    @property
    def blocked(self) -> tuple[Risk, ...]:
        """What has to be mended first."""
        return tuple(risk for risk in self.risks if risk.level == "blocks")

    @property
    def lag_msgs(self) -> int:
        """Messages that wait for the old consumers, and …"""
        return sum(match.consumer.pending for match in self.matches)

    @property
    def in_flight_msgs(self) -> int:
        """… messages that they have delivered and that are not acknowledged."""
        return sum(match.consumer.ack_pending for match in self.matches)


def make_plan(naming: Naming, around: Surroundings) -> Plan:
    """Match what is there; raises `ConfigError` when there is nothing to migrate."""
    meant = [consumer for consumer in around.consumers if naming.means(consumer.name)]
    if not meant:
        names = sorted(consumer.name for consumer in around.consumers)
        there = f"the stream has {len(names)}, such as {', '.join(names[:3])}" if names else "the stream has none"
        raise ConfigError(f"no consumer fits {naming.text!r}; {there}")
    by_subject = {partition.subject: partition for partition in around.partitions}
    readers: dict[str, list[ConsumerState]] = {}
    unmatched: dict[str, str] = {}
    for consumer in meant:
        read = _partitions_of(consumer, by_subject)
        if len(read) == 1 and len(consumer.subjects) == 1:
            readers.setdefault(read[0].id, []).append(consumer)
        else:
            unmatched[consumer.name] = _why_unmatched(consumer, read)
    single = {p: found[0] for p, found in readers.items() if len(found) == 1}
    plan = Plan(
        matches=tuple(Match(p, single[p.id]) for p in around.partitions if p.id in single),
        unmatched=unmatched,
        overlapping={p: tuple(c.name for c in found) for p, found in readers.items() if len(found) > 1},
        uncovered=tuple(p for p in around.partitions if p.id not in readers),
        missing=tuple(name for name in naming.listed if name not in {c.name for c in meant}),
        others=tuple(sorted(c.name for c in around.consumers if not naming.means(c.name))),
        before=len(around.consumers),
        after=len(around.consumers) - len(single) + around.workers,
    )
    return _with_risks(plan, naming, around)


def _partitions_of(consumer: ConsumerState, by_subject: Mapping[str, Partition]) -> list[Partition]:
    """The partitions that it reads something of."""
    found: list[Partition] = []
    for subject in consumer.subjects:
        if subject in by_subject:
            found.append(by_subject[subject])
        elif has_wildcard(subject):
            found += [p for s, p in by_subject.items() if covers(subject, s)]
    return found if consumer.subjects else list(by_subject.values())


def _why_unmatched(consumer: ConsumerState, read: Sequence[Partition]) -> str:
    if not consumer.subjects:
        return "it has no filter, so it reads every partition"
    subjects = ", ".join(consumer.subjects[:3])
    if not read:
        return f"its filter {subjects} is no partition's subject"
    return f"its filter {subjects} covers {len(read)} partitions, and there is one position for all of them"


# ── risks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _with_risks(plan: Plan, naming: Naming, around: Surroundings) -> Plan:
    risks = [
        *_structure(plan),
        *_fleet(plan, around),
        *_room(around),
        *_retention(around),
        *_consumers(plan, naming, around),
    ]
    order = {"blocks": 0, "note": 1}
    return Plan(
        plan.matches,
        plan.unmatched,
        plan.overlapping,
        plan.uncovered,
        plan.missing,
        plan.others,
        tuple(sorted(risks, key=lambda risk: order[risk.level])),
        plan.before,
        plan.after,
    )


def _structure(plan: Plan) -> Iterator[Risk]:
    if plan.unmatched:
        yield Risk(
            "blocks",
            "consumers that are meant and have no partition of their own would go on beside the fleet; narrow the "
            "pattern, or split them",
            tuple(plan.unmatched),
        )
    if plan.overlapping:
        yield Risk(
            "blocks",
            "several consumers that are meant read the same partition, so each message is handled several times now; "
            "leave all but one out",
            tuple(plan.overlapping),
        )
    if plan.missing:
        yield Risk("blocks", "consumers that are listed do not exist; take them off the list", plan.missing)
    if plan.uncovered:
        yield Risk(
            "note",
            "nobody reads these partitions; the fleet will, from where it began or from the first message",
            tuple(p.id for p in plan.uncovered),
        )


def _fleet(plan: Plan, around: Surroundings) -> Iterator[Risk]:
    matched = [match.partition.id for match in plan.matches]
    if not around.begun and (both := tuple(p for p in matched if p in around.claimed)):
        yield Risk(
            "blocks",
            "workers of the fleet own these partitions already, so both handle them; stop the workers until the "
            "shadow phase has begun",
            both,
        )
    room = around.workers * around.capacity
    if room < len(around.partitions):
        yield Risk(
            "blocks",
            f"{around.workers} workers take {room:,} of {len(around.partitions):,} partitions; plan for more, or "
            f"raise capacity",
        )


def _room(around: Surroundings) -> Iterator[Risk]:
    # For a while there are old consumers, shadows and those of workers.
    needed = len(around.consumers) + 2 * around.workers
    limit = around.most_consumers if around.most_consumers > 0 else _SERVERS_MOST
    if not around.begun and needed > limit:
        said = f"max_consumers {limit:,}" if around.most_consumers > 0 else f"the server's limit of {limit:,}"
        yield Risk(
            "blocks",
            f"up to {needed:,} consumers are there at a time, more than {said}, which a stream keeps for life; "
            f"delete some that nobody needs, or plan for fewer workers",
        )


def _retention(around: Surroundings) -> Iterator[Risk]:
    if around.retention == "workqueue":
        yield Risk(
            "note",
            "work-queue retention: an old consumer has to be deleted before a worker can have its subject, so the "
            "switch deletes it (a rollback makes it anew), and there are no shadow consumers",
        )
    if around.retention == "interest":
        yield Risk(
            "note",
            "interest retention: messages stay in the stream from the switch to the cleanup, because the old "
            "consumers still want them, and there are no shadow consumers",
        )


def _consumers(plan: Plan, naming: Naming, around: Surroundings) -> Iterator[Risk]:
    states = [match.consumer for match in plan.matches]

    def named(chosen: Sequence[ConsumerState]) -> tuple[str, ...]:
        return tuple(state.name for state in chosen)

    if not around.begun and (paused := [s for s in states if s.paused]):
        yield Risk("blocks", "these are paused by somebody; resume them, or leave them out", named(paused))
    if silent := [s for s in states if s.config.get("ack_policy") == "none"]:
        yield Risk(
            "note",
            "ack policy none: what is delivered counts as finished, so a message that is being handled at the moment "
            "of the switch may be lost with its process, and the fleet may begin before it ends",
            named(silent),
        )
    if all_at_once := [s for s in states if s.config.get("ack_policy") == "all"]:
        yield Risk(
            "note",
            "ack policy all: one acknowledgement stands for all before it; the switch waits for the last one",
            named(all_at_once),
        )
    if given_up := [s for s in states if s.gave_up]:
        yield Risk(
            "note",
            "max_deliver was reached: the old consumer has given up on messages; the fleet will not handle them "
            "either, except on a work-queue, which still has them",
            named(given_up),
        )
    elif limited := [s for s in states if int(s.config.get("max_deliver", -1)) > 0]:
        yield Risk(
            "note",
            "max_deliver is set: a message that reaches it before the switch counts as finished",
            named(limited),
        )
    if pushed := [s for s in states if s.config.get("deliver_subject")]:
        yield Risk(
            "note",
            "push consumers: they are paused like others; what was pushed and not acknowledged is waited for",
            named(pushed),
        )
    if fixed := [s for s in states if not is_reset(s.config)]:
        yield Risk(
            "note",
            "their deliver policy knows no way back to a position: a rollback makes them anew, by start sequence",
            named(fixed),
        )
    if fleeting := [s for s in states if not s.config.get("durable_name")]:
        yield Risk("note", "not durable: the server removes them when nobody reads them", named(fleeting))
    if short := [s for s in states if 0 < int(s.config.get("inactive_threshold", 0)) < 3600 * _NS]:
        yield Risk(
            "note",
            "inactive_threshold below an hour: the server may remove them between switch and rollback, which makes "
            "them anew",
            named(short),
        )
    if busy := [s for s in states if s.ack_pending]:
        total = sum(s.ack_pending for s in busy)
        yield Risk("note", f"{total:,} messages are in flight; the switch waits for each partition's", named(busy))
    if differing := [m for m in plan.matches if _differs(naming.said(m.consumer.name), m.partition.id)]:
        yield Risk(
            "note",
            "name and filter speak of different partitions; the filter counts",
            tuple(match.consumer.name for match in differing),
        )


def _differs(said: str, partition: str) -> bool:
    """Whether a name means another partition; it may leave out first keys, and dots that it must not have."""
    plain = re.compile(r"[^A-Za-z0-9]+")
    return bool(said) and not f"-{plain.sub('-', partition)}".endswith(f"-{plain.sub('-', said)}")
