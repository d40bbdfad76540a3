"""A process that shares a worker id is cut off in the middle of its work: what it had acknowledged stays finished.

One partition's handler takes for ever, so the ack floor of the consumer stands still; the others finish what comes,
and acknowledge it. Positions are stored so seldom that none of that is in the record. Whoever takes over must find it
out, and may start again nothing but the one message whose handler was running.
"""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, Sent, eventually
from tests.integration.fleet import FLEET
from tests.integration.processes import WorkerProcess, write_app

from parti.coordination.control_plane import read_keys
from parti.coordination.records import KEYS, Records
from parti.core.progress import Progress, decode_progress
from parti.jetstream.kv import Bucket

SLOW, *QUICK = PARTITIONS = ["slow", "a", "b", "c"]
LEASE_S = 1.0
PATIENCE_S = 30.0
BODY = """while message.data == b"wait" and not os.path.exists("go"):
        await asyncio.sleep(0.01)"""
SHARED: dict[str, Any] = {
    **FLEET,
    "worker_id": "one",
    "standby": True,
    "lease_ttl_s": LEASE_S,
    "leader_ttl_s": LEASE_S,
    "progress_interval_s": 5.0,
}


class Cut:
    """A worker that is cut off, and one that stands by."""

    def __init__(self, kit: Kit, directory: Path, partitions: Sequence[str] = PARTITIONS) -> None:
        self.kit = kit
        self.partitions = partitions
        self._directory = directory
        self._target = write_app(directory, kit, partitions, body=BODY, **SHARED)

    def worker(self) -> WorkerProcess:
        return WorkerProcess(self._directory, self._target, self.kit.url)

    async def handles(self, worker: WorkerProcess) -> bool:
        """Whether it handles what is published."""
        seqs = seqs_of(await self.kit.publish(PARTITIONS))
        with contextlib.suppress(AssertionError):
            await eventually(lambda: seqs_handled(worker) >= seqs, 1.0)
        return seqs_handled(worker) >= seqs

    def let_go(self) -> None:
        """End the handler that waits."""
        (self._directory / "go").touch()

    async def record(self) -> Progress:
        entry = await Bucket(self.kit.api, f"b{self.kit.root}").get("progress.one")
        assert entry
        return decode_progress(entry.value)

    async def is_wide(self) -> bool:
        info = await self.kit.api.consumer_info(self.kit.stream, self.kit.consumer)
        return info.subjects == (f"{self.kit.root}.*",)

    async def stands_by(self) -> bool:
        found = await read_keys(self.kit.connection, self.kit.api, f"b{self.kit.root}", KEYS)
        return bool(Records.of(found).standbys)

    async def settled(self, worker: WorkerProcess) -> Sent:
        """Have something handled everywhere and stored; returns it. From then on there are five seconds."""
        first = await self.kit.publish(PARTITIONS)
        await eventually(lambda: seqs_handled(worker) >= seqs_of(first), PATIENCE_S)

        async def stored() -> bool:
            record = await self.record()
            subjects = {self.kit.subject(p) for p in self.partitions}
            return set(record.covered) == subjects and record.floor > max(map(max, first.values()))

        await eventually(stored, PATIENCE_S)
        return first

    async def work(self) -> tuple[Sent, int]:
        """Have the quick partitions acknowledge much while the slow one waits; returns theirs, and that."""
        waits = await self.kit.api.publish(self.kit.subject(SLOW), b"wait")
        sent = await self.kit.publish(QUICK, 40)

        async def acknowledged() -> bool:
            info = await self.kit.api.consumer_info(self.kit.stream, self.kit.consumer)
            return info.ack_pending == 1 and info.ack_floor < waits and info.delivered == max(map(max, sent.values()))

        await eventually(acknowledged, PATIENCE_S)
        return sent, waits


@pytest.mark.parametrize(("end", "wide"), [(signal.SIGSTOP, False), (signal.SIGKILL, False), (signal.SIGKILL, True)])
async def test_what_was_acknowledged_is_not_started_again_whatever_the_ack_floor(
    kit: Kit, tmp_path: Path, end: signal.Signals, wide: bool
) -> None:
    """`wide`: the worker has all of so many subjects that it reads through one filter for all."""
    await kit.delete_stream()
    await kit.create_stream(storage="file")
    cut = Cut(kit, tmp_path, [*PARTITIONS, *(f"q{n}" for n in range(120 if wide else 0))])
    if wide:
        await kit.publish(cut.partitions)
    with cut.worker() as first, contextlib.ExitStack() as stack:
        await eventually(lambda: cut.handles(first), PATIENCE_S)
        if wide:
            await eventually(cut.is_wide, PATIENCE_S)
        second = stack.enter_context(cut.worker())
        await eventually(cut.stands_by, PATIENCE_S)
        before = await cut.settled(first)
        sent, waits = await cut.work()
        first.signal(end)
        assert (await cut.record()).highest <= waits, "positions were stored just before: the test shows nothing"
        await eventually(lambda: second.by_partition[SLOW].count(waits) == 2, PATIENCE_S)
        cut.let_go()
        everything = seqs_of(before, sent, await kit.publish(PARTITIONS, 5)) | {waits}
        await eventually(lambda: seqs_handled(second) >= everything, PATIENCE_S)
        if end is signal.SIGSTOP:
            first.signal(signal.SIGCONT)
            # It ends the call that it was stopped in, and begins nothing.
            await eventually(lambda: second.handled.count((SLOW, waits)) == 2, PATIENCE_S)
            everything |= seqs_of(await kit.publish(PARTITIONS, 5))
            await eventually(lambda: seqs_handled(second) >= everything, PATIENCE_S)
        again = {seq: times for seq, times in Counter(seq for _, seq in second.started).items() if times > 1}
        assert again == {waits: 2}
        assert all(seqs == sorted(seqs) for seqs in second.by_partition.values())
        config = (await kit.api.consumer_info(kit.stream, kit.consumer)).config
        assert (config["ack_wait"], config["max_ack_pending"]) == (30_000_000_000, 500)


def seqs_of(*sent: Sent) -> set[int]:
    return {seq for each in sent for seqs in each.values() for seq in seqs}


def seqs_handled(worker: WorkerProcess) -> set[int]:
    return {seq for _, seq in worker.handled}
