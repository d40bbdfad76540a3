"""What the page shows, as plain values in sections, and the difference between two such pictures.

A picture is `{section: {key: value}}`; a difference is `{section: {"set": {key: value}, "gone": [key]}}`. Whoever
applies the differences in order to the picture they begin at has the newest picture: the page does nothing else.

    fleet       what can be said of all together, and of the way to the server
    workers     by worker id
    partitions  by name: owner, state, next owner, fence token, since (ms), cause, position, began by
    failing     by partition: why its next message fails
    moves       the newest records of the history, by sequence
    letters     the newest dead letters, by sequence, without payloads
    jobs        jobs that run, wait or have failed, and the last that ended, by id
    points      rate and lag over time, by milliseconds

Nothing is taken over as a whole from a record: tokens of leases, headers and payloads never get in here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from parti.coordination.orders import Situation
from parti.coordination.worker_rows import WorkerRow, worker_rows
from parti.core.causes import sentence
from parti.core.dead_letter import Letter
from parti.core.fleet_report import FleetReport, waits_for_room
from parti.jobs.desk import Line, Queue
from parti.model.fleet import Claim, LeaderRecord
from parti.model.history import HistoryRecord
from parti.model.safe_text import escape_line

Picture: TypeAlias = dict[str, dict[str, Any]]
Difference: TypeAlias = dict[str, dict[str, Any]]

SECTIONS = ("fleet", "workers", "partitions", "failing", "moves", "letters", "jobs", "points")
_NAMED = 20
"""Most orders of a kind that are named."""


def difference(before: Picture, after: Picture) -> Difference:
    """What makes `after` out of `before`; empty when they are the same."""
    found: Difference = {}
    for section in SECTIONS:
        old, new = before.get(section, {}), after.get(section, {})
        if old is new:
            continue
        put = {key: value for key, value in new.items() if key not in old or old[key] != value}
        gone = [key for key in old if key not in new]
        if put or gone:
            found[section] = {"set": put, "gone": gone}
    return found


class Colours:
    """A number for each worker, by which the page chooses its colour: it keeps it for as long as it is seen.

    The smallest number that is free, so that neighbours differ as long as there are colours.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def assign(self, workers: Iterable[str]) -> Mapping[str, int]:
        """Give new workers a number and take back those of workers that are gone."""
        here = dict.fromkeys(workers)
        self._numbers = {name: number for name, number in self._numbers.items() if name in here}
        taken, following = set(self._numbers.values()), 0
        for name in here:
            if name not in self._numbers:
                while following in taken:
                    following += 1
                self._numbers[name] = following
                taken.add(following)
        return self._numbers


@dataclass(slots=True)
class Reading:
    """All that was read, from which a picture is made."""

    bucket: str = ""
    servers: str = ""
    """Without credentials."""
    situation: Situation = field(default_factory=Situation)
    lags: Mapping[str, int] = field(default_factory=dict)
    moves: Mapping[int, HistoryRecord] = field(default_factory=dict)
    letters: Mapping[int, Letter] = field(default_factory=dict)
    letters_total: int = 0
    letters_stream: str = ""
    jobs: Mapping[str, Line] | None = None
    """None: this deployment has no jobs."""
    job_counts: Mapping[str, int] = field(default_factory=dict)
    queues: tuple[Queue, ...] = ()
    points: Mapping[int, tuple[float, int | None]] = field(default_factory=dict)
    link: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """What could not be read, by what it is about."""


def draw(reading: Reading, colours: Colours, now: datetime) -> Picture:
    """The picture of what was read."""
    situation, records = reading.situation, reading.situation.records
    rows = worker_rows(records, now, situation.orders)
    numbers = colours.assign(row.worker for row in rows)
    picture: Picture = {
        "fleet": _fleet(reading, rows),
        "workers": {
            row.worker: _worker(row, numbers[row.worker], reading.lags.get(row.worker) if row.report.member else None)
            for row in rows
        },
        "partitions": {
            name: shown
            for name, claim in records.claims.items()
            if (shown := _partition(claim, situation, name)) is not None
        },
        "failing": {
            p: escape_line(text) for row in rows if row.report.health for p, text in row.report.health.failing.items()
        },
        "moves": {str(seq): _move(record) for seq, record in reading.moves.items()},
        "letters": {str(seq): _letter(letter) for seq, letter in reading.letters.items()},
        "jobs": {name: _job(line) for name, line in (reading.jobs or {}).items()},
        "points": {str(at): list(values) for at, values in reading.points.items()},
    }
    return picture


def totals(reading: Reading) -> tuple[float, int | None]:
    """Messages finished a second and messages that wait (None: not known), over all live workers."""
    members, health = reading.situation.records.members, reading.situation.records.health
    rate = sum(
        said.rate
        for worker, said in health.items()
        if worker in members and said.incarnation == members[worker].incarnation
    )
    # A consumer that somebody left behind lags for ever, and nobody waits for it.
    lag = sum(lag for worker, lag in reading.lags.items() if worker in members) if reading.lags else None
    return round(rate, 1), lag


