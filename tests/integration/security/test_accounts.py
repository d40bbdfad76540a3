"""The layout with accounts: every role can do what it is for, as configuration and as JWTs."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from tests.integration.certs import Key, credentials
from tests.integration.conftest import Record, eventually
from tests.integration.security.conftest import APART
from tests.integration.security.guarded import (
    Deployment,
    accounts_config,
    guarded_server,
    make_stream,
    open_as,
    typed_as,
)
from tests.integration.security.test_reply_bypass import OUTSIDERS, preyed, try_all
from tests.integration.security.test_role_variants import rooted
from tests.integration.security.test_roles import Strict, violations

from parti.config import Settings
from parti.console.hub import Hub
from parti.console.watcher import Watcher
from parti.coordination.control_plane import ControlPlane, read_keys
from parti.core.role_calls import MEMBERS, ROLES
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

EVERY: dict[str, Any] = {"subs": -1, "data": -1, "payload": -1}


# ── what roles are for ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", [role for role in ROLES if role != "publisher"])
async def test_doctor_finds_each_user_fit_for_its_role(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_server([APART], accounts_config(APART)) as server:
        async with preyed(server, APART):
            options = ("--stream", "ORDERS", "--role", role, "--json")
            _, out, _ = await typed_as(server.url, APART, role, capsys, "doctor", *options)
    found = [each for each in json.loads(out)["findings"] if each["area"] == "permissions"]
    assert "error" not in {each["level"] for each in found}
    able = [each["text"] for each in found if each["text"].startswith("this user can be: ")]
    assert role in able[0].partition(": ")[2].split(", ")


async def test_doctor_does_not_claim_what_a_publisher_may_not_let_it_see(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_server([APART], accounts_config(APART)) as server:
        async with preyed(server, APART):
            options = ("--stream", "ORDERS", "--role", "publisher")
            code, out, _ = await typed_as(server.url, APART, "publisher", capsys, "doctor", *options)
    assert code == 0
    assert "the role publisher was not tried" in out
    assert "this user can be" not in out


async def test_the_console_shows_all_as_an_observer_with_an_account_of_its_own() -> None:
    with guarded_server([APART], accounts_config(APART)) as server:
        async with rooted(server) as root:
            await make_stream(root, APART)
            seen = Strict()
            async with APART.app(server.url, "leader", seen.handle, ["p0", "p1"]).running():
                await root.publish("orders.in.p0", b"bad")
                await seen.reaches(1)
                connection = await open_as(server.url, APART, "observer")
                api = JetStreamApi(connection)
                plane = ControlPlane(connection, api, Bucket(api, "orders"), "")
                watcher = Watcher(plane, APART.settings(server.url, "observer"), Hub(), look_s=0.05)
                async with watcher.running():
                    await eventually(lambda: b"worker-0" in watcher.snapshot(), 10)
                    await eventually(lambda: b'"bad"' in watcher.snapshot(), 10)
                await connection.close()
        assert violations(server, ["orders-observer"]) == []


async def test_a_publisher_gets_its_acknowledgements_and_nothing_is_added_to_its_messages() -> None:
    with guarded_server([APART], accounts_config(APART)) as server:
        async with rooted(server) as root:
            await make_stream(root, APART)
            publisher = await open_as(server.url, APART, "publisher")
            api = JetStreamApi(publisher)
            assert await api.publish("orders.in.p0", b"x", headers={"Nats-Msg-Id": "one", "Own": "a"}) == 1
            assert await api.publish("orders.in.p0", b"x", headers={"Nats-Msg-Id": "one", "Own": "a"}) == 1
            with pytest.raises(PermissionDenied):
                await api.stream_info("ORDERS")
            await publisher.close()
            stored = await root.next_on_subject("ORDERS", ">", 1)
            assert stored
            assert stored.header == b"NATS/1.0\r\nNats-Msg-Id: one\r\nOwn: a\r\n\r\n"
            assert (await root.stream_info("ORDERS")).messages == 1
        assert violations(server, ["orders-publisher"]) != [], "of the question that it may not ask"


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_spark_reads_large_and_empty_messages_by_answers_of_many_messages(
    retention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded_server([APART], accounts_config(APART, "--retention", retention)) as server:
        async with rooted(server) as root:
            await make_stream(root, APART, retention=retention)
            if retention == "interest":
                keep = {"name": "keep", "durable_name": "keep", "ack_policy": "explicit"}
                await root.put_consumer("ORDERS", keep, action="create")
            for number in range(1000):
                await root.publish(f"orders.in.p{number % 7}", b"" if number % 3 else b"x" * 10_000)
            made = (await root.stream_info("ORDERS")).created
            monkeypatch.setenv("PARTI_PASSWORD", "pw-orders-spark-reader")
            target = Target.of(APART.settings(server.url, "spark-reader"))
            wanted = Wanted(stream="ORDERS", created=made, start=1, end=1001)
            sizes = await asyncio.to_thread(_sizes, target, wanted)
            assert sizes == [0 if number % 3 else 10_000 for number in range(1000)]
            assert [name for name in await root.consumer_names("ORDERS") if name != "keep"] == []
        assert violations(server, ["orders-spark-reader"]) == []


def _sizes(target: Target, wanted: Wanted) -> list[int]:
    return [len(payload) for chunk in RangeReader(target, wanted).chunks() for payload in chunk.payloads]


async def test_an_audit_reads_stream_and_records_as_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = ("--role", "observer", "--role", "spark-reader", "--user", "orders-observer")
    printed = APART.perms("--layout", "accounts", "--admin", *roles)
    config = printed.replace("user: admin, password: $ADMIN_PASSWORD", "user: root, password: root")
    with guarded_server([APART], config) as server:
        async with rooted(server) as root:
            await make_stream(root, APART)
            seen = Record()
            whole = {"user": "root", "password": "root", "inbox_prefix": "_INBOX"}
            async with APART.app(server.url, "leader", seen.handle, ["p0"], **whole).running():
                await root.publish("orders.in.p0", b"x")
                await seen.reaches(1)
        monkeypatch.setenv("PARTI_PASSWORD", "pw-orders-observer")
        target = Target.of(APART.settings(server.url, "observer"))
        records = await asyncio.to_thread(read_control, target, "orders")
        assert "p0" in records.claims
        assert violations(server, ["orders-observer"]) == []


def test_whoever_is_a_member_too_is_in_the_account_of_the_streams() -> None:
    printed = APART.perms("--layout", "accounts", "--role", "worker", "--role", "operator", "--user", "replay")
    assert "PARTI-replay" not in printed
    assert "PARTI_READ_BY" not in printed


async def test_jobs_are_listed_by_an_observer_and_cancelled_by_an_operator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with guarded_server([APART], accounts_config(APART, "--jobs", "WORK", "--jobs-subject", "work.>")) as server:
        async with rooted(server) as root:
            await make_stream(root, APART)
            started, may_end = asyncio.Event(), asyncio.Event()

            async def work(job: Job) -> None:
                started.set()
                await may_end.wait()

            login = {"nats": server.url, "log_level": "error", **APART.names, **APART.login("leader")}
            app = JobApp(stream="WORK", subject="work.>", **login)
            app.handler(work)
            async with app.running():
                publisher = await open_as(server.url, APART, "publisher")
                assert await JetStreamApi(publisher).publish("work.a", b"x") == 1
                await publisher.close()
                await asyncio.wait_for(started.wait(), 10)
                code, out, err = await typed_as(server.url, APART, "observer", capsys, "jobs", "ls", "--json")
                assert (code, err) == (0, ""), err
                (job,) = json.loads(out)["jobs"]
                code, out, err = await typed_as(
                    server.url, APART, "operator", capsys, "jobs", "cancel", str(job["id"])
                )
                assert code == 0, (out, err)
                may_end.set()
        assert violations(server, ["orders-observer", "orders-operator", "orders-publisher"]) == []


async def test_an_operator_can_erase_the_bucket_that_it_gives_orders_in() -> None:
    """SECURITY.md says so: headers cross accounts. Should this fail some day, it can be taken out there."""
    with guarded_server([APART], accounts_config(APART)) as server:
        async with preyed(server, APART) as prey:
            operator = await open_as(server.url, APART, "operator")
            await operator.request("$KV.orders.orders", b"{}", headers={"Nats-Rollup": "all"})
            await operator.close()
            assert (await prey.api.stream_info("KV_orders")).messages == 1


@pytest.mark.parametrize("rollups", [True, False])
async def test_a_publisher_can_erase_a_stream_that_allows_rollups(rollups: bool) -> None:
    """SECURITY.md says so, and that ids of other publishers can be used up."""
    with guarded_server([APART], accounts_config(APART)) as server:
        async with rooted(server) as root:
            await make_stream(root, APART, allow_rollup_hdrs=rollups)
            for number in range(5):
                await root.publish(f"orders.in.p{number}", b"x")
            publisher = await open_as(server.url, APART, "publisher")
            await publisher.request("orders.in.p0", b"", headers={"Nats-Rollup": "all"})
            await publisher.request("orders.in.p0", b"", headers={"Nats-Msg-Id": "guessed"})
            await publisher.close()
            stored = (await root.stream_info("ORDERS")).last_seq
            assert await root.publish("orders.in.p1", b"x", headers={"Nats-Msg-Id": "guessed"}) == stored
            assert (await root.stream_info("ORDERS")).messages == (2 if rollups else 6)


async def test_why_members_are_not_apart_a_pull_over_accounts_ends_at_an_empty_message() -> None:
    """The server takes a message without payload and headers for the end of an answer, and drops what follows.

    Should this fail some day, workers can have accounts of their own.
    """
    pulls, whole = "$JS.API.CONSUMER.MSG.NEXT.ORDERS.c", "{ user: root, password: root }"
    config = f"""accounts {{
        PARTI {{ jetstream: enabled, users: [ {whole} ], exports: [ {{ service: "{pulls}", response: stream }} ] }}
        APART {{ users: [ {{ user: a, password: a }} ]
                 imports: [ {{ service: {{ account: PARTI, subject: "{pulls}" }} }} ] }} }}"""
    async with Server(config=config) as server, rooted(server) as root:
        await make_stream(root, APART)
        consumer = {"name": "c", "durable_name": "c", "ack_policy": "explicit"}
        await root.put_consumer("ORDERS", consumer, action="create")
        for data in (b"one", b"", b"three"):
            await root.publish("orders.in.p0", data)
        puller = await Connection.open(Settings(nats=(server.url,), user="a", password="a"), name="test")  # type: ignore[arg-type]
        got: list[bytes] = []

        async def take(message: Msg) -> None:
            got.append(message.data)

        await puller.client.subscribe("got", cb=take)
        await puller.client.publish(pulls, b'{"batch":3,"expires":5000000000}', reply="got")
        await eventually(lambda: len(got) == 2, 10)
        await eventually(lambda: _has_delivered(root, 3), 10)
        await puller.flush()
        await puller.close()
    assert got == [b"one", b""]


async def _has_delivered(root: JetStreamApi, count: int) -> bool:
    return (await root.consumer_info("ORDERS", "c")).deliveries == count


# ── JWTs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tenancy:
    """A server's configuration in operator mode, and a credentials file and inbox prefix for each user."""

    config: str
    directory: Path
    inboxes: dict[str, str]

    def settings(self, url: str, user: str) -> Settings:
        read_by = "consumers" if user == "root" or user in MEMBERS else "requests"
        given = {"inbox_prefix": self.inboxes.get(user, "_INBOX"), "read_by": read_by}
        return Settings(nats=(url,), credentials_file=self.directory / f"{user}.creds", **given)  # type: ignore[arg-type]

    async def log_in(self, url: str, deployment: Deployment, role: str) -> Connection:
        return await Connection.open(self.settings(url, role), name=f"test-{role}")


