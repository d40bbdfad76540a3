"""A fleet of real processes, of which some leave, are killed, or are stopped and wake up again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import (
    FLEET,
    LATE_S,
    PARTITIONS,
    TTL_S,
    Call,
    Journal,
    Traffic,
    claims_of,
    owners,
    recorded,
)
from tests.integration.processes import WorkerProcess

from parti.jetstream.kv import Bucket
from parti.model.fleet import LeaderRecord, MemberRecord, decode, key_of

APP = """
import asyncio, os, time
import parti

app = parti.App(stream={stream!r}, subject={template!r}, partitions={partitions!r}, **{settings!r})
journal = os.open({journal!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what, m):
    line = f"{{what}} {{time.time():.6f}} {{m.partition.id}} {{m.seq}} {{m.fence}} {{m.worker_id}} {{os.getpid()}}\\n"
    os.write(journal, line.encode())


@app.handler
async def handle(message):
    note("start", message)
    await asyncio.sleep(0.002)
    note("end", message)
"""


class Processes:
    """`parti worker` as often as one likes, all noting into one journal."""

    def __init__(self, kit: Kit, directory: Path, stack: contextlib.ExitStack, **settings: Any) -> None:
        self.journal = Journal(directory / "journal")
        self._kit = kit
        self._directory = directory
        self._stack = stack
        known = {**kit.settings, **FLEET, **settings}
        text = APP.format(
            stream=kit.stream,
            template=kit.template,
            partitions=PARTITIONS,
            settings={k: v for k, v in known.items() if k not in {"nats", "log_level"}},
            journal=str(directory / "journal"),
        )
        (directory / "orders.py").write_text(text)

    def start(self, *options: str) -> WorkerProcess:
        return self._stack.enter_context(WorkerProcess(self._directory, "orders:app", self._kit.url, *options))

    async def share(self, count: int) -> None:
        """Wait until so many processes own the partitions evenly and none is moving."""

        async def even() -> bool:
            claims = await claims_of(self._kit)
            sizes = Counter(owners(claims).values())
            return (
                len(claims) == len(PARTITIONS)
                and len(sizes) == count
                and max(sizes.values()) - min(sizes.values()) <= 1
                and all(claim.state == "owned" for claim in claims.values())
            )

        await eventually(even, 30.0)

    async def leader(self, processes: Sequence[WorkerProcess]) -> WorkerProcess:
        """The process that is the rebalancer."""
        bucket = Bucket(self._kit.api, f"b{self._kit.root}")
        leader = await bucket.get("leader.rebalancer")
        assert leader
        member = await bucket.get(key_of("ids", decode(leader.value, LeaderRecord).holder))
        assert member
        pid = decode(member.value, MemberRecord).pid
        (found,) = [process for process in processes if process.process.pid == pid]
        return found


def first_after(journal: Journal, partition: str, at_s: float, pid: int) -> Call | None:
    """The first handler of a partition after a moment in another process than this one."""
    found = (c for c in journal.starts if c.partition == partition and c.at_s > at_s and c.pid != pid)
    return next(found, None)


async def taken_over(journal: Journal, pid: int, at_s: float) -> dict[str, Call]:
    """Wait until others handle what a process handled just before; returns the first call of each partition."""
    theirs = {c.partition for c in journal.starts if c.pid == pid and at_s - 0.5 < c.at_s <= at_s}
    assert theirs

    def first() -> dict[str, Call]:
        others = [c for c in journal.starts if c.pid != pid and c.at_s > at_s and c.partition in theirs]
        return {call.partition: call for call in reversed(others)}

    await eventually(lambda: first().keys() == theirs)
    return first()


async def test_a_process_leaves_and_another_is_killed_under_load(kit: Kit, tmp_path: Path) -> None:
    """Each time it is the leader."""
    with contextlib.ExitStack() as stack:
        fleet = Processes(kit, tmp_path, stack)
        processes = [fleet.start() for _ in range(3)]
        async with recorded(kit) as history, Traffic(kit, 200) as traffic:
            await fleet.share(3)
            await traffic.goes_on(100)
            leaving = await fleet.leader(processes)
            left_s = time.time()
            code = await asyncio.to_thread(leaving.terminate)
            processes.remove(leaving)
            first = await taken_over(fleet.journal, leaving.process.pid, left_s)
            last = {c.partition: c.at_s for c in fleet.journal.starts if c.pid == leaving.process.pid}
            print(f"pause after SIGTERM of the leader: {max(first[p].at_s - last[p] for p in first):.2f} s")
            await fleet.share(2)
            repeated_by_leaving = len(fleet.journal.repeats)

            await traffic.goes_on(100)
            victim = await fleet.leader(processes)
            pid, killed_s = victim.process.pid, time.time()
            victim.kill()
            first = await taken_over(fleet.journal, pid, killed_s)
            took_s = max(call.at_s for call in first.values()) - killed_s
            print(f"takeover after SIGKILL of the leader: {took_s:.2f} s")
            assert took_s < TTL_S + LATE_S
            await fleet.share(1)
            await traffic.stop()
            await eventually(lambda: fleet.journal.has(traffic.sent))
        repeats = fleet.journal.repeats[repeated_by_leaving:]
        print(f"{len(repeats)} of {len(fleet.journal.starts)} repeated after the crash")
        for repeat in repeats:
            before = [c for c in fleet.journal.starts if c.seq == repeat.seq and c.pid == pid]
            assert before, f"{repeat} was not in the hands of the killed process"
            assert killed_s - before[0].at_s < FLEET["progress_interval_s"] + 1.0
        fleet.journal.nothing_is_lost(traffic.sent)
        fleet.journal.order_holds()
        fleet.journal.fences_never_go_back()
        history.is_fenced()
        assert not code
        assert not repeated_by_leaving


@pytest.mark.slow
async def test_a_leader_stopped_for_three_leases_changes_nothing_when_it_wakes(kit: Kit, tmp_path: Path) -> None:
    ttl_s = 1.0
    with contextlib.ExitStack() as stack:
        fleet = Processes(kit, tmp_path, stack, lease_ttl_s=ttl_s, leader_ttl_s=ttl_s)
        processes = [fleet.start() for _ in range(3)]
        async with recorded(kit) as history, Traffic(kit, 200) as traffic:
            await fleet.share(3)
            await traffic.goes_on()
            leader = await fleet.leader(processes)
            term, pid = history.terms()[-1], leader.process.pid
            leader.signal(signal.SIGSTOP)
            stopped_s = time.time()
            await asyncio.sleep(3 * ttl_s)
            await fleet.share(2)
            leader.signal(signal.SIGCONT)
            woken_s = time.time()
            await fleet.share(3)
            await eventually(lambda: any(c.pid == pid and c.at_s > woken_s for c in fleet.journal.starts))
            await traffic.stop()
            await eventually(lambda: fleet.journal.has(traffic.sent))
        written = [r for r in history.of("leader") if r.key == "leader.rebalancer" and r.value]
        elected_s = next(r.at_s for r in written if decode(r.value, LeaderRecord).term > term)
        print(
            f"leader stopped: another elected after {elected_s - stopped_s:.2f} s, "
            f"{len(fleet.journal.repeats)} of {len(fleet.journal.starts)} repeated"
        )
        assert elected_s < woken_s
        assert leader.process.poll() is None, "it is still there"
        history.is_fenced()
        fleet.journal.nothing_is_lost(traffic.sent)
        fleet.journal.order_holds()
        fleet.journal.fences_never_go_back()
