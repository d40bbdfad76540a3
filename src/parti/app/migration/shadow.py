"""Shadow consumers: the consumers that a fleet of so many workers would have, which nobody handles anything from.

They share the partitions as the app's strategy does, carry the same filters as workers' consumers, and are read only
to be counted. A stream that deletes what is acknowledged, or what nobody wants, can have none: they would be refused,
or hold on to its messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from parti.app.migration.site import Site, for_each
from parti.core.consumer_config import ConsumerTuning, build_config, fleet_metadata
from parti.core.retention import retention_named
from parti.errors import NotFound
from parti.strategies import natural_order
from parti.strategies.interface import Slot, Strategy

_KEEP_S = 7 * 86_400.0
"""A shadow whose migration is forgotten is removed by the server after so long."""


def shadow_prefix(prefix: str) -> str:
    """How names of shadow consumers begin; never as names of workers' consumers do."""
    return f"shadow-{prefix}-"


def has_shadows(retention: str) -> bool:
    """Whether a stream can have shadow consumers."""
    return retention_named(retention).keeps


def share(partitions: Sequence[str], workers: int, capacity: int, strategy: Strategy) -> dict[str, list[str]]:
    """The partitions of each worker, as a fleet of that size would have them."""
    slots = [Slot(f"worker-{n}", capacity) for n in range(workers)]
    shares: dict[str, list[str]] = defaultdict(list)
    for partition, worker in strategy.assign(partitions, slots, {}).items():
        shares[worker].append(partition)
    return {worker: natural_order(mine) for worker, mine in shares.items()}


async def make_shadows(site: Site, shares: Mapping[str, Sequence[str]]) -> int:
    """Make the shadow consumers of these shares, and no others; returns how many there are."""
    record = site.desk.migration
    if not has_shadows(record.retention):
        return 0
    await remove_shadows(site)
    tuning = ConsumerTuning(30.0, 1, 16, _KEEP_S, acks=False)
    mark = fleet_metadata(record.prefix, site.plane.bucket.name)

    async def make(worker: str) -> None:
        subjects = [site.desk.old[p].subject for p in shares[worker]]
        config = build_config(f"{shadow_prefix(record.prefix)}{worker}", subjects, tuning, metadata=mark)
        config |= {"mem_storage": True, "num_replicas": 1}
        await site.api.put_consumer(record.stream, config, action="create")

    await for_each([worker for worker, mine in shares.items() if mine], make)
    return sum(1 for mine in shares.values() if mine)


async def shadow_names(site: Site) -> list[str]:
    """The shadow consumers that are there."""
    record = site.desk.migration
    names = await site.api.consumer_names(record.stream)
    return [name for name in names if name.startswith(shadow_prefix(record.prefix))]


async def remove_shadows(site: Site) -> int:
    """Delete all shadow consumers; returns how many there were."""

    async def remove(name: str) -> None:
        try:
            await site.api.delete_consumer(site.stream, name)
        except NotFound:
            pass

    names = await shadow_names(site)
    await for_each(names, remove)
    return len(names)