# ── sections ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _fleet(reading: Reading, rows: Iterable[WorkerRow]) -> dict[str, Any]:
    situation, report = reading.situation, reading.situation.records.report()
    orders, fleet = situation.orders, situation.fleet
    said = [row.report.health for row in rows if row.report.health and row.report.member]
    rate, lag = totals(reading)
    problems = map(escape_line, _problems(situation, report))
    return {
        "bucket": reading.bucket,
        "servers": reading.servers,
        "stream": fleet.stream if fleet else "",
        "subject": fleet.template if fleet else "",
        "rebalancer": _leader(report.leader),
        "problems": list(problems),
        "partitions": report.partitions,
        "moving": len(report.moving),
        "unowned": len(report.unowned),
        "rate": rate,
        "in_hand": sum(each.in_hand for each in said),
        "lag": lag,
        "orders": {
            "hold_moves": orders.hold_moves,
            "drained": list(orders.drained),
            "paused": len(orders.paused),
            "paused_named": list(orders.paused[:_NAMED]),
            "placed": len(orders.placed),
            "withheld": len(orders.withheld),
        },
        "letters": {"stream": reading.letters_stream, "total": reading.letters_total},
        "jobs": None if reading.jobs is None else {"counts": dict(reading.job_counts), "queues": _queues(reading)},
        "link": dict(reading.link),
        "notes": dict(reading.notes),
    }


def _leader(leader: LeaderRecord | None) -> dict[str, Any] | None:
    if leader is None:
        return None
    return {
        "worker": leader.holder,
        "term": leader.term,
        "since": _ms(leader.since),
        "state": leader.state or "elected",
        "reason": escape_line(leader.reason),
        "strategy": leader.strategy,
    }


def _worker(row: WorkerRow, colour: int, lag: int | None) -> dict[str, Any]:
    report, member, health = row.report, row.report.member, row.report.health
    shown: dict[str, Any] = {
        "state": row.shown_state,
        "colour": colour,
        "owned": report.owned,
        "leaving": report.leaving,
        "coming": report.coming,
        "drained": row.drained,
        "placed": row.placed,
        "roles": list(row.roles),
        "standby": len(row.standbys),
        "load": report.load if report.load is None else round(report.load, 3),
        "load_share": report.load_share if report.load_share is None else round(report.load_share, 3),
        "lag": lag,
        "problems": [escape_line(each) for each in row.problems],
    }
    if member:
        shown |= {
            "host": member.host,
            "pid": member.pid,
            "version": member.version,
            "identity": member.identity,
            "capacity": member.capacity,
            "guest": member.guest,
            "started": _ms(member.started_at),
        }
    if health:
        shown |= {
            "rate": round(health.rate, 1),
            "in_hand": health.in_hand,
            "p50_ms": health.p50_ms,
            "p99_ms": health.p99_ms,
            "finished": health.finished,
            "failures": health.failures,
            "dead_letters": health.dead_letters,
            "heartbeat": _ms(health.at),
        }
    return shown


def _partition(claim: Claim, situation: Situation, name: str) -> list[Any] | None:
    """None: nobody has it and nobody wants it."""
    state: str = claim.state
    owner = situation.records.members.get(claim.owner)
    if waits_for_room(claim):
        state = "unowned"
    elif claim.state == "free":
        if name not in situation.orders.paused:
            return None
        state = "paused"
    elif owner is None:
        state = "unowned"
    elif owner.state == "away":
        state = "waiting"
    since = _ms(claim.claimed_at)
    return [claim.owner, state, claim.next, claim.fence_token, since, claim.cause, claim.position, claim.reason]


def _move(record: HistoryRecord) -> list[Any]:
    why = sentence(record.cause, record.source, record.target, record.why)
    if record.step == "kept":
        why = f"a move was called off: {why}"
    return [_ms(record.at), record.partition, record.source, record.target, record.cause, why, record.took_s]


def _problems(situation: Situation, report: FleetReport) -> list[str]:
    trouble = [situation.records.trouble] if situation.records.trouble else []
    return [*(report.problems if situation.records.members else ("no worker is running",)), *trouble]


def _letter(letter: Letter) -> list[Any]:
    return [
        _ms(letter.stored_at),
        escape_line(letter.partition),
        escape_line(letter.stream),
        letter.origin_seq,
        escape_line(letter.subject),
        escape_line(letter.error),
        letter.attempts,
        escape_line(letter.worker),
    ]


def _job(line: Line) -> dict[str, Any]:
    record = line.record
    return {
        "state": record.state.value,
        "subject": escape_line(record.subject),
        "worker": record.worker,
        "silent": line.silent,
        "attempt": record.attempt,
        "percent": record.percent,
        "phrase": escape_line(record.phrase),
        "slots": record.slots,
        "started": int(record.started_s * 1000),
        "finished": int(record.finished_s * 1000),
        "error": escape_line(record.error),
    }


def _queues(reading: Reading) -> list[dict[str, Any]]:
    return [
        {"stream": queue.stream, "name": queue.durable, "pending": queue.pending, "held": queue.held}
        for queue in reading.queues
    ]


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