def signed(printed: dict[str, Any], directory: Path) -> Tenancy:
    """Sign what `parti perms --style json` says, as the tools of an operator would."""
    operator, system = Key("operator"), Key("account")
    keys = {name: Key("account") for name in printed["accounts"]}
    jwts = {system.public: operator.claim(system)}
    for name, claims in printed["accounts"].items():
        imports = [{**each, "account": keys[each["account"]].public} for each in claims.get("imports", ())]
        jwts[keys[name].public] = operator.claim(keys[name], **{**claims, "imports": imports})
    users = [{"user": "root", "account": printed["account"], "claims": {}}, *printed["users"]]
    for user in users:
        key = Key("user")
        jwt = keys[user["account"]].claim(key, {}, **EVERY, **user["claims"])
        (directory / f"{user['user']}.creds").write_text(credentials(jwt, key.seed))
    preload = ", ".join(f"{public}: {jwt}" for public, jwt in jwts.items())
    config = (
        f"operator: {operator.claim(operator)}\nresolver: MEMORY\nsystem_account: {system.public}\n"
        f"resolver_preload: {{ {preload} }}\n"
    )
    inboxes = {user["user"]: user["inbox_prefix"] for user in printed["users"]}
    return Tenancy(config, directory, inboxes)


@pytest.fixture
def tenancy(tmp_path: Path) -> Tenancy:
    return signed(json.loads(APART.perms("--layout", "accounts", "--style", "json")), tmp_path)


