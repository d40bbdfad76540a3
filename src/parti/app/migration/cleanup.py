"""The end: old consumers whose partitions the fleet has are deleted."""

from __future__ import annotations

import msgspec

from parti.app.migration.shadow import remove_shadows
from parti.app.migration.site import Site, for_each
from parti.core.migration import is_reset
from parti.core.retention import INTEREST
from parti.errors import ConfigError
from parti.model.migration import OldConsumer

_AT_ONCE = 200


async def check_clean_up(site: Site) -> None:
    """Raise `ConfigError` when a partition would be left to nobody."""
    await site.check_stream()
    olds = list(site.desk.old.values())
    if behind := [old.partition for old in olds if old.holder != "fleet"]:
        raise ConfigError(f"{len(behind):,} partitions are not switched yet, {behind[0]} first; switch them first")
    if unowned := site.eye.unowned(site.desk.old):
        raise ConfigError(
            f"{len(unowned):,} partitions have no owner in the fleet, {unowned[0]} first; look at 'parti status'"
        )


async def clean_up(site: Site) -> int:
    """Delete them; returns how many."""
    olds = list(site.desk.old.values())
    last = (await site.api.stream_info(site.stream)).last_seq

    async def remove(old: OldConsumer) -> None:
        if site.desk.migration.retention == INTEREST.name:
            # The server looks for what nobody wants when a consumer moves, not when it goes.
            state = await site.state(old)
            if state and is_reset(state.config):
                await site.api.reset_consumer(site.stream, old.consumer, last + 1)
        await site.delete(old)

    await remove_shadows(site)
    there = [old for old in olds if old.consumer and not old.removed]
    for begin in range(0, len(there), _AT_ONCE):
        batch = there[begin : begin + _AT_ONCE]
        await for_each(batch, remove)
        await site.desk.save(old=[msgspec.structs.replace(old, removed=True) for old in batch])
        site.told("deleting old consumers", begin + len(batch), len(there))
    return len(there)
