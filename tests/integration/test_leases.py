"""Leases on a real bucket: one holder at a time, none after its time, and nothing written under a lease that is over.

Two short leases are used throughout; what the server says of them (markers, sequences, timestamps) is the truth, and
what a holder believes is compared with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.processes import environment
from tests.integration.proxy import Proxy, proxy_to
from tests.pace import unhindered_s

from parti.config import Settings
from parti.coordination.election import Election, Office
from parti.coordination.lease import Lease, clock
from parti.core.lease import LeaseTerms
from parti.embedded import Server
from parti.errors import LeaseLost, RequestTimeout, WrongRevision
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket, Entry, Write
from parti.jetstream.watch import Watch
from parti.model.fleet import LeaderRecord, decode

TTL_S = 1.0
LATE_S = 1.5
"""How long after its time a key may still be there: the server looks for expired ones about once a second."""


class Contender:
    """Somebody who wants one key; its value tells who it is and in which epoch."""

    def __init__(self, bucket: Bucket, name: str, *, key: str = "ids.x", ttl_s: float = TTL_S) -> None:
        self.name = name
        self.epoch = 0
        self.lease = Lease(bucket, key, LeaseTerms(ttl_s, 1 / 3), lambda value: value == self.value)

    @property
    def value(self) -> bytes:
        return f"{self.name} {self.epoch}".encode()

    async def acquire(self, over: Entry | None = None) -> int:
        def value_of(epoch: int) -> bytes:
            self.epoch = epoch
            return self.value

        return await self.lease.acquire(over, value_of)

    async def renew(self, extra: Sequence[Write] = ()) -> list[int]:
        return await self.lease.renew(self.value, extra)

    async def wins(self, over: Entry | None) -> bool:
        try:
            await self.acquire(over)
        except LeaseLost:
            return False
        return True


@pytest.fixture
async def bucket(kit: Kit) -> Bucket:
    return await Bucket.open(kit.api, f"b{kit.root}", replicas=1)


async def last_seq(bucket: Bucket) -> int:
    return (await bucket.info()).last_seq


async def ended(bucket: Bucket, key: str = "ids.x") -> Entry:
    """Wait until the server has let a key expire; returns its marker."""
    found: Entry | None = None

    async def expired() -> bool:
        nonlocal found
        found = await bucket.get(key)
        return found is not None and not found.value

    await eventually(expired)
    assert found
    return found


# ── holding ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_lease_is_taken_renewed_and_given_back(bucket: Bucket) -> None:
    one, other = Contender(bucket, "one"), Contender(bucket, "other")
    await one.acquire()
    assert (one.lease.held, other.lease.held) == (True, False)
    assert not await other.wins(None), "it is held"
    await one.renew()
    assert (one.lease.held, other.lease.held) == (True, False)
    assert await one.lease.release()
    assert (one.lease.held, other.lease.held) == (False, False)
    with pytest.raises(LeaseLost):
        await one.renew()
    marker = await bucket.get("ids.x")
    assert marker
    assert not marker.value
    assert await other.wins(marker)


async def test_renewals_keep_the_time_to_live_and_the_key_ends_when_they_stop(kit: Kit, bucket: Bucket) -> None:
    gone_s: list[float] = []
    gone_unhindered_s: list[float] = []
    holder = Contender(bucket, "one")

    def on_entry(key: str, entry: Entry) -> None:
        if not entry.value:
            gone_s.append(clock())
            gone_unhindered_s.append(unhindered_s())

    await holder.acquire()
    watch = Watch(kit.connection, kit.api, bucket.name, ["ids.*"], on_entry)
    await watch.start()
    try:
        began_s = clock()
        while clock() < began_s + 1.5 * TTL_S:
            await asyncio.sleep(0.3)
            await holder.renew()
        assert not gone_s, "renewed in time, and yet it ended"
        renewed_s, renewed_unhindered_s, ends_at_s = clock(), unhindered_s(), holder.lease.ends_at_s
        await eventually(lambda: bool(gone_s))
    finally:
        await watch.stop()
    assert gone_s[0] > ends_at_s, "the holder stopped only after others could have come in"
    assert gone_s[0] - renewed_s > TTL_S - 0.05
    assert gone_unhindered_s[0] - renewed_unhindered_s < TTL_S + LATE_S


async def test_who_lost_a_lease_learns_of_it_and_never_overwrites_the_new_holder(bucket: Bucket) -> None:
    paused, new = Contender(bucket, "paused"), Contender(bucket, "new")
    await paused.acquire()
    await new.acquire(await ended(bucket))
    seq = await last_seq(bucket)
    for _ in range(2):
        with pytest.raises(LeaseLost):
            await paused.renew()
    assert not await paused.lease.release()
    assert not await paused.lease.hand_back(b"away", 5.0)
    assert await last_seq(bucket) == seq
    assert new.epoch > paused.epoch
    await new.renew()


async def test_an_expired_lease_is_lost_even_if_nobody_else_came(bucket: Bucket) -> None:
    holder = Contender(bucket, "one")
    await holder.acquire()
    await ended(bucket)
    with pytest.raises(LeaseLost, match="has ended"):
        await holder.renew([Write("extra", b"x", 0)])
    assert await bucket.get("extra") is None


async def test_a_lease_that_is_no_whole_number_of_seconds_ends_for_its_holder_first(bucket: Bucket) -> None:
    holder = Contender(bucket, "one", ttl_s=1.9)
    await holder.acquire()
    await ended(bucket)
    assert not holder.lease.held, "the key is free, and its holder would still act"


CHILD = """
import asyncio, sys
from parti.config import Settings
from parti.coordination.lease import Lease
from parti.core.lease import LeaseTerms
from parti.errors import LeaseLost
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.telemetry.logs import configure_logging

