"""What an audit reads from a server: positions first, then the end of the stream, the ledger last.

In this order nothing can look lost that is not: a worker moves a position only when the rows of everything below it
are durable in the ledger, so a ledger that is read after the positions has them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyspark.sql.functions as sf
from pyspark import StorageLevel

from parti.errors import ConfigError, StreamNotFound
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target
from parti.model.ledger import sample_limit
from parti.model.partition import Template
from parti.model.subjects import covers, has_wildcard
from parti.spark.audit import TROUBLES, Keep
from parti.spark.audit_control import ControlRecords, read_control, subjects_of
from parti.spark.audit_state import Chain, Mark
from parti.spark.audit_verdicts import microseconds
from parti.spark.keys import with_keys
from parti.spark.ledger import BATCH_COLUMNS, ledger_batches, ledger_processes, ledger_rows
from parti.spark.options import Offset, target_options
from parti.spark.planning import at_time, bounds, resolve

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be audited."""

    target: Target
    stream: str
    ledger_stream: str
    bucket: str | None
    """Whose positions count; None: everything stored must be finished."""
    template: str | None = None
    """How partitions follow from subjects; None: as the fleet says."""
    start: Offset | None = None
    """First message that the ledger must speak for; None: see `Material.since_seq`."""
    sample: int = 1
    """The ledger has one in so many messages."""
    unstored_s: float = 30.0
    settle_s: float = 300.0
    """How long after its start a message may come into the ledger; incremental audits compare so far back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What was read, as `parti.spark.audit.audit` takes it; `mark` and `keep` are for the next audit."""

    stored: DataFrame
    ledger: DataFrame
    messages: DataFrame
    """The ledger stream as it is; cached, and to be unpersisted."""
    batches: DataFrame
    positions: DataFrame | None
    troubles: DataFrame
    chains: Mapping[str, Chain]
    first_us: int | None
    last_us: int | None
    """When the first handler started and the last one finished."""
    since_seq: int
    """The first message that was stored after the ledger was made, unless another start was asked for."""
    end_seq: int
    mark: Mark
    keep: Keep


@dataclass(frozen=True, slots=True)
class _Place:
    """The streams at one moment."""

    created: str
    start: int
    since: int
    end: int
    ledger_created: str
    ledger_start: int
    ledger_end: int
    subjects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before Spark is needed: that everything is there, and where it ends."""

    question: Question
    before: Mark | None
    control: ControlRecords
    template: str
    place: _Place


def prepare(question: Question, before: Mark | None = None) -> Prepared:
    """Look at bucket, stream and ledger as they are now; with `before` only what has come since is to be read.

    Raises ConfigError when one of them is missing, and what the connection raises.
    """
    control = read_control(question.target, question.bucket) if question.bucket else ControlRecords()
    template = question.template or control.template(question.stream)
    if template is None:
        raise ConfigError(
            f"no fleet in bucket {question.bucket!r} works on stream {question.stream!r}, so its partitions are "
            f"unknown; give the subject template, such as --template 'dc.{{tool}}.{{chamber}}.done'"
        )
    control = control.fitting(Template(template))  # both are checked here, before anything is started
    listed = any(has_wildcard(name) for name in control.claims) or not control.claims
    return Prepared(question, before, control, template, _look(question, before, subjects=listed))


def read(spark: SparkSession, prepared: Prepared) -> Material:
    """Everything that the audit takes."""
    question, before, control, place = prepared.question, prepared.before, prepared.control, prepared.place
    shape = Template(prepared.template)
    wild = [name for name in control.claims if has_wildcard(name)]
    positions = _positions(spark, question, control, shape, place)
    stored = _partitioned(spark, _stored(spark, question, place), shape, wild, place.subjects)
    messages = _messages(spark, question, place).persist(StorageLevel.MEMORY_AND_DISK)
    batches = ledger_batches(messages).where(
        sf.col("damage").isNotNull()
        | ((sf.col("stream") == question.stream) & (sf.col("stream_created") == place.created))
    )
    batches = batches.persist(StorageLevel.MEMORY_AND_DISK)
    chains, first_us = _chains(batches, before)
    last_us = max((chain.last_us for chain in chains.values() if chain.last_us is not None), default=None)
    return Material(
        stored=stored,
        ledger=ledger_rows(messages, stream=question.stream, stream_created=place.created),
        messages=messages,
        batches=_after(spark, batches, before),
        positions=positions,
        troubles=_troubles(spark, chains, control),
        chains=chains,
        first_us=first_us,
        last_us=last_us,
        since_seq=place.since,
        end_seq=place.end,
        mark=Mark(
            stream=question.stream,
            created=place.created,
            ledger_stream=question.ledger_stream,
            ledger_created=place.ledger_created,
            next_seq=place.end,
            next_ledger_seq=place.ledger_end,
            chains=chains,
        ),
        keep=_keep(spark, question, chains, last_us, place.end),
    )


def _look(question: Question, before: Mark | None, *, subjects: bool) -> _Place:
    with BlockingClient.open(question.target, name="parti-audit") as client:
        info = client.stream_info(question.stream)
        names = subjects_of(client, question.stream) if subjects else []
        first, last = bounds(info)
        try:
            ledger = client.stream_info(question.ledger_stream)
        except StreamNotFound:
            raise StreamNotFound(
                f"stream {question.stream!r} has no ledger: there is no stream {question.ledger_stream!r}; run its "
                f"workers with ledger=full, or name the ledger with --ledger-stream"
            ) from None
        ledger_first, ledger_last = bounds(ledger)
        start, since, ledger_start = first, 0, ledger_first
        if before is not None:
            before.check(question.stream, info["created"], question.ledger_stream, ledger["created"])
            start, ledger_start = max(first, before.next_seq), max(ledger_first, before.next_ledger_seq)
        elif question.start is None:
            since = at_time(client, question.stream, first, last, datetime.fromisoformat(ledger["created"]))
        else:
            start = max(first, resolve(client, question.stream, info, question.start))
    return _Place(
        created=info["created"],
        start=start,
        since=since,
        end=last + 1,
        ledger_created=ledger["created"],
        ledger_start=ledger_start,
        ledger_end=ledger_last + 1,
        subjects=tuple(names),
    )


def _read(spark: SparkSession, question: Question, stream: str, start: int, end: int, **more: str) -> DataFrame:
    # What is gone is no error here: the audit tells from numbers what the ledger lacks, and judges what there is.
    options = {
        **target_options(question.target),
        "stream": stream,
        "startingOffsets": str(max(1, start)),
        "endingOffsets": str(max(1, start, end)),
        "failOnDataLoss": "false",
        **more,
    }
    return spark.read.format("jetstream").options(**options).load()


def _stored(spark: SparkSession, question: Question, place: _Place) -> DataFrame:
    stored = _read(spark, question, question.stream, place.start, place.end, includePayload="false")
    if question.sample > 1:
        # The arithmetic of `parti.model.ledger.sample_hash`.
        spread = sf.expr("seq % 2147483648 * 2654435761 % 4294967296")
        stored = stored.where(spread < sample_limit(question.sample))
    return stored.select("subject", "seq", "timestamp")


def _messages(spark: SparkSession, question: Question, place: _Place) -> DataFrame:
    found = _read(spark, question, question.ledger_stream, place.ledger_start, place.ledger_end)
    return found.select("seq", "timestamp", "payload")


def _partitioned(
    spark: SparkSession, stored: DataFrame, shape: Template, wild: list[str], subjects: tuple[str, ...]
) -> DataFrame:
    """Messages with their partition; those of no partition are none of the fleet's."""
    found = with_keys(stored, shape.text, partition="partition")
    if wild:
        patterns = {name: shape.partition(name).subject for name in wild}
        rows = [(s, name) for s in subjects for name, pattern in patterns.items() if covers(pattern, s)]
        wide = spark.createDataFrame(rows, "subject string, wide string")
        found = found.join(sf.broadcast(wide), "subject", "left")
        found = found.withColumn("partition", sf.coalesce("wide", "partition"))
    return found.where("partition IS NOT NULL").select("partition", "seq", "timestamp")


