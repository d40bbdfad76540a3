"""Roles of deployments with all turned on, narrowed to one worker id, as JWTs; and what roles do not prevent."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration.certs import Key, credentials
from tests.integration.conftest import Record, eventually
from tests.integration.security.guarded import (
    Deployment,
    guarded_config,
    guarded_server,
    make_stream,
    open_as,
    root_settings,
    users_block,
)
from tests.integration.security.test_roles import Strict, violations

import parti
from parti.config import Settings
from parti.console.hub import Hub
from parti.console.watcher import Watcher
from parti.coordination.control_plane import ControlPlane
from parti.core.fleet_view import FleetState
from parti.core.permissions import password_variable
from parti.embedded import Server
from parti.errors import PermissionDenied
from parti.jetstream.api import JetStreamApi
from parti.jetstream.chunks import Wanted
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.jetstream.ranges import RangeReader
from parti.jetstream.target import Target
from parti.jobs import Job, JobApp
from parti.spark.audit_control import read_control

ORDERS = Deployment("orders")


@asynccontextmanager
async def rooted(server: Server) -> AsyncIterator[JetStreamApi]:
    connection = await Connection.open(root_settings(server.url), name="root")
    try:
        yield JetStreamApi(connection)
    finally:
        await connection.close()


class Counting:
    """A handler whose state moves with its partition."""

    def __init__(self, seen: Record) -> None:
        self.seen = seen
        self.counts: dict[str, int] = {}

    def __call__(self, message: parti.Message) -> None:
        self.seen.note(message)
        self.counts[message.partition.id] += 1

    def snapshot(self, partition: parti.Partition) -> bytes:
        return b"%d" % self.counts[partition.id]

    def restore(self, partition: parti.Partition, state: Any) -> None:
        self.counts[partition.id] = int(state.read()) if state else 0


async def test_ledger_states_and_the_hot_mirror_work_under_the_roles() -> None:
    """The leader makes the mirror and the worker reads it; states move; both write the ledger. Nothing is refused."""
    options = ("--stateful",)
    given = {"ledger": "full", "hot_mirror": "on"}
    users = "".join(users_block(ORDERS.perms(*options, role=role, **given)) for role in ("worker", "leader"))
    partitions = [f"p{number}" for number in range(4)]
    with guarded_server([ORDERS], _config(users)) as server:
        async with rooted(server) as root:
            await make_stream(root, ORDERS, storage="file")
            seen, handlers = Record(), []

            def app(role: str, **settings: Any) -> parti.App:
                handlers.append(Counting(seen))
                given = {"ledger": "full", "hot_mirror": "on", **settings}
                return ORDERS.app(server.url, role, handlers[-1], partitions, **given)

            async with app("leader").running() as leader:
                for number in range(8):
                    await root.publish(f"orders.in.p{number % 4}", b"x")
                await seen.reaches(8)
                # A worker may read the mirror, and not make it.
                await eventually(lambda: _has_consumers(root, "orders-hot-ORDERS", 1), 20)
                async with app("worker", may_lead=False).running() as worker:
                    await eventually(lambda: len(worker.partitions) == len(leader.partitions) == 2, 20)
                    await eventually(lambda: _has_consumers(root, "orders-hot-ORDERS", 2), 20)
                    for number in range(8):
                        await root.publish(f"orders.in.p{number % 4}", b"x")
                    await seen.reaches(16)
                    moved = {p.id for p in worker.partitions}
                    assert {p: n for p, n in handlers[1].counts.items() if p in moved} == dict.fromkeys(moved, 4)
            assert (await root.stream_info("ORDERS-ledger")).messages > 0
        assert violations(server, ["orders-leader", "orders-worker"]) == []


async def _has_consumers(api: JetStreamApi, stream: str, count: int) -> bool:
    if stream not in await api.stream_names():
        return False
    return len(await api.consumer_names(stream)) == count


def _config(users: str) -> str:
    return f"accounts {{ PARTI {{ jetstream: enabled, users: [ {{ user: root, password: root }}\n{users} ] }} }}"


async def test_a_worker_with_an_id_of_its_own_cannot_touch_what_is_others() -> None:
    users = users_block(ORDERS.perms(role="leader")) + users_block(
        ORDERS.perms(role="worker", worker_id="one", consumer_shards="2")
    )
    partitions = [f"p{number}" for number in range(4)]
    with guarded_server([ORDERS], _config(users)) as server:
        async with rooted(server) as root:
            await make_stream(root, ORDERS)
            seen = Strict()
            own = {"worker_id": "one", "may_lead": False, "max_subjects": 1, "consumer_shards": 2}
            async with (
                ORDERS.app(server.url, "leader", seen.handle, partitions).running(),
                ORDERS.app(server.url, "worker", seen.handle, partitions, **own).running() as worker,
            ):
                await eventually(lambda: len(worker.partitions) == 2, 20)
                for number in range(8):
                    await root.publish(f"orders.in.p{number % 4}", b"x")
                await seen.reaches(8)
                assert violations(server, ["orders-leader", "orders-worker"]) == []
                await _cannot(server)


async def test_a_worker_that_stands_by_takes_over_under_its_role() -> None:
    users = "".join(users_block(ORDERS.perms(role=role)) for role in ("worker", "leader"))
    with guarded_server([ORDERS], _config(users)) as server:
        async with rooted(server) as root:
            await make_stream(root, ORDERS)
            seen = Strict()

            def shared() -> parti.App:
                given = {"worker_id": "one", "standby": True, "may_lead": False}
                return ORDERS.app(server.url, "worker", seen.handle, ["p0", "p1"], **given)

            async with ORDERS.app(server.url, "leader", seen.handle, ["p0", "p1"], capacity=0).running():
                first, second = shared().worker(), shared().worker()
                await first.start()
                await first.wait_assigned()
                await second.start()
                await eventually(lambda: second.state is FleetState.STANDBY, 20)
                await root.publish("orders.in.p0", b"x")
                await seen.reaches(1)
                await first.stop()
                await root.publish("orders.in.p0", b"x")
                await seen.reaches(2)
                assert [p.id for p in second.partitions] == ["p0", "p1"]
                await second.stop()
        assert violations(server, ["orders-leader", "orders-worker"]) == []


async def _cannot(server: Server) -> None:
    connection = await open_as(server.url, ORDERS, "worker")
    try:
        for subject in (
            "$KV.orders.ids.worker-0",
            "$KV.orders.progress.worker-0",
            "$JS.API.CONSUMER.DELETE.ORDERS.orders-worker-0",
            "$JS.API.CONSUMER.CREATE.ORDERS.orders-worker-0",
            "$JS.API.CONSUMER.MSG.NEXT.ORDERS.orders-worker-0",
            "$JS.ACK.ORDERS.orders-worker-0.1.1.1.1.0",
        ):
            with pytest.raises(PermissionDenied, match="may not publish to"):
                await connection.request(subject, b"{")
    finally:
        await connection.close()


async def test_jobs_work_under_the_roles() -> None:
    options = ("--jobs", "WORK", "--jobs-subject", "work.>")
    config = guarded_config([ORDERS], options=options, roles=("worker", "leader", "observer", "operator"))
    with guarded_server([ORDERS], config) as server:
        async with rooted(server) as root:
            await make_stream(root, ORDERS)
            done: list[int] = []

            async def work(job: Job) -> None:
                done.append(job.seq)

            # The leader makes what is missing; once it is there, a worker can do jobs too.
            for number, role in enumerate(("leader", "worker"), start=1):
                login = {"nats": server.url, "log_level": "error", **ORDERS.names, **ORDERS.login(role)}
                app = JobApp(stream="WORK", subject="work.>", **login)
                app.handler(work)
                async with app.running():
                    await root.publish("work.a", b"x")
                    await eventually(partial(_has_done, done, number), 10)
        assert violations(server, ["orders-leader", "orders-worker"]) == []


def _has_done(done: list[int], count: int) -> bool:
    return len(done) == count


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
def test_spark_reads_streams_that_delete_without_any_right_to_consumers(
    retention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = ORDERS.perms("--retention", retention, role="spark-reader")
    assert "CONSUMER" not in printed
    with guarded_server([ORDERS], _config(users_block(printed))) as server:
        monkeypatch.setenv("PARTI_PASSWORD", "root")
        made = _fill(Target(servers=(server.url,), user="root", password_env="PARTI_PASSWORD"), retention)
        monkeypatch.setenv("PARTI_PASSWORD", "pw-orders-spark-reader")
        target = Target.of(ORDERS.settings(server.url, "spark-reader"))
        wanted = Wanted(stream="ORDERS", created=made, start=1, end=51)
        assert sum(len(chunk) for chunk in RangeReader(target, wanted).chunks()) == 50


def test_a_reader_that_lacks_direct_gets_is_told_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list for limits retention does not do for a work queue, whose reader publishes without waiting."""
    with guarded_server([ORDERS], _config(users_block(ORDERS.perms(role="spark-reader")))) as server:
        monkeypatch.setenv("PARTI_PASSWORD", "root")
        made = _fill(Target(servers=(server.url,), user="root", password_env="PARTI_PASSWORD"), "workqueue")
        monkeypatch.setenv("PARTI_PASSWORD", "pw-orders-spark-reader")
        target = Target.of(ORDERS.settings(server.url, "spark-reader"))
        wanted = Wanted(stream="ORDERS", created=made, start=1, end=51)
        with pytest.raises(PermissionDenied, match=r"may not publish to '\$JS.API.DIRECT.GET.ORDERS'"):
            list(RangeReader(target, wanted).chunks())


