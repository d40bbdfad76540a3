"""Answers of JetStream go where the asker says. No role can aim them at what it may not publish to itself.

Every call that a role is allowed is sent with every dangerous subject as the place for its answer. With one account,
the layout for those who trust each other, that deletes streams and overwrites records; with accounts nothing happens.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from nats.aio.msg import Msg
from tests.integration.conftest import eventually
from tests.integration.security.guarded import (
    Deployment,
    accounts_config,
    guarded_config,
    guarded_server,
    joined,
    make_stream,
    open_as,
    passwords,
    root_settings,
)

from parti.cli.perms import names_of
from parti.config import Settings
from parti.core.permissions import UserPermissions, permissions_of
from parti.core.role_calls import MEMBERS, ROLES, Call, Names, Role
from parti.embedded import Cluster, Server
from parti.errors import NoResponders, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.jetstream.requested import read_on
from parti.model.subjects import covers

OURS, APART = Deployment("orders"), Deployment("orders", apart=True)
THEIRS = Deployment("shop", account="SHOP", apart=True)
OUTSIDERS: tuple[Role, ...] = tuple(role for role in ROLES if role not in MEMBERS)
LogIn = Callable[[str, Deployment, str], Awaitable[Connection]]
NEVER = {"Nats-Expected-Last-Sequence": str(2**53 - 1)}
"""A publish that is answered and changes nothing."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One call with one place for its answer."""

    role: Role
    call: str
    target: str


class Prey:
    """A deployment without processes, whose state nobody but an attacker changes."""

    def __init__(self, deployment: Deployment, root: Connection, replicas: int) -> None:
        self.deployment = deployment
        self.replicas = replicas
        self.root = root
        self.api = JetStreamApi(root)
        self.delivered = ""
        """The acknowledgement subject of a message that waits for it."""

    async def build(self) -> None:
        """Make everything that a fleet has, anew."""
        name, api = self.deployment.name, self.api
        for stream in await api.stream_names():
            await api.call(f"STREAM.DELETE.{stream}")
        await make_stream(api, self.deployment, num_replicas=self.replicas)
        for stream in (f"{name}-dlq", f"{name}-history", f"{name}-dlq-replays"):
            config = {
                "name": stream,
                "subjects": [f"{stream}.>"],
                "allow_direct": True,
                "num_replicas": self.replicas,
            }
            await api.ensure_stream(config)
            await heard(partial(api.publish, f"{stream}.{self.deployment.stream}.x", b""))
        await Bucket.open(api, name, replicas=self.replicas)
        for key in ("orders", "fleet", "ids.worker-0", "progress.worker-0", "claims.p0", "leader.rebalancer"):
            # Whatever its revision: in one account, a late answer to an earlier attack may have written it already.
            await heard(partial(api.publish, f"$KV.{name}.{key}", b"{}"))
        await heard(partial(api.publish, f"{name}.in.p0", b"x"))
        worker = f"{name}-worker-0"
        consumer = {"name": worker, "durable_name": worker, "ack_policy": "explicit", "ack_wait": 600 * 10**9}
        await api.put_consumer(self.deployment.stream, consumer, action="create")
        self.delivered = await self._deliver(worker)

    async def _deliver(self, consumer: str) -> str:
        answers: list[Msg] = []

        async def take(message: Msg) -> None:
            answers.append(message)

        client = self.root.client
        subscription = await client.subscribe("delivered", cb=take)

        async def is_delivered() -> bool:
            answers.clear()
            pull = f"$JS.API.CONSUMER.MSG.NEXT.{self.deployment.stream}.{consumer}"
            await client.publish(pull, b'{"no_wait":true}', reply="delivered")
            await eventually(lambda: bool(answers), 10)
            return bool(answers[0].reply)  # none: not every server of a cluster knows of the consumer yet

        await eventually(is_delivered, 10)
        await subscription.unsubscribe()
        return answers[0].reply

    async def state(self) -> dict[str, Any]:
        """All that an answer at a wrong place could change."""
        streams = (await self.api.call("STREAM.LIST")).get("streams") or []
        state = {each["config"]["name"]: (each["created"], each["config"], each["state"]) for each in streams}
        for _, _, each in state.values():
            each.pop("consumer_count", None)
        consumers = {}
        if self.deployment.stream in state:
            for info in await self.api.consumers(self.deployment.stream):
                consumers[info.name] = (info.config, info.ack_floor, info.delivered, info.ack_pending)
        return {"streams": state, "consumers": consumers}

    @property
    def targets(self) -> tuple[str, ...]:
        """Subjects that an answer must not reach."""
        name, stream, api = self.deployment.name, self.deployment.stream, "$JS.API"
        return (
            f"{api}.STREAM.DELETE.{stream}",
            f"{api}.STREAM.DELETE.KV_{name}",
            f"{api}.STREAM.PURGE.{stream}",
            f"{api}.STREAM.PURGE.KV_{name}",
            f"{api}.CONSUMER.DELETE.{stream}.{name}-worker-0",
            f"{api}.STREAM.DELETE.{name}-dlq",
            f"$KV.{name}.orders",
            f"$KV.{name}.ids.worker-0",
            f"$KV.{name}.progress.worker-0",
            f"$KV.{name}.claims.p0",
            f"$KV.{name}.leader.rebalancer",
            self.delivered,
            f"{name}.in.p0",
            f"{name}-dlq.{stream}.x",
            f"{name}-history.p0",
        )