def _positions(
    spark: SparkSession, question: Question, control: ControlRecords, shape: Template, place: _Place
) -> DataFrame | None:
    if question.bucket is None:
        return None
    # Without claims a worker was on its own, and its record speaks for subjects.
    found = [shape.parse_any(s) for s in place.subjects if covers(shape.pattern, s)]
    partitions = shape.partitions(control.claims) if control.claims else found
    positions = control.positions(question.stream, place.created, partitions)
    return spark.createDataFrame(list(positions.items()), "partition string, position bigint")


# ── the chains of the ledger ──────────────────────────────────────────────────────────────────────────────────────


def _chains(batches: DataFrame, before: Mark | None) -> tuple[dict[str, Chain], int | None]:
    """Every process that the ledger knows, with what earlier audits knew of it; and the first start of all."""
    chains = dict(before.chains) if before else {}
    first: list[int] = []
    for row in ledger_processes(batches).collect():
        known = chains.get(row["process"])
        last_us = _us(row["last_at"])
        if row["first_at"] is not None:
            first.append(_us(row["first_at"]) or 0)
        chains[row["process"]] = Chain(
            worker=row["worker"],
            last_number=row["last_number"],
            closed=row["closed"] or bool(known and known.closed),
            last_us=max((us for us in (last_us, known.last_us if known else None) if us is not None), default=None),
            ledger_seq=known.ledger_seq if known else row["ledger_seq"],
        )
    return chains, min(first, default=None)


def _us(moment: Any) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1_000_000)


def _after(spark: SparkSession, batches: DataFrame, before: Mark | None) -> DataFrame:
    """The batches, with the last one of each chain that was seen before: a hole may lie just behind it."""
    if before is None or not before.chains:
        return batches
    none = None
    seen = [
        (before.stream, before.created, c.worker, process, c.last_number, c.closed, 0, none, none, c.ledger_seq, none)
        for process, c in before.chains.items()
    ]
    return batches.unionByName(spark.createDataFrame(seen, BATCH_COLUMNS))


def _troubles(spark: SparkSession, chains: Mapping[str, Chain], control: ControlRecords) -> DataFrame:
    """Who crashed: chains that were not closed, but for the newest one of each worker that is there."""
    newest: dict[str, str] = {}
    for process, chain in sorted(chains.items(), key=lambda item: item[1].ledger_seq):
        newest[chain.worker] = process
    alive = {process for worker, process in newest.items() if worker in control.alive}
    rows = [
        (process, chain.last_us, None)
        for process, chain in chains.items()
        if not chain.closed and process not in alive and chain.last_us is not None
    ]
    return spark.createDataFrame(rows, TROUBLES)


def _keep(
    spark: SparkSession, question: Question, chains: Mapping[str, Chain], last_us: int | None, end_seq: int
) -> Keep:
    late_us = microseconds(question.unstored_s)
    rows = [
        (process, chain.last_us - late_us)
        for process, chain in chains.items()
        if not chain.closed and chain.last_us is not None
    ]
    return Keep(
        from_us=(last_us or 0) - microseconds(question.settle_s),
        from_seq=end_seq,
        processes=spark.createDataFrame(rows, "process string, from_us bigint"),
    )