async def test_an_audit_reads_stream_and_records_as_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = ORDERS.perms("--role", "spark-reader", role="observer")
    leader = ORDERS.perms(role="leader")
    with guarded_server([ORDERS], _config(users_block(printed) + users_block(leader))) as server:
        async with rooted(server) as root:
            await make_stream(root, ORDERS)
            seen = Record()
            async with ORDERS.app(server.url, "leader", seen.handle, ["p0"]).running():
                await root.publish("orders.in.p0", b"x")
                await seen.reaches(1)
        monkeypatch.setenv("PARTI_PASSWORD", "pw-orders-observer")
        target = Target.of(ORDERS.settings(server.url, "observer"))
        records = await asyncio.to_thread(read_control, target, "orders")
        assert "p0" in records.claims


async def test_the_console_reads_all_that_it_shows_as_an_observer() -> None:
    users = users_block(ORDERS.perms(role="observer")) + users_block(ORDERS.perms(role="leader"))
    with guarded_server([ORDERS], _config(users)) as server:
        async with rooted(server) as root:
            await make_stream(root, ORDERS)
            seen = Strict()
            async with ORDERS.app(server.url, "leader", seen.handle, ["p0", "p1"]).running():
                await root.publish("orders.in.p0", b"bad")
                await seen.reaches(1)
                connection = await open_as(server.url, ORDERS, "observer")
                api = JetStreamApi(connection)
                plane = ControlPlane(connection, api, Bucket(api, "orders"), "")
                watcher = Watcher(plane, ORDERS.settings(server.url, "observer"), Hub(), look_s=0.05)
                async with watcher.running():
                    await eventually(lambda: b"worker-0" in watcher.snapshot(), 10)
                    await eventually(lambda: b'"bad"' in watcher.snapshot(), 10)  # the reason of the dead letter
                await connection.close()
        assert violations(server, ["orders-observer"]) == []