async def heard(publish: Callable[[], Awaitable[int]]) -> None:
    """Publish to a stream that was just made: it takes a moment until every server of a cluster knows of it."""

    async def done() -> bool:
        try:
            await publish()
        except NoResponders:  # it had no effect
            return False
        return True

    await eventually(done, 10)


def user_of(deployment: Deployment, role: Role, url: str) -> UserPermissions:
    names: Names = names_of(deployment.settings(url, role), deployment.stream, subjects=(f"{deployment.name}.in.>",))
    user = deployment.user(role)
    return permissions_of([role], names, user=user, inbox_prefix=f"_INBOX_{user}")


def bodies(call: Call, deployment: Deployment) -> list[tuple[str, bytes, dict[str, str]]]:
    """Requests of a call that have no effect of their own, and are answered in as many ways as there are."""
    subject, consumer = call.probe, f"{deployment.name}-worker-0"
    if ".DIRECT.GET." in subject:
        return [(subject, b'{"seq":99999}', {}), (subject, b'{"seq":1}', {}), (subject, b'{"seq":1,"batch":5}', {})]
    if ".CONSUMER.MSG.NEXT." in subject or ".CONSUMER.INFO." in subject:
        known = f"{subject.rpartition('.')[0]}.{consumer}"
        return [(known, b'{"no_wait":true}' if "NEXT" in subject else b"", {})]
    if ".STREAM.MSG.GET." in subject:
        return [(subject, b'{"seq":1}', {}), (subject, b"{", {})]
    if subject.startswith("$JS.API."):
        return [(subject, b"{" if call.kind == "broken" else b"", {})]
    return [(subject, b"x", NEVER)]


async def attack(
    connection: Connection,
    user: UserPermissions,
    role: Role,
    prey: Prey,
    targets: Sequence[str],
    *,
    each: bool = False,
) -> tuple[int, list[Tried]]:
    """Send every call with every target as its reply; returns how many were sent, and which had an effect.

    `each`: wait for the effect of each, to say which one it was; without, it may show with a later one.
    """
    count, effects = 0, []
    before = await prey.state()
    for call in user.publish:
        for subject, body, headers in bodies(call, prey.deployment):
            for target in targets:
                if any(covers(allowed, target) for allowed in user.publish_subjects):
                    continue  # it may do that itself
                count += 1
                await connection.client.publish(subject, body, reply=target, headers=headers or None)
                await connection.flush()
                if each:
                    await _is_answered(connection, prey, (subject, body, headers), target)
                if await prey.state() != before:
                    effects.append(Tried(role, subject, target))
                    await prey.build()
                    before = await prey.state()
    return count, effects


async def _is_answered(
    connection: Connection, prey: Prey, request: tuple[str, bytes, dict[str, str]], target: str
) -> None:
    """Wait until the server has done what it makes of the answer; it has only read the request when it flushes.

    A stream, and the API, answer in the order of their requests, and calls of the API are done as they are answered.
    What a stream is to store waits in its queue; a publish that is refused has waited behind it.
    """
    subject, body, headers = request
    with suppress(PartiError):  # a refusal is an answer; and the answer before may have deleted who would give it
        await connection.request(subject, body, headers=headers or None, timeout_s=1.0)
    if not target.startswith("$JS."):
        with suppress(PartiError):
            await prey.root.request(target, b"", headers=NEVER)


@asynccontextmanager
async def preyed(
    server: Server, deployment: Deployment, settings: Settings | None = None, *, replicas: int = 1
) -> AsyncIterator[Prey]:
    root = await Connection.open(settings or root_settings(server.url, deployment.root), name="root")
    try:
        prey = Prey(deployment, root, replicas)
        await prey.build()
        yield prey
    finally:
        await root.close()


async def try_all(
    server: Server,
    ours: Deployment,
    roles: Sequence[Role],
    prey: Prey,
    log_in: LogIn = open_as,
    *,
    each: bool = False,
) -> tuple[int, list[Tried]]:
    tried, effects = 0, []
    for role in roles:
        connection = await log_in(server.url, ours, role)
        try:
            count, found = await attack(
                connection, user_of(ours, role, server.url), role, prey, prey.targets, each=each
            )
        finally:
            await connection.close()
        assert count > 0, role
        tried += count
        effects += found
    return tried, effects


