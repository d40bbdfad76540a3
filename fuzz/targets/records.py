"""Records: everything that is read from a KV bucket or a stream of records, with any bytes in its place."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from fuzz.target import Target, WrongError
from parti.core.progress import Progress, decode_progress, encode_progress
from parti.errors import LedgerCorrupt
from parti.model.fleet import (
    Assignment,
    Claim,
    FleetRecord,
    Grant,
    HealthRecord,
    LeaderRecord,
    LoadRecord,
    MemberRecord,
    MirrorRecord,
    Orders,
    StandbyRecord,
    decode,
    encode,
)
from parti.model.history import HistoryRecord
from parti.model.job import JobRecord, JobState, decode_job, encode_job
from parti.model.ledger import decode_batch
from parti.model.letter_mark import LetterMark
from parti.model.migration import MigrationRecord, OldConsumer, PhaseNote
from parti.model.state import StatePointer

AT = datetime(2026, 11, 18, 12, tzinfo=UTC)
EXAMPLES: dict[type[msgspec.Struct], Any] = {
    FleetRecord: FleetRecord(prefix="parti", stream="S", template="s.{p}", stream_created="c", first_seq=1),
    MemberRecord: MemberRecord(
        token="t", incarnation=1, started_at=AT, ttl_seconds=2.0, host="h", pid=7, version="1.0"
    ),
    StandbyRecord: StandbyRecord(worker="w-0", host="h", pid=1, version="1", since=AT, ttl_seconds=2.0),
    HealthRecord: HealthRecord(
        incarnation=1,
        applied=3,
        busy=("p1",),
        state="stable",
        pulling=True,
        rate=12.5,
        failing={"p0": "KeyError: 'x'"},
        problems=("x",),
        parked=("p2",),
        p50_ms=1.5,
        at=AT,
    ),
    LoadRecord: LoadRecord(incarnation=1, loads={"p0": 0.5}, at=AT),
    LeaderRecord: LeaderRecord(
        holder="w-0", token="t", term=4, state="stable", reason="well", wanted=3, since=AT, ttl_seconds=2.0
    ),
    Claim: Claim(
        owner="w-0", incarnation=1, fence_token=3, claimed_at=AT, ttl_seconds=2.0, position=5, term=1, next="w-1"
    ),
    Orders: Orders(placed={"p0": "w-0"}, drained=("w-1",), paused=("p1",), hold_moves=True, withheld=("p2",)),
    MirrorRecord: MirrorRecord(stream_created="c", trim=5, room=4),
    Assignment: Assignment(
        version=3, term=1, incarnation=1, stream_created="c", partitions={"p0": Grant(3, 5)}, incoming={"p1": 2}
    ),
    StatePointer: StatePointer(partition="p0", fence=3, position=5, size=9, chunks=1, subject="r.p0.1-2-a", at=AT),
    HistoryRecord: HistoryRecord(partition="p0", step="given", target="w-0", position=5, fence_token=3, at=AT),
    MigrationRecord: MigrationRecord(
        stream="S",
        stream_created="c",
        retention="limits",
        template="s.{p}",
        prefix="parti",
        consumers="c-*",
        workers=2,
        shares={"w-0": ("p0",)},
        notes=(PhaseNote(action="shadow", at=AT, by="a@h", phase="shadow", text="x"),),
    ),
    OldConsumer: OldConsumer(partition="p0", subject="s.p0", consumer="c-0", config={"a": 1}, at=AT),
    LetterMark: LetterMark(state="sent", letters_created="c", message_id="m", sent_as=3, by="a@h", at=AT),
}
_KINDS: tuple[Any, ...] = (*EXAMPLES, Progress, JobRecord)
_JOB = JobRecord(stream="S", seq=1, subject="a", published_ns=1, state=JobState.RUNNING, started_s=1e9, error="x")
_PROGRESS = Progress(stream="S", stream_created="c", floor=5, covered=("s.p0",), ahead={"p0": 7}, behind={"p1": 2})


def one(data: bytes) -> None:
    """Decode as what the first byte says; what can be read can be written, and is whole."""
    number, body = (data[0] if data else 0), data[1:]
    kind = _KINDS[number % len(_KINDS)]
    if number == 0xFF:
        try:
            decode_batch(body)
        except LedgerCorrupt:
            pass
    elif kind is JobRecord:
        job = decode_job(body)
        if job is not None and decode_job(encode_job(job)) != job:
            raise WrongError("a job's record is another one after it was written")
    elif kind is Progress:
        progress = readable(decode_progress, body)
        if progress is not None and decode_progress(encode_progress(progress)) != progress:
            raise WrongError("a position's record is another one after it was written")
    else:
        record = readable(lambda value: decode(value, kind), body)
        if record is not None:
            _check(record, kind)


def readable(read: Any, body: bytes) -> Any:
    """What is read, or None where the reader refuses it as it should: with a DecodeError."""
    try:
        return read(body)
    except Exception as error:
        if not is_refusal(error):
            raise
        return None


def is_refusal(error: BaseException) -> bool:
    """Whether an error is a DecodeError: msgspec's, or one of our own."""
    return any(kind.__name__ == "DecodeError" for kind in type(error).__mro__)


def _check(record: msgspec.Struct, kind: type[msgspec.Struct]) -> None:
    again = decode(encode(record), kind)
    if again != record:
        raise WrongError(f"a {kind.__name__} is another one after it was written")
    for name in kind.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, datetime) and value.tzinfo is None:
            raise WrongError(f"{kind.__name__}.{name} has no time zone")


def seeds() -> list[bytes]:
    """One record of each kind."""
    found = [bytes((number,)) + encode(record) for number, record in enumerate(EXAMPLES.values())]
    found.append(bytes((len(EXAMPLES),)) + encode_progress(_PROGRESS))
    found.append(bytes((len(EXAMPLES) + 1,)) + encode_job(_JOB))
    return [*found, b"\xffPLG1"]


TARGET = Target("records", one, seeds)