def _fill(target: Target, retention: str) -> str:
    from parti.jetstream.blocking import BlockingClient  # noqa: PLC0415

    with BlockingClient.open(target, name="test") as client:
        config = {"name": "ORDERS", "subjects": ["orders.in.>"], "retention": retention, "allow_direct": True}
        made = client.api("STREAM.CREATE.ORDERS", config)
        if retention == "interest":
            keep = {"durable_name": "keep", "name": "keep", "ack_policy": "explicit"}
            client.api("CONSUMER.CREATE.ORDERS.keep", {"stream_name": "ORDERS", "config": keep})
        for number in range(50):
            client.request("orders.in.a", b"%d" % number)
        return str(made["created"])


# ── JWTs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_claims_are_what_a_server_with_jwts_enforces(tmp_path: Path) -> None:
    claims = json.loads(ORDERS.perms("--style", "json", role="worker"))["users"][0]
    operator, account, system = Key("operator"), Key("account"), Key("account")
    root, user = Key("user"), Key("user")
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    account_jwt = operator.claim(account, limits={**limits, "wildcards": True, **storage})
    config = (
        f"operator: {operator.claim(operator)}\nresolver: MEMORY\n"
        f"system_account: {system.public}\n"
        f"resolver_preload: {{ {account.public}: {account_jwt}, {system.public}: {operator.claim(system)} }}\n"
    )
    every: dict[str, Any] = {"subs": -1, "data": -1, "payload": -1}
    for name, key, granted in (("root", root, {}), ("worker", user, claims["claims"])):
        text = credentials(account.claim(key, {}, **every, **granted), key.seed)
        (tmp_path / f"{name}.creds").write_text(text)
    async with Server(config=config) as server:
        owner = await _with_creds(server, tmp_path / "root.creds", "_INBOX")
        await make_stream(JetStreamApi(owner), ORDERS)
        worker = await _with_creds(server, tmp_path / "worker.creds", claims["inbox_prefix"])
        assert (await JetStreamApi(worker).stream_info("ORDERS")).name == "ORDERS"
        with pytest.raises(PermissionDenied, match=r"may not publish to '\$KV.orders.claims.p0'"):
            await worker.request("$KV.orders.claims.p0", b"x")
        await owner.close()
        await worker.close()
        shared = await _with_creds(server, tmp_path / "worker.creds", "_INBOX")
        with pytest.raises(PermissionDenied, match="may not subscribe to"):
            await JetStreamApi(shared).account_info()
        await shared.close()


