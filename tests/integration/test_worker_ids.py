"""Worker ids on a real bucket: each held by one process, given back to who had it, and never to two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.processes import EXIT_S, WorkerProcess, command, environment, write_app
from tests.integration.proxy import proxy_to

from parti.app.worker import Worker
from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.lease import clock
from parti.coordination.worker_ids import Profile, Seat, WorkerIds
from parti.core.fleet_view import FleetState
from parti.core.worker_ids import Applicant
from parti.embedded import Server
from parti.errors import LeaseLost, NoFreeWorkerId, RequestTimeout, WorkerIdTaken
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Write
from parti.model.fleet import Claim, MemberRecord, decode, key_of, name_of

TTL_S = 1.0
LATE_S = 1.5
PROFILE = Profile(host="here", pid=1, version="0", capacity=10, weight=1.0)
FLEET: dict[str, Any] = {
    "fleet": True,
    "worker_id": None,
    "lease_ttl_s": 2.0,
    "leader_ttl_s": 2.0,
    "cold_start_window_s": 0.1,
    "scale_window_s": 0.2,
    "min_rebalance_interval_s": 0.2,
}
PARTITIONS = [f"p{n}" for n in range(6)]


@dataclass
class Registry:
    """The ids of one bucket, as processes on one connection see them."""

    plane: ControlPlane
    max_workers: int = 30
    ttl_s: float = TTL_S

    async def take(self, token: str, *, identity: str = "", fixed: str | None = None, **more: Any) -> Seat:
        ids = WorkerIds(
            self.plane.bucket, lambda: self.plane.read("ids.>"), ttl_s=self.ttl_s, max_workers=self.max_workers
        )
        return await ids.take(Applicant(token, identity, fixed, **more), PROFILE)

    async def record(self, worker: str) -> MemberRecord | None:
        entry = await self.plane.bucket.get(key_of("ids", worker))
        return decode(entry.value, MemberRecord) if entry and entry.value else None


@pytest.fixture
async def registry(kit: Kit) -> Registry:
    return Registry(await ControlPlane.open(kit.connection, kit.api, f"b{kit.root}", replicas=1))


@asynccontextmanager
async def renewed(*seats: Seat) -> AsyncIterator[None]:
    """Live processes behind these seats."""

    async def beat() -> None:
        while True:
            await asyncio.gather(*(seat.renew() for seat in seats))
            await asyncio.sleep(TTL_S / 4)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def claims_of(kit: Kit) -> dict[str, Claim]:
    plane = await ControlPlane.open(kit.connection, kit.api, f"b{kit.root}", replicas=1)
    entries = await plane.read("claims.>")
    return {name_of(key): decode(entry.value, Claim) for key, entry in entries.items() if entry.value}


# ── which id ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_lowest_free_id_is_taken(registry: Registry) -> None:
    seats = [await registry.take(f"t{n}") for n in range(3)]
    assert [seat.worker_id for seat in seats] == ["worker-0", "worker-1", "worker-2"]
    assert await seats[1].leave()
    assert (await registry.take("t3")).worker_id == "worker-1"
    assert (await registry.take("t4", preferred="worker-7")).worker_id == "worker-7"
    assert (await registry.take("t5", preferred="worker-0")).worker_id == "worker-3"


async def test_20_at_once_get_20_ids(kit: Kit, registry: Registry) -> None:
    connections = [await Connection.open(Settings(nats=(kit.url,)), name=f"c{n}") for n in range(5)]
    try:
        bucket = registry.plane.bucket.name
        planes = [await ControlPlane.open(c, JetStreamApi(c), bucket, replicas=1) for c in connections]
        began_s = clock()
        seats = await asyncio.gather(*(Registry(planes[n % 5], ttl_s=10.0).take(f"t{n}") for n in range(20)))
        print(f"20 ids taken at once in {clock() - began_s:.2f} s")
        assert sorted(int(seat.worker_id.split("-")[1]) for seat in seats) == list(range(20))
        assert len({seat.incarnation for seat in seats}) == 20
        for seat in seats:
            found = await registry.record(seat.worker_id)
            assert found
            assert (found.token, found.incarnation) == (seat.record.token, seat.incarnation)
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))


async def test_no_id_left_is_an_error_that_says_what_to_do(registry: Registry) -> None:
    registry.max_workers = 2
    for token in ("a", "b"):
        await registry.take(token)
    with pytest.raises(NoFreeWorkerId, match=r"worker-0 to worker-1.*max_workers"):
        await registry.take("c")


async def test_an_id_taken_without_an_answer_is_ours_at_the_next_try(nats_server: Server, registry: Registry) -> None:
    async with proxy_to(nats_server.port) as proxy:
        connection = await Connection.open(Settings(nats=(proxy.url,)), name="lossy")
        try:
            plane = await ControlPlane.open(
                connection, JetStreamApi(connection), registry.plane.bucket.name, replicas=1
            )
            lossy = Registry(plane, ttl_s=10.0)

            def answer_of_the_write(line: bytes) -> bool:
                # It is the one answer that is so short: a stream and a sequence.
                if b"_INBOX" not in line or int(line.split()[-1]) > 80:
                    return False
                proxy.cut()
                return True

            proxy.lose(answer_of_the_write)
            with pytest.raises(RequestTimeout):
                await lossy.take("t0")
            proxy.lose(None)
            assert await registry.record("worker-0"), "the write had arrived"
            seat = await lossy.take("t0")
        finally:
            await connection.close()
    assert seat.worker_id == "worker-0"
    assert (await registry.take("t1")).worker_id == "worker-1"


@pytest.mark.parametrize("worker", ["worker-0", "worker-5"])
async def test_an_unreadable_record_does_not_keep_others_from_an_id(registry: Registry, worker: str) -> None:
    await registry.plane.bucket.put(key_of("ids", worker), b"not json", revision=0)
    seat = await registry.take("t0")
    assert seat.worker_id in {"worker-0", "worker-1"}


# ── who gets it back ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_id_that_waits_for_somebody_is_given_to_nobody_else(registry: Registry) -> None:
    first = await registry.take("a", identity="pod-a")
    assert await first.leave(back_within_s=10.0)
    found = await registry.record("worker-0")
    assert found
    assert found.state == "away"
    assert (await registry.take("b")).worker_id == "worker-1"
    assert (await registry.take("c", identity="pod-c")).worker_id == "worker-2"
    back = await registry.take("d", identity="pod-a")
    assert back.worker_id == "worker-0"
    assert back.incarnation > first.incarnation


async def test_an_id_does_not_wait_for_ever(registry: Registry) -> None:
    first = await registry.take("a", identity="pod-a")
    assert await first.leave(back_within_s=1.0)

    async def free() -> bool:
        return await registry.record("worker-0") is None

    await eventually(free, 1.0 + LATE_S)
    assert (await registry.take("b", identity="pod-b")).worker_id == "worker-0"


async def test_who_insists_on_an_id_gets_one_whose_holder_is_away(registry: Registry) -> None:
    first = await registry.take("a", identity="pod-a", fixed="worker-0")
    assert await first.leave(back_within_s=10.0)
    assert (await registry.take("b", fixed="worker-0")).worker_id == "worker-0"


async def test_after_a_crash_the_same_identity_waits_for_its_id(registry: Registry) -> None:
    crashed = await registry.take("a", identity="pod-a")
    began_s = clock()
    back = await registry.take("b", identity="pod-a")
    waited_s = clock() - began_s
    print(f"waited {waited_s:.2f} s for the lease of {TTL_S:g} s to end")
    assert back.worker_id == crashed.worker_id
    assert back.incarnation > crashed.incarnation
    assert TTL_S - 0.1 < waited_s < TTL_S + LATE_S
    with pytest.raises(LeaseLost):
        await crashed.renew()


async def test_after_a_crash_the_same_identity_gets_its_id_although_a_lower_one_is_free(registry: Registry) -> None:
    lower = await registry.take("z")
    crashed = await registry.take("a", identity="pod-a")
    assert await lower.leave()
    back = await registry.take("b", identity="pod-a")
    assert back.worker_id == crashed.worker_id == "worker-1"


async def test_a_live_holder_of_our_identity_is_left_alone(registry: Registry) -> None:
    live = await registry.take("a", identity="pod-a")
    async with renewed(live):
        other = await registry.take("b", identity="pod-a")
    assert other.worker_id == "worker-1"
    await live.renew()


async def test_a_supervised_restart_takes_over_at_once(registry: Registry) -> None:
    before = await registry.take("token", identity="pod-a")
    began_s = clock()
    after = await registry.take("token", identity="pod-a")
    assert clock() - began_s < TTL_S / 2
    assert after.worker_id == before.worker_id
    assert after.incarnation > before.incarnation
    with pytest.raises(LeaseLost):
        await before.renew([Write("extra", b"x", 0)])
    assert await registry.plane.bucket.get("extra") is None
    assert not await before.leave()
    await after.renew()


async def test_a_fixed_id_of_a_live_process_is_an_error_that_names_it(registry: Registry) -> None:
    live = await registry.take("a", fixed="press-4")
    async with renewed(live):
        with pytest.raises(WorkerIdTaken, match=r"'press-4' is held by process 1 on here.*--worker-id"):
            await registry.take("b", fixed="press-4")


async def test_of_two_that_insist_on_one_id_at_once_one_gets_it(registry: Registry) -> None:
    sitting: list[Seat] = []

    async def insist(token: str) -> None:
        seat = await registry.take(token, fixed="press-4")
        sitting.append(seat)
        async with renewed(seat):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(insist(token)) for token in ("a", "b")]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=TTL_S + LATE_S)
        assert len(done) == len(sitting) == 1
        assert isinstance(done.pop().exception(), WorkerIdTaken)
        found = await registry.record("press-4")
        assert found
        assert found.token == sitting[0].record.token
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ── as processes and fleets ───────────────────────────────────────────────────────────────────────────────────────


async def run_to_its_end(directory: Path, arguments: Sequence[str]) -> tuple[int | None, str]:
    """Exit code, and what was said."""
    process = await asyncio.create_subprocess_exec(
        *arguments,
        cwd=directory,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), EXIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return process.returncode, said.decode()


async def test_a_process_that_cannot_have_its_id_ends_with_2_and_one_line(kit: Kit, tmp_path: Path) -> None:
    """One process holds the id; another insists on it; a third takes any, and there is none left."""
    target = write_app(tmp_path, kit, ["p0"], **{**FLEET, "max_workers": 1})
    registry = Registry(await ControlPlane.open(kit.connection, kit.api, f"b{kit.root}", replicas=1))
    async with renewed(await registry.take("a", fixed="worker-0")):
        with WorkerProcess(tmp_path, target, kit.url, "--worker-id", "press-4") as holder:
            await kit.publish(["p0"])
            await eventually(lambda: len(holder.handled) == 1, 20.0)
            refused = await asyncio.gather(
                run_to_its_end(tmp_path, command("worker", target, "--nats", kit.url, "--worker-id", "press-4")),
                run_to_its_end(tmp_path, command("worker", target, "--nats", kit.url)),
            )
            await kit.publish(["p0"])
            await eventually(lambda: len(holder.handled) == 2)
    expected = (f"'press-4' is held by process {holder.process.pid}", "raise max_workers")
    for (code, text), what in zip(refused, expected, strict=True):
        assert code == 2
        (line,) = [line for line in text.splitlines() if what in line]
        assert line.startswith("parti: ")
        assert "Traceback" not in text


@asynccontextmanager
async def fleet_of(kit: Kit, record: Record, *identities: str, **settings: Any) -> AsyncIterator[list[Worker]]:
    """Workers with these identities that have shared the partitions among themselves."""
    handler = settings.pop("handler", record.handle)
    app = kit.app(handler, PARTITIONS, **{**FLEET, **settings})
    workers = [app.worker(identity=identity) for identity in identities]
    try:
        for worker in workers:
            await worker.start()
        await eventually(lambda: sorted(len(w.partitions) for w in workers) == shares(len(workers)))
        yield workers
    finally:
        running = [worker for worker in workers if worker.state is not FleetState.STOPPED]
        await asyncio.gather(*(worker.stop() for worker in running))


def shares(count: int) -> list[int]:
    return sorted(len(PARTITIONS) // count + (n < len(PARTITIONS) % count) for n in range(count))


async def settled(kit: Kit, count: int) -> dict[str, Claim]:
    """Wait until every partition is owned by one of so many workers and none is moving."""
    found: dict[str, Claim] = {}

    async def all_owned() -> bool:
        found.clear()
        found.update(await claims_of(kit))
        owners = {claim.owner for claim in found.values() if claim.state == "owned"}
        return (
            len(found) == len(PARTITIONS)
            and len(owners) == count
            and all(claim.state == "owned" for claim in found.values())
        )

    await eventually(all_owned)
    return found


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with handlers running"])
async def test_a_graceful_restart_with_an_identity_moves_nothing(kit: Kit, record: Record, busy: bool) -> None:
    gate, running = asyncio.Event(), asyncio.Event()

    async def handle(message: Any) -> None:
        record.note(message)
        if busy:
            running.set()
            await gate.wait()

    async with fleet_of(kit, record, "pod-a", "pod-b", rejoin_s=20.0, handler=handle) as (one, _other):
        before = await settled(kit, 2)
        if busy:
            await kit.publish(PARTITIONS)
            await running.wait()
        worker_id = one.worker_id
        stopping = asyncio.create_task(one.stop())
        if busy:
            # Long enough for the rebalancer to see that somebody is about to leave.
            await asyncio.sleep(1.0)
            gate.set()
        assert await stopping
        restarted = kit.app(handle, PARTITIONS, **{**FLEET, "rejoin_s": 20.0}).worker(identity="pod-a")
        await restarted.start()
        try:
            await asyncio.wait_for(restarted.wait_assigned(), 5)
            await eventually(lambda: len(restarted.partitions) == 3)
            after = await settled(kit, 2)
        finally:
            await restarted.stop()
    assert restarted.worker_id == worker_id
    assert {p: claim.owner for p, claim in after.items()} == {p: claim.owner for p, claim in before.items()}
    for partition, claim in after.items():
        if claim.owner == worker_id:
            assert claim.fence_token > before[partition].fence_token, "a new process needs a new fence"
            assert claim.incarnation > before[partition].incarnation
            assert claim.reason == "same id, new process", "it has been elsewhere in between"
        else:
            assert claim == before[partition], "nobody else is disturbed"


async def test_the_partitions_of_who_does_not_come_back_go_to_others(kit: Kit, record: Record) -> None:
    async with fleet_of(kit, record, "pod-a", "pod-b", rejoin_s=1.0) as (one, other):
        await settled(kit, 2)
        assert await one.stop()
        left_s = clock()
        await eventually(lambda: len(other.partitions) == len(PARTITIONS), 1.0 + LATE_S + 3.0)
        print(
            f"partitions of a worker that did not come back within 1 s were given away after {clock() - left_s:.2f} s"
        )
        assert clock() - left_s > 0.9
