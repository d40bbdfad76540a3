"""Messages that take the process down: found out, dead-lettered once, and nobody else suffers for them.

The handler of one message ends its whole process. A first death leaves no trace; whoever takes over notes what it is
about to start; after `crash_limit` deaths over the same note the message becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, Sent, eventually, merge
from tests.integration.fleet import FLEET, PARTITIONS, Call, Journal, claims_of
from tests.integration.processes import WorkerProcess

from parti.core.progress import decode_progress
from parti.jetstream.kv import Bucket
from parti.model.fleet import key_of

KILLED = "p3"
PATIENCE_S = 45.0
LEASE_S = 1.5
ENDS = {
    "exit": "os._exit(7)",
    "signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "segfault": "ctypes.string_at(0)",
}
APP = """
import asyncio, ctypes, os, signal, time
import parti

app = parti.App(stream={stream!r}, subject={template!r}, partitions={partitions!r}, **{settings!r})
journal = os.open({journal!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what, m):
    line = f"{{what}} {{time.time():.6f}} {{m.partition.id}} {{m.seq}} {{m.fence}} {{m.worker_id}} {{os.getpid()}}\\n"
    os.write(journal, line.encode())


def work(message):
    note("start", message)
    if message.data == b"kill":
        {end}
        time.sleep(60)


async def handle(message):
    work(message)
    await asyncio.sleep(0.002)
    note("end", message)


def handle_plainly(message):
    work(message)
    time.sleep(0.002)
    note("end", message)


app.handler({handler})
"""


class Notes(Journal):
    """A journal whose last line may be on its way."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path

    @property
    def calls(self) -> list[Call]:
        text = self._file.read_text() if self._file.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [
            Call(what, float(at), partition, int(seq), int(fence), worker, int(pid))
            for what, at, partition, seq, fence, worker, pid in map(str.split, lines)
        ]


class Killers:
    """Workers of an app that dies of certain messages."""

    def __init__(
        self,
        kit: Kit,
        directory: Path,
        stack: contextlib.ExitStack,
        *,
        end: str,
        plain: bool = False,
        **settings: Any,
    ) -> None:
        self.journal = Notes(directory / "journal")
        self.processes: list[WorkerProcess] = []
        self._kit = kit
        self._directory = directory
        self._stack = stack
        known = {**kit.settings, **FLEET, "lease_ttl_s": LEASE_S, "leader_ttl_s": LEASE_S, **settings}
        text = APP.format(
            stream=kit.stream,
            template=kit.template,
            partitions=PARTITIONS,
            settings={k: v for k, v in known.items() if k not in {"nats", "log_level"}},
            journal=str(directory / "journal"),
            end=ENDS[end],
            handler="handle_plainly" if plain else "handle",
        )
        (directory / "killers.py").write_text(text)

    def start(self, *options: str) -> WorkerProcess:
        process = WorkerProcess(self._directory, "killers:app", self._kit.url, *options)
        self.processes.append(self._stack.enter_context(process))
        return process

    async def handle_all(self, workers: int) -> None:
        """Wait until so many workers own all partitions, and handle them."""

        async def shared() -> bool:
            claims = await claims_of(self._kit)
            settled = len(claims) == len(PARTITIONS) and all(c.state == "owned" for c in claims.values())
            return settled and len({claim.owner for claim in claims.values()}) == workers

        await eventually(shared, PATIENCE_S)
        awake: set[str] = set()
        while awake != set(PARTITIONS):
            # On an interest stream a message that nobody's consumer waits for is dropped.
            probe = await self._kit.publish(set(PARTITIONS) - awake)
            with contextlib.suppress(AssertionError):
                await eventually(lambda p=probe: self.journal.has(p), 1.0)  # type: ignore[misc]
            awake = {call.partition for call in self.journal.starts}

    async def send(self) -> tuple[Sent, int]:
        """Publish to all partitions, with a killer in one of them; returns the harmless ones and the killer."""
        before = await self._kit.publish(PARTITIONS, 3)
        killer = await self._kit.api.publish(self._kit.subject(KILLED), b"kill")
        return merge(before, await self._kit.publish(PARTITIONS, 25)), killer

    async def survived(self, sent: Sent) -> None:
        """Wait until everything harmless has been handled to its end."""
        harmless = {seq for seqs in sent.values() for seq in seqs}
        await eventually(lambda: {c.seq for c in self.journal.calls if c.what == "end"} >= harmless, PATIENCE_S)

    def deaths_over(self, killer: int) -> int:
        return sum(call.seq == killer for call in self.journal.starts)


async def is_dead_lettered_once(kit: Kit, killer: int, deaths: int) -> None:
    (letter,) = await kit.dead_letters()
    headers = base64.b64decode(letter["hdrs"]).decode()
    assert f"Parti-Sequence: {killer}\r\n" in headers
    assert f"Parti-Partition: {KILLED}\r\n" in headers
    what = "1 process" if deaths == 1 else f"{deaths} processes"
    assert f"Parti-Error: {what} died while handling it\r\n" in headers
    assert base64.b64decode(letter["data"]) == b"kill"


async def positions_are_exact(kit: Kit, fleet: Killers, sent: Sent) -> None:
    """All positions are past what was handled and not past the stream; what comes next is handled once."""
    bucket = Bucket(kit.api, f"b{kit.root}")

    async def position(partition: str) -> int:
        claim = (await claims_of(kit))[partition]
        entry = await bucket.get(key_of("progress", claim.owner))
        assert entry
        return decode_progress(entry.value).position(partition, kit.subject(partition))

    async def past_everything() -> bool:
        found = await asyncio.gather(*map(position, PARTITIONS))
        last = (await kit.api.stream_info(kit.stream)).last_seq
        assert max(found) <= last + 1
        return all(at > max(sent[p]) for p, at in zip(PARTITIONS, found, strict=True))

    await eventually(past_everything)
    before = len(fleet.journal.starts)
    more = await kit.publish(PARTITIONS)
    await eventually(lambda: fleet.journal.has(more))
    assert len(fleet.journal.starts) == before + len(PARTITIONS)


def nothing_else_is_repeated_for_long(fleet: Killers, killer: int) -> None:
    """After a death only what its process had in hand, or had just finished, is handled again."""
    starts = Counter(call.seq for call in fleet.journal.starts)
    worst = {seq: count for seq, count in starts.items() if seq != killer and count > starts[killer]}
    assert not worst, f"handled more often than there were deaths: {worst}"


@pytest.mark.slow
async def test_a_supervised_process_that_dies_of_a_message_gets_over_it(kit: Kit, tmp_path: Path) -> None:
    """The next process of the slot takes the same worker id, within the lease of the one before."""
    with contextlib.ExitStack() as stack:
        fleet = Killers(kit, tmp_path, stack, end="segfault", crash_limit=1, lease_ttl_s=60.0)
        supervisor = fleet.start("--processes", "2")
        await fleet.handle_all(2)
        began_s = time.monotonic()
        sent, killer = await fleet.send()
        await fleet.survived(sent)
        print(f"restarted twice and over it after {time.monotonic() - began_s:.1f} s")
        await is_dead_lettered_once(kit, killer, 1)
        await positions_are_exact(kit, fleet, sent)
        assert fleet.deaths_over(killer) == 2
        assert await asyncio.to_thread(supervisor.terminate) == 0
        owners = {call.worker for call in fleet.journal.starts if call.seq == killer}
        assert len(owners) == 1, "the same id all along"
        fleet.journal.order_holds()
        fleet.journal.fences_never_go_back()
        nothing_else_is_repeated_for_long(fleet, killer)


async def test_a_message_that_kills_one_owner_after_the_other_is_found_out(kit: Kit, tmp_path: Path) -> None:
    """Each time somebody else takes over, with all that the dead process had; on an interest stream."""
    await kit.delete_stream()
    await kit.create_stream(retention="interest")
    with contextlib.ExitStack() as stack:
        fleet = Killers(kit, tmp_path, stack, end="signal")
        for _ in range(4):
            fleet.start()
        await fleet.handle_all(4)
        began_s = time.monotonic()
        sent, killer = await fleet.send()
        await fleet.survived(sent)
        print(f"taken over three times and over it after {time.monotonic() - began_s:.1f} s")
        await is_dead_lettered_once(kit, killer, 2)
        await positions_are_exact(kit, fleet, sent)
        assert fleet.deaths_over(killer) == 3
        dead = [process for process in fleet.processes if process.process.poll() is not None]
        assert len(dead) == 3, "nothing else has killed anybody"
        fleet.journal.order_holds()
        fleet.journal.fences_never_go_back()
        nothing_else_is_repeated_for_long(fleet, killer)


@pytest.mark.slow
async def test_a_lone_worker_that_somebody_restarts_gets_over_it_on_a_work_queue(kit: Kit, tmp_path: Path) -> None:
    """A plain handler; the id comes back by its identity, as that of a pod does."""
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    with contextlib.ExitStack() as stack:
        fleet = Killers(kit, tmp_path, stack, end="exit", plain=True, identity="pod-1", handler_threads=2)
        worker = fleet.start()
        await fleet.handle_all(1)
        sent, killer = await fleet.send()
        for deaths in range(1, 4):
            assert await asyncio.to_thread(worker.wait) == 7
            assert fleet.deaths_over(killer) == deaths
            worker = fleet.start()
        await fleet.survived(sent)
        await is_dead_lettered_once(kit, killer, 2)
        await positions_are_exact(kit, fleet, sent)
        assert fleet.deaths_over(killer) == 3

        async def empty() -> bool:
            return (await kit.api.stream_info(kit.stream)).messages == 0

        await eventually(empty)
        fleet.journal.order_holds()
        nothing_else_is_repeated_for_long(fleet, killer)


async def test_a_worker_that_is_killed_while_others_look_after_themselves_accuses_nobody(
    kit: Kit, tmp_path: Path
) -> None:
    """Kills from outside, one owner after the other, in the midst of messages that are innocent."""
    with contextlib.ExitStack() as stack:
        fleet = Killers(kit, tmp_path, stack, end="exit")
        for _ in range(3):
            fleet.start()
        await fleet.handle_all(3)
        sent = await kit.publish(PARTITIONS, 150)
        for _ in range(2):
            await eventually(lambda: bool(fleet.journal.starts))
            last = fleet.journal.starts[-1].pid
            victim = next((p for p in fleet.processes if p.process.pid == last), fleet.processes[0])
            await asyncio.to_thread(victim.kill)
            fleet.processes.remove(victim)
        await fleet.survived(sent)
        assert await kit.dead_letters() == []
        fleet.journal.order_holds()
        fleet.journal.fences_never_go_back()