async def test_as_jwts_each_role_can_do_what_it_is_for(tenancy: Tenancy) -> None:
    async with Server(config=tenancy.config) as server:
        root = await tenancy.log_in(server.url, APART, "root")
        await make_stream(JetStreamApi(root), APART)
        users = {role: await tenancy.log_in(server.url, APART, role) for role in OUTSIDERS}
        apis = {role: JetStreamApi(connection) for role, connection in users.items()}
        seen = Record()
        leading = {"credentials_file": str(tenancy.directory / "leader.creds"), "inbox_prefix": "_INBOX_leader"}
        app = APART.app(server.url, "leader", seen.handle, ["p0"], **leading, user=None, password=None)
        async with app.running():
            assert await apis["publisher"].publish("orders.in.p0", b"x") == 1
            await seen.reaches(1)
            for role in ("observer", "operator"):
                entries = await read_keys(users[role], apis[role], "orders", ("claims.>", "ids.>"))
                assert {"claims.p0", "ids.worker-0"} <= set(entries)
            assert await Bucket(apis["operator"], "orders").put("orders", b"{}", revision=0) > 0
            with pytest.raises(PermissionDenied):
                await Bucket(apis["observer"], "orders").put("orders", b"{}", revision=0)
            target = Target(
                servers=(server.url,),
                credentials_file=str(tenancy.directory / "spark-reader.creds"),
                inbox_prefix="_INBOX_spark-reader",
                read_by="requests",
            )
            made = (await apis["spark-reader"].stream_info("ORDERS")).created
            wanted = Wanted(stream="ORDERS", created=made, start=1, end=2)
            assert await asyncio.to_thread(_sizes, target, wanted) == [1]
        for connection in (root, *users.values()):
            await connection.close()
        assert "Violation" not in re.sub(r".*KV\.orders\.orders.*", "", server.log_path.read_text())


