"""A worker that no longer owns a partition dies before its record says so: the partition's messages stay unfinished.

It reads through one wide filter, which brings it the partition's messages still. Whoever starts next finds the record
of the run before, which speaks for the partition, and takes the ack floor of the consumer for a position: so these
messages must not be acknowledged before a record is stored that leaves them out.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.integration.conftest import Kit, eventually
from tests.integration.processes import WorkerProcess, write_app

GONE, *KEPT = OWNED = [f"k{n}" for n in range(140)]
PATIENCE_S = 20.0
SETTINGS: dict[str, Any] = {"fleet": False, "hot_mirror": "off", "worker_id": "one"}


def start(directory: Path, kit: Kit, partitions: list[str], **settings: Any) -> WorkerProcess:
    return WorkerProcess(directory, write_app(directory, kit, partitions, **SETTINGS, **settings), kit.url)


async def test_what_reaches_one_that_has_let_go_of_it_is_not_taken_for_finished(kit: Kit, tmp_path: Path) -> None:
    await kit.delete_stream()
    await kit.create_stream(storage="file")
    await kit.publish(KEPT)
    with start(tmp_path, kit, OWNED) as first:
        await eventually(lambda: len(first.handled) == len(KEPT), PATIENCE_S)
        first.signal(signal.SIGTERM)
        await eventually(lambda: first.process.poll() is not None, PATIENCE_S)

    async def is_wide() -> bool:
        return (await kit.api.consumer_info(kit.stream, kit.consumer)).subjects == (f"{kit.root}.*",)

    with start(tmp_path, kit, KEPT, progress_interval_s=600.0) as second:
        # It has all that is there, so it needs no list of filters.
        await eventually(is_wide, PATIENCE_S)
        waits = (await kit.publish([GONE], 10))[GONE]
        handled = await kit.publish(KEPT)
        await eventually(lambda: len(second.handled) == 2 * len(KEPT), PATIENCE_S)
        second.signal(signal.SIGKILL)
    assert await is_wide(), "without it, this shows nothing"
    with start(tmp_path, kit, OWNED) as third:
        await eventually(lambda: third.by_partition.get(GONE) == waits, PATIENCE_S)
        await eventually(lambda: third.by_partition[KEPT[-1]][-1] == handled[KEPT[-1]][-1], PATIENCE_S)
