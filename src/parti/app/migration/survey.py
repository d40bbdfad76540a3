"""Looking at a stream and its consumers, and at the fleet that is to have them; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parti.app.migration.site import state_of
from parti.app.worker import Job, check_template, check_version, find_stream
from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.orders import Situation, read_situation
from parti.coordination.sources import SourceContext, SourceReader
from parti.core.migration_plan import Naming, Plan, Surroundings, make_plan
from parti.core.retention import retention_named
from parti.errors import ConfigError, NotFound
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.migration import MigrationRecord, OldConsumer


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found."""

    stream: StreamInfo
    plan: Plan
    situation: Situation
    """Empty when there is no fleet yet."""


async def survey(
    connection: Connection, settings: Settings, job: Job, naming: Naming, *, workers: int, begun: bool = False
) -> Survey:
    """Match consumers to the app's partitions; raises `ConfigError` when there is nothing to migrate."""
    check_version(connection)
    api = JetStreamApi(connection)
    stream = await find_stream(api, job.stream)
    retention_named(stream.retention)
    check_template(job, stream)
    assert job.source
    bucket = Bucket(api, settings.bucket)
    try:
        created = (await bucket.info()).created
        situation = await read_situation(ControlPlane(connection, api, bucket, created))
    except NotFound:
        situation = Situation()
    found = await SourceReader(job.source, SourceContext(api, bucket, stream.name, job.template)).read()
    consumers = [state_of(info) for info in await api.consumers(stream.name)]
    records = situation.records
    around = Surroundings(
        retention=stream.retention,
        workers=workers,
        capacity=settings.room,
        partitions=tuple(found),
        consumers=consumers,
        claimed={p for p, c in records.claims.items() if c.state != "free" and c.owner in records.members},
        most_consumers=int((await api.stream_config(stream.name)).get("max_consumers", -1)),
        begun=begun,
    )
    return Survey(stream, make_plan(naming, around), situation)


def check_plan(plan: Plan) -> None:
    """Raise `ConfigError` when something has to be mended first."""
    if plan.blocked:
        first = plan.blocked[0]
        about = f" ({', '.join(first.about[:3])}{' …' if len(first.about) > 3 else ''})" if first.about else ""
        raise ConfigError(f"{first.text}{about}; 'parti migrate plan' shows everything")


def records_of(
    surveyed: Survey,
    settings: Settings,
    job: Job,
    naming: Naming,
    *,
    workers: int,
    by_worker: Mapping[str, Sequence[str]],
) -> tuple[MigrationRecord, list[OldConsumer]]:
    """What a plan comes to in the bucket; raises `ConfigError` when something has to be mended first."""
    plan, stream = surveyed.plan, surveyed.stream
    check_plan(plan)
    record = MigrationRecord(
        stream=stream.name,
        stream_created=stream.created,
        retention=stream.retention,
        template=job.template.text,
        prefix=settings.prefix,
        consumers=naming.text,
        workers=workers,
        shares={worker: tuple(mine) for worker, mine in by_worker.items()},
    )
    read = [
        OldConsumer(
            partition=match.partition.id,
            subject=match.partition.subject,
            consumer=match.consumer.name,
            config=dict(match.consumer.config),
            position=match.consumer.ack_floor + 1,
        )
        for match in plan.matches
    ]
    unread = [OldConsumer(partition=p.id, subject=p.subject) for p in plan.uncovered]
    return record, [*read, *unread]


def remembered(found: Iterable[OldConsumer], before: Mapping[str, OldConsumer]) -> list[OldConsumer]:
    """The records of a survey, with what an earlier one knew of consumers that are gone now.

    Otherwise their partitions would pass for ones that nobody ever read, and the fleet would begin with their oldest
    messages.
    """
    known = {p: old for p, old in before.items() if old.consumer and old.holder == "old"}
    return [known.get(old.partition, old) if not old.consumer else old for old in found]