@pytest.mark.timeout(180)  # 500 times all is deleted, and made anew
async def test_with_one_account_answers_go_wherever_somebody_wants_them(
    record_property: Callable[[str, object], None],
) -> None:
    """That is what makes the next test able to fail, and what `parti perms` says of this layout."""
    with guarded_server([OURS], guarded_config([OURS])) as server:
        async with preyed(server, OURS) as prey:
            tried, effects = await try_all(server, OURS, OUTSIDERS, prey, each=True)
    record_property("combinations", tried)
    record_property("effects", len(effects))
    print(f"one account: {tried} combinations, {len(effects)} effects")
    stream, bucket = "$JS.API.STREAM.DELETE.ORDERS", "$JS.API.STREAM.DELETE.KV_orders"
    assert {
        Tried("observer", "$JS.API.DIRECT.GET.ORDERS", bucket),
        Tried("observer", "$JS.API.DIRECT.GET.ORDERS", stream),
        Tried("spark-reader", "$JS.API.CONSUMER.MSG.NEXT.ORDERS.orders-worker-0", stream),
        Tried("publisher", "orders.in.parti-doctor", "$KV.orders.orders"),
        Tried("publisher", "orders.in.parti-doctor", "$KV.orders.ids.worker-0"),
    } <= set(effects)
    assert {each.role for each in effects} == set(OUTSIDERS)


async def test_with_accounts_no_answer_reaches_what_its_asker_may_not_publish_to(
    record_property: Callable[[str, object], None],
) -> None:
    """All roles but the fleet's own members, every call that they are allowed, every target: no effect."""
    with guarded_server([APART], accounts_config(APART)) as server:
        async with preyed(server, APART) as prey:
            built = await prey.state()
            tried, effects = await try_all(server, APART, OUTSIDERS, prey)
            assert await prey.state() == built
    record_property("combinations", tried)
    print(f"accounts: {tried} combinations, {len(effects)} effects")
    assert effects == []
    assert tried > 500


async def test_with_accounts_a_fleet_reaches_nothing_of_its_neighbour(
    record_property: Callable[[str, object], None],
) -> None:
    """All roles, members too, against another fleet of the same server that has an account of its own."""
    config = joined(accounts_config(APART), accounts_config(THEIRS))
    with guarded_server([APART, THEIRS], config) as server:
        async with preyed(server, APART) as ours, preyed(server, THEIRS) as theirs:
            built = await theirs.state(), await ours.state()
            tried, effects = await try_all(server, APART, ROLES, theirs)
            assert (await theirs.state(), await ours.state()) == built
    record_property("combinations", tried)
    print(f"neighbour: {tried} combinations, {len(effects)} effects")
    assert effects == []
    assert tried > 1000


async def test_in_a_cluster_it_is_the_same_from_every_server(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Answers come back over routes: to who asked, and to nobody else."""
    for variable, password in passwords([APART]).items():
        monkeypatch.setenv(variable, password)
    async with (
        Cluster(config=accounts_config(APART)) as cluster,
        preyed(cluster.servers[0], APART, replicas=3) as prey,
    ):
        tried, effects = 0, list[Tried]()
        for server, roles in zip(cluster.servers, (OUTSIDERS[:1], OUTSIDERS[1:2], OUTSIDERS[2:]), strict=True):
            connection = await open_as(server.url, APART, "observer")
            api = JetStreamApi(connection)
            assert [each.subject async for each in read_on(api, "orders-dlq")] == ["orders-dlq.ORDERS.x"]
            await connection.close()
            count, found = await try_all(server, APART, roles, prey)
            tried, effects = tried + count, effects + found
    record_property("combinations", tried)
    print(f"cluster: {tried} combinations, {len(effects)} effects")
    assert effects == []


async def test_members_are_trusted_with_their_own_account() -> None:
    """SECURITY.md says so. Should this fail some day, it can be taken out there."""
    with guarded_server([APART], accounts_config(APART)) as server:
        async with preyed(server, APART) as prey:
            connection = await open_as(server.url, APART, "worker")
            user = user_of(APART, "worker", server.url)
            _, effects = await attack(connection, user, "worker", prey, prey.targets[:1], each=True)
            await connection.close()
    assert Tried("worker", "$JS.API.DIRECT.GET.ORDERS", "$JS.API.STREAM.DELETE.ORDERS") in effects


@pytest.mark.parametrize("form", ["", "_.hash."])
async def test_nobody_can_have_an_answer_acknowledge_a_message(form: str) -> None:
    """The server refuses such replies itself, in all layouts: the only ones that it would not send back."""
    with guarded_server([APART], accounts_config(APART)) as server:
        async with preyed(server, APART) as prey:
            connection = await open_as(server.url, APART, "observer")
            target = prey.delivered.replace("$JS.ACK.", f"$JS.ACK.{form}")
            await connection.client.publish("$JS.API.DIRECT.GET.ORDERS", b'{"seq":99999}', reply=target)
            await connection.flush()
            await connection.close()
            (info,) = await prey.api.consumers("ORDERS")
            assert info.ack_pending == 1
        log = server.log_path.read_text()
        assert f'Publish Violation - Reply "{target}"' in log, json.dumps(log[-2000:])