async def _with_creds(server: Server, path: Path, inbox_prefix: str) -> Connection:
    settings = Settings(nats=(server.url,), credentials_file=path, inbox_prefix=inbox_prefix)
    return await Connection.open(settings, name="test")


def test_commands_of_nsc_grant_what_the_claims_say() -> None:
    claims = json.loads(ORDERS.perms("--style", "json"))["users"]
    commands = [shlex.split(line) for line in ORDERS.perms("--style", "jwt").splitlines() if line[0] != "#"]
    assert len(commands) == len(claims)
    for command, user in zip(commands, claims, strict=True):
        options = dict(zip(command[3::2], command[4::2], strict=True))
        assert options["--name"] == user["user"]
        assert options["--account"] == "PARTI"
        assert options["--allow-pub"].split(",") == user["claims"]["pub"]["allow"] == list(user["publish"])
        assert options["--allow-sub"].split(",") == user["claims"]["sub"]["allow"] == list(user["subscribe"])
        assert ("--allow-pub-response" in options) == ("resp" in user["claims"])


# ── what roles do not prevent ─────────────────────────────────────────────────────────────────────────────────────


async def test_what_subjects_cannot_forbid() -> None:
    """SECURITY.md says these things are possible. Should one of them fail some day, it can be taken out there."""
    with guarded_server([ORDERS], guarded_config([ORDERS])) as server:
        async with rooted(server) as root:
            await make_stream(root, ORDERS)
            await root.ensure_stream({"name": "SECRET", "subjects": ["secret.>"]})
            await root.publish("secret.a", b"x")
            bucket = await Bucket.open(root, "orders", replicas=1)
            for key in ("claims.p0", "claims.p1"):
                await bucket.put(key, b"x", revision=0)
            # Whoever may write one key of a bucket can erase the others with it.
            worker = await open_as(server.url, ORDERS, "worker")
            await worker.request("$KV.orders.health.worker-9", b"x", headers={"Nats-Rollup": "all"})
            await worker.close()
            assert (await root.stream_info("KV_orders")).messages == 1
            # Whoever may make one stream can make it a copy of any other of the account.
            leader = await open_as(server.url, ORDERS, "leader")
            copy = {"name": "orders-hot-ORDERS", "storage": "memory", "mirror": {"name": "SECRET"}}
            await JetStreamApi(leader).call("STREAM.CREATE.orders-hot-ORDERS", copy)
            await leader.close()
            await eventually(lambda: _holds_one(root, "orders-hot-ORDERS"), 10)
            # Its configuration can also name where the server publishes what is stored: any call, any key.
            forged = {"src": "orders-history.*", "dest": "$JS.API.STREAM.DELETE.{{wildcard(1)}}"}
            leader = await open_as(server.url, ORDERS, "leader")
            made = {"name": "orders-history", "subjects": ["orders-history.>"], "republish": forged}
            await JetStreamApi(leader).call("STREAM.CREATE.orders-history", made)
            await JetStreamApi(leader).publish("orders-history.SECRET", b"")
            await leader.close()
            await eventually(lambda: _is_gone(root, "SECRET"), 10)
            # Whoever may make consumers of a stream can change and delete those of others.
            own = {"name": "orders-worker-0", "durable_name": "orders-worker-0", "ack_policy": "explicit"}
            await root.put_consumer("ORDERS", own, action="create")
            spark = await open_as(server.url, ORDERS, "spark-reader")
            await JetStreamApi(spark).delete_consumer("ORDERS", "orders-worker-0")
            await spark.close()
            assert await root.consumer_names("ORDERS") == []


async def _is_gone(api: JetStreamApi, stream: str) -> bool:
    return stream not in await api.stream_names()


async def _holds_one(api: JetStreamApi, stream: str) -> bool:
    return (await api.stream_info(stream)).messages == 1


def test_without_creation_a_leader_can_copy_no_stream() -> None:
    text = ORDERS.perms("--no-create", role="leader", hot_mirror="off")
    assert "STREAM.CREATE" not in text
    assert password_variable("orders-leader") in text