async def main():
    configure_logging("error", "console")
    connection = await Connection.open(Settings(nats=(sys.argv[1],)), name="child")
    bucket = Bucket(JetStreamApi(connection), sys.argv[2])
    lease = Lease(bucket, "ids.x", LeaseTerms(1.0, 1 / 3), lambda value: value == b"child")
    await lease.acquire(None, lambda epoch: b"child")
    print("held", flush=True)
    try:
        while True:
            await lease.renew(b"child")
            await asyncio.sleep(0.01)
    except LeaseLost:
        print("lost", lease.held, flush=True)
    await connection.close()

asyncio.run(main())
"""


async def test_a_process_stopped_past_its_time_does_not_overwrite_the_new_holder(
    kit: Kit, bucket: Bucket, tmp_path: Path
) -> None:
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    arguments = (sys.executable, str(script), kit.url, bucket.name)
    child = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE, env=environment())
    assert child.stdout
    try:
        assert await child.stdout.readline() == b"held\n"
        os.kill(child.pid, signal.SIGSTOP)
        new = Contender(bucket, "new", ttl_s=10.0)
        await new.acquire(await ended(bucket))
        seq = await last_seq(bucket)
        os.kill(child.pid, signal.SIGCONT)
        assert await child.stdout.readline() == b"lost False\n"
        assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert await last_seq(bucket) == seq
    found = await bucket.get("ids.x")
    assert found
    assert found.value == new.value


# ── answers that get lost ─────────────────────────────────────────────────────────────────────────────────────────


class Loser:
    """Loses the next message that the server sends, once armed, and the connection with it."""

    def __init__(self, proxy: Proxy) -> None:
        self.armed = False
        self._proxy = proxy

    def __call__(self, line: bytes) -> bool:
        if not self.armed or b"MSG " not in line:
            return False
        self.armed = False
        self._proxy.cut()
        return True


@pytest.fixture
async def lossy(kit: Kit, nats_server: Server, bucket: Bucket) -> AsyncIterator[tuple[Bucket, Loser]]:
    """The bucket through a connection that loses one answer when told to."""
    async with proxy_to(nats_server.port) as proxy:
        connection = await Connection.open(Settings(nats=(proxy.url,), reconnect_wait_s=0.05), name="lossy")
        loser = Loser(proxy)
        proxy.lose(loser)
        try:
            yield Bucket(JetStreamApi(connection), bucket.name), loser
        finally:
            await connection.close()


async def test_a_renewal_whose_answer_got_lost_is_adopted(bucket: Bucket, lossy: tuple[Bucket, Loser]) -> None:
    through_proxy, loser = lossy
    holder = Contender(through_proxy, "one", ttl_s=2.0)
    await holder.acquire()
    before = holder.lease.ends_at_s
    loser.armed = True
    with pytest.raises(RequestTimeout):
        await holder.renew([Write("extra", b"1", 0)])
    assert holder.lease.ends_at_s == before, "an unknown outcome must not prolong the lease"
    extra = await bucket.get("extra")
    assert extra, "the batch had arrived"
    await holder.renew([Write("extra", b"2", extra.revision)])
    assert holder.lease.held


async def test_a_lost_answer_and_a_rival_are_told_apart(bucket: Bucket, lossy: tuple[Bucket, Loser]) -> None:
    through_proxy, loser = lossy
    holder, rival = Contender(through_proxy, "one", ttl_s=2.0), Contender(bucket, "rival", ttl_s=2.0)
    await holder.acquire()
    await rival.acquire(await bucket.get("ids.x"))
    loser.armed = True
    with pytest.raises(LeaseLost, match="somebody else"):
        await holder.renew()
    assert not holder.lease.held
    await rival.renew()


async def test_an_election_won_without_an_answer_is_won_again(bucket: Bucket, lossy: tuple[Bucket, Loser]) -> None:
    through_proxy, loser = lossy
    served: list[int] = []

    async def serve(office: Office) -> None:
        served.append(office.term)
        await asyncio.Event().wait()

    election = Election(through_proxy, "rebalancer", holder="worker-0", token="t0", ttl_s=10.0, serve=serve)
    ask = through_proxy.info

    async def ask_and_arm() -> StreamInfo:
        info = await ask()
        loser.armed = not served and await bucket.get("leader.rebalancer") is None
        return info

    through_proxy.info = ask_and_arm  # type: ignore[method-assign]
    running = asyncio.create_task(election.run())
    try:
        await eventually(lambda: bool(served), 5.0)
        found = await bucket.get("leader.rebalancer")
        assert found
        record = decode(found.value, LeaderRecord)
        assert (record.token, record.term) == ("t0", served[0])
        assert found.revision > 1, "the first one was never stored: this test shows nothing"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_batch_under_a_lost_lease_has_no_effect_at_all(bucket: Bucket) -> None:
    one, other = Contender(bucket, "one"), Contender(bucket, "other")
    await one.acquire()
    known = await bucket.put("known", b"before", revision=0)
    await other.acquire(await bucket.get("ids.x"))
    seq = await last_seq(bucket)
    extra = [Write("fresh", b"x", 0), Write("known", b"after", known), Write("going", b"x", 0, 5.0)]
    with pytest.raises(LeaseLost):
        await one.renew(extra)
    assert await last_seq(bucket) == seq
    assert await bucket.get("known") == Entry(b"before", known)


async def test_a_renewal_that_was_cut_short_does_not_keep_a_lease_from_being_given_back(
    nats_server: Server, bucket: Bucket
) -> None:
    async with proxy_to(nats_server.port) as proxy:
        connection = await Connection.open(Settings(nats=(proxy.url,), ping_interval_s=60), name="slow")
        try:
            holder = Contender(Bucket(JetStreamApi(connection), bucket.name), "one", ttl_s=5.0)
            await holder.acquire()
            proxy.lose(lambda line: b"MSG " in line)
            renewing = asyncio.create_task(holder.renew())
            await eventually(lambda: proxy.lost > 0)
            renewing.cancel()
            proxy.lose(None)
            assert await holder.lease.release()
        finally:
            await connection.close()
    marker = await bucket.get("ids.x")
    assert marker
    assert not marker.value


async def test_a_wrong_revision_of_another_write_leaves_the_lease_standing(bucket: Bucket) -> None:
    holder = Contender(bucket, "one", ttl_s=5.0)
    await holder.acquire()
    revision = await bucket.put("known", b"1", revision=0)
    await bucket.put("known", b"2", revision=revision)
    seq, ends_at_s = await last_seq(bucket), holder.lease.ends_at_s
    with pytest.raises(WrongRevision):
        await holder.renew([Write("fresh", b"x", 0), Write("known", b"3", revision)])
    assert await last_seq(bucket) == seq, "nothing of the batch may be stored"
    assert holder.lease.held
    assert holder.lease.ends_at_s == ends_at_s
    assert len(await holder.renew([Write("fresh", b"x", 0)])) == 1


async def test_renewals_and_batches_of_one_holder_may_overlap(bucket: Bucket) -> None:
    holder = Contender(bucket, "one", ttl_s=5.0)
    await holder.acquire()
    written = await asyncio.gather(*(holder.renew([Write(f"k{n}", b"x", 0)]) for n in range(20)))
    assert len({revision for revisions in written for revision in revisions}) == 20
    for number, (revision,) in enumerate(written):
        assert await bucket.get(f"k{number}") == Entry(b"x", revision)


# ── many contenders, many holdings ────────────────────────────────────────────────────────────────────────────────


async def test_of_24_contenders_exactly_one_wins_each_of_20_rounds(kit: Kit, bucket: Bucket) -> None:
    connections = [await Connection.open(Settings(nats=(kit.url,)), name=f"c{n}") for n in range(4)]
    try:
        buckets = [Bucket(JetStreamApi(connection), bucket.name) for connection in connections]
        epochs: list[int] = []
        found: Entry | None = None
        for round_number in range(20):
            contenders = [Contender(buckets[n % 4], f"r{round_number}-{n}", ttl_s=30.0) for n in range(24)]
            results = await asyncio.gather(*(contender.wins(found) for contender in contenders))
            (winner,) = [c for c, won in zip(contenders, results, strict=True) if won]
            assert all(not c.lease.held for c in contenders if c is not winner)
            found = await bucket.get("ids.x")
            assert found
            assert found.value == winner.value
            epochs.append(winner.epoch)
            if round_number % 2:
                assert await winner.lease.release()
                found = await bucket.get("ids.x")
        assert epochs == sorted(set(epochs))
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))


async def test_epochs_grow_over_every_kind_of_end(kit: Kit, bucket: Bucket) -> None:
    epochs: list[int] = []

    async def hold(over: Entry | None) -> Contender:
        contender = Contender(bucket, uuid.uuid4().hex)
        epochs.append(await contender.acquire(over))
        return contender

    await hold(None)
    taken_over = await hold(await bucket.get("ids.x"))
    await taken_over.renew()
    resigned = await hold(await ended(bucket))
    assert await resigned.lease.release()
    handed_back = await hold(await bucket.get("ids.x"))
    assert await handed_back.lease.hand_back(b"away", 5.0)
    await hold(await bucket.get("ids.x"))
    purge = {"filter": f"$KV.{bucket.name}.ids.x"}
    await kit.api.call(f"STREAM.PURGE.{bucket.stream}", purge)
    assert await bucket.get("ids.x") is None
    await hold(None)
    assert epochs == sorted(set(epochs))


async def test_epochs_grow_when_the_bucket_is_made_anew(kit: Kit, bucket: Bucket) -> None:
    epochs: list[int] = []
    for _ in range(4):
        # As many writes as a busy fleet makes in a moment: they must not outrun the clock.
        await asyncio.gather(*(bucket.put(f"k{n}", b"x", revision=0) for n in range(300)))
        epochs.append(await Contender(bucket, "one").acquire())
        await kit.api.call(f"STREAM.DELETE.{bucket.stream}")
        bucket = await Bucket.open(kit.api, bucket.name, replicas=1)
    assert epochs == sorted(set(epochs))


# ── election ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Candidate:
    """An election in which one worker stands; notes when it served."""

    def __init__(self, bucket: Bucket, name: str, *, ttl_s: float = 2.0) -> None:
        self.serving: int | None = None
        self.stopped_s: list[float] = []
        self.terms: list[int] = []
        self.election = Election(bucket, "rebalancer", holder=name, token=name, ttl_s=ttl_s, serve=self._serve)
        self.task = asyncio.create_task(self.election.run())

    async def _serve(self, office: Office) -> None:
        self.serving = office.term
        self.terms.append(office.term)
        try:
            await asyncio.Event().wait()
        finally:
            self.serving = None
            self.stopped_s.append(time.time())

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_who_resigns_is_followed_at_once_and_only_one_serves(kit: Kit, bucket: Bucket) -> None:
    candidates = [Candidate(bucket, f"worker-{n}") for n in range(5)]

    def on_entry(key: str, entry: Entry) -> None:
        for candidate in candidates:
            if not entry.value:
                candidate.election.hint()

    watch = Watch(kit.connection, kit.api, bucket.name, ["leader.*"], on_entry)
    await watch.start()
    latencies_s, terms = [], []
    try:
        for left in range(len(candidates), 0, -1):
            began_s = unhindered_s()
            await eventually(lambda: any(c.serving for c in candidates), 5.0)
            latencies_s.append(unhindered_s() - began_s)
            (leader,) = [c for c in candidates if c.serving]
            terms += leader.terms
            candidates.remove(leader)
            await leader.leave()
            assert len(candidates) == left - 1
    finally:
        await watch.stop()
        await asyncio.gather(*(candidate.leave() for candidate in candidates))
    assert terms == sorted(set(terms))
    print(f"succession after a resignation: {max(latencies_s[1:]) * 1000:.0f} ms at most")
    assert max(latencies_s[1:]) < 1.0


async def test_a_leader_that_cannot_renew_stops_before_its_lease_can_have_ended(
    nats_server: Server, bucket: Bucket
) -> None:
    async with proxy_to(nats_server.port) as proxy:
        connection = await Connection.open(Settings(nats=(proxy.url,), ping_interval_s=60), name="cut off")
        candidate = Candidate(Bucket(JetStreamApi(connection), bucket.name), "worker-0")
        try:
            await eventually(lambda: candidate.serving is not None)
            proxy.lose(lambda line: True)
            await ended(bucket, "leader.rebalancer")
            ended_s = time.time()
            assert candidate.stopped_s, "it still serves although its lease is over"
            assert candidate.stopped_s[0] < ended_s
        finally:
            proxy.lose(None)
            await candidate.leave()
            await connection.close()
