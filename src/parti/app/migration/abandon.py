"""The end where it stands: the fleet may have what is withheld, and old consumers are left as they are.

    looked at, and confirmed where in doubt ──> positions and holders stored ──> withheld no longer ──> noted

Done again, it looks again and goes on. No consumer is touched but the shadows, so there still is a way back.
"""

from __future__ import annotations

from datetime import UTC, datetime

from parti.app.migration.shadow import remove_shadows
from parti.app.migration.site import Site, for_each
from parti.app.migration.switch import without
from parti.core.abandonment import Abandonment, Around, Verdict, judge
from parti.errors import NotFound


async def foresee_abandonment(site: Site) -> Abandonment:
    """Judge what is withheld, and what old consumers have by the records; nothing is changed."""
    record = site.desk.migration
    try:
        stream = await site.api.stream_info(site.stream)
    except NotFound:
        stream = None
    around = Around(
        retention=stream.retention if stream else record.retention,
        same_stream=stream is not None and stream.created == record.stream_created,
        returning=record.doing == "rollback",
        at=datetime.now(UTC),
    )
    orders, _ = await site.desk.orders()
    kept = [p for p, old in site.desk.old.items() if old.holder == "old"]

    async def look(partition: str) -> Verdict:
        old = site.desk.old.get(partition)
        return judge(partition, old, await site.state(old) if old and stream else None, around)

    return Abandonment(tuple(await for_each(list(dict.fromkeys((*orders.withheld, *kept))), look)))


async def abandon(site: Site, found: Abandonment) -> None:
    """Let the fleet have it; whoever calls has checked it."""
    try:
        await remove_shadows(site)
    except NotFound:
        pass  # with the stream
    # Before anything is lifted: from then on a worker may begin.
    await site.desk.save(old=[v.old for v in found.verdicts if v.old], positions=found.positions)
    await site.desk.change_orders(lambda orders: without(orders, [v.partition for v in found.verdicts]))