async def test_as_jwts_no_answer_reaches_what_its_asker_may_not_publish_to(tenancy: Tenancy) -> None:
    async with (
        Server(config=tenancy.config) as server,
        preyed(server, APART, tenancy.settings(server.url, "root")) as prey,
    ):
        tried, effects = await try_all(server, APART, OUTSIDERS, prey, tenancy.log_in)
    print(f"accounts as JWTs: {tried} combinations, {len(effects)} effects")
    assert effects == []
    assert tried > 500


def test_commands_of_nsc_make_what_the_claims_say() -> None:
    printed = json.loads(APART.perms("--layout", "accounts", "--style", "json"))
    lines = APART.perms("--layout", "accounts", "--style", "jwt").splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("nsc ")]
    made: dict[str, list[dict[str, str]]] = {}
    for command in commands:
        arguments = command[3:]
        flags = {each for each in arguments if each == "--service"}
        values = [each for each in arguments if each not in flags]
        options = dict(zip(values[::2], values[1::2], strict=True))
        made.setdefault(command[2] if command[1] == "add" else command[1], []).append(
            {**options, "type": "service" if flags else "stream"}
        )
    assert {each["--name"] for each in made["account"]} == set(printed["accounts"])
    exports = printed["accounts"]["PARTI"]["exports"]
    assert [(each["--subject"], each["type"], each.get("--response-type")) for each in made["export"]] == [
        (each["subject"], each["type"], each.get("response_type")) for each in exports
    ]
    imports = [
        (name, each["subject"], each["type"])
        for name, claims in printed["accounts"].items()
        for each in claims.get("imports", ())
    ]
    assert [(each["--account"], each["--remote-subject"], each["type"]) for each in made["import"]] == imports
    assert {each["--src-account"] for each in made["import"]} == {"$STREAMS"}
    assert {(each["--name"], each["--account"]) for each in made["user"]} == {
        (each["user"], each["account"]) for each in printed["users"]
    }
