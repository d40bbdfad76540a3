"""Each role can do what it is for, and nothing that others are for: every cell of the tables, tried on a server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.integration.conftest import Record, eventually
from tests.integration.processes import EXIT_S, command, environment, whole_lines
from tests.integration.security.conftest import ORDERS, Type
from tests.integration.security.guarded import Deployment, make_stream, open_as, root_settings
from tests.integration.security.migrating import WHAT, make_old_consumers, write_app

import parti
from parti.core.fleet_view import FleetState
from parti.core.permissions import password_variable, permissions_of
from parti.core.priority import Policy, PriorityGroup
from parti.core.role_calls import MEMBERS, ROLES, Role
from parti.core.role_matrix import APART_COMMANDS, COMMANDS, EXAMPLE, Action, actions, may
from parti.embedded import Server
from parti.errors import PartiError, PermissionDenied
from parti.jetstream.api import JetStreamApi
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.chunks import Wanted
from parti.jetstream.connection import Connection
from parti.jetstream.pull_client import PullClient
from parti.jetstream.ranges import RangeReader
from parti.jetstream.target import Target
from parti.model.fleet import encode
from parti.model.migration import MigrationRecord

PARTITIONS = [f"p{number}" for number in range(4)]
SHARED = {
    "name": "shared",
    "durable_name": "shared",
    "ack_policy": "explicit",
    **PriorityGroup("g", Policy.PINNED, timeout_s=90.0).fields(),
}
"""A consumer with a client that can be unpinned."""
NEVER = {"Nats-Expected-Last-Sequence": str(2**53 - 1)}


def violations(server: Server, users: Sequence[str], since: int = 0) -> list[str]:
    """What the server refused these users, by its own log."""
    lines = server.log_path.read_text()[since:].splitlines()
    return [line for line in lines if "Violation" in line and any(f"user:{user}" in line for user in users)]


async def send(api: JetStreamApi, count: int, *, data: bytes = b"x") -> None:
    await asyncio.gather(*(api.publish(f"orders.in.p{n % len(PARTITIONS)}", data) for n in range(count)))


class Strict(Record):
    """Rejects what it is told to reject."""

    async def handle(self, message: parti.Message) -> None:
        self.note(message)
        if message.data == b"bad":
            raise parti.Reject("bad")


# ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_a_worker_and_a_leader_share_partitions_and_move_them_under_their_roles(
    retention: str, guarded: Server, root: JetStreamApi
) -> None:
    await root.call(f"STREAM.DELETE.{ORDERS.stream}")
    await make_stream(root, ORDERS, retention=retention)
    seen, logged = Strict(), len(guarded.log_path.read_text())
    leading = ORDERS.app(guarded.url, "leader", seen.handle, PARTITIONS)
    async with leading.running() as leader:
        await leader.wait_assigned()
        await send(root, 8)
        await send(root, 4, data=b"bad")
        await seen.reaches(12)
        following = ORDERS.app(guarded.url, "worker", seen.handle, PARTITIONS, may_lead=False)
        async with following.running() as worker:
            await eventually(lambda: len(worker.partitions) == len(leader.partitions) == 2, 20)
            assert leader.manager
            assert leader.manager.leads
            assert worker.manager
            assert not worker.manager.leads
            await send(root, 8)
            await seen.reaches(20)
        await eventually(lambda: len(leader.partitions) == 4, 20)
        await send(root, 4)
        await seen.reaches(24)
        assert not leader.health.reasons
    assert sorted(call.seq for call in seen.calls) == list(range(1, 25))
    assert not violations(guarded, ["orders-leader", "orders-worker"], logged)


async def test_a_worker_that_may_not_lead_waits_for_one_that_may(guarded: Server, root: JetStreamApi) -> None:
    seen = Strict()
    async with ORDERS.app(guarded.url, "leader", seen.handle, PARTITIONS).running() as leader:
        await leader.wait_assigned()
    app = ORDERS.app(guarded.url, "worker", seen.handle, PARTITIONS, may_lead=False, worker_id="follower")
    worker = app.worker()
    await worker.start()
    try:
        await send(root, 4)
        await eventually(lambda: worker.state is FleetState.ELECTION, 20)
        assert not seen.calls
        async with ORDERS.app(guarded.url, "leader", seen.handle, PARTITIONS).running():
            await seen.reaches(4)
            await eventually(lambda: len(worker.partitions) == 2, 20)
    finally:
        await worker.stop()


async def test_a_user_who_may_not_be_elected_works_all_the_same(
    guarded: Server, root: JetStreamApi, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Strict()
    async with (
        ORDERS.app(guarded.url, "leader", seen.handle, PARTITIONS).running() as leader,
        ORDERS.app(guarded.url, "worker", seen.handle, PARTITIONS).running() as worker,
    ):
        await eventually(lambda: len(worker.partitions) == 2, 20)
        await leader.stop()
        await eventually(lambda: "set may_lead=false" in caplog.text, 20)
        assert worker.manager
        assert not worker.manager.leads


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_cell_of_the_table_of_commands(
    guarded: Server, deployment: Deployment, root: JetStreamApi, typed: Type
) -> None:
    """Those that are refused say in one line which permission is missing, at once, and leave all as it was."""
    commands = APART_COMMANDS if deployment.apart else COMMANDS
    tried: dict[tuple[str, Role], bool] = {}
    await _try_workers(guarded, deployment, tried)
    seen = Strict()
    leading = ORDERS.app(guarded.url, "leader", seen.handle, PARTITIONS)
    following = ORDERS.app(guarded.url, "worker", seen.handle, PARTITIONS, may_lead=False)
    await root.put_consumer(ORDERS.stream, SHARED, action="create")
    async with leading.running() as leader:
        await leader.wait_assigned()
        async with following.running() as worker:
            await eventually(lambda: len(worker.partitions) == len(leader.partitions) == 2, 20)
            await send(root, 4, data=b"bad")
            await seen.reaches(4)
            await eventually(lambda: _letters(root, 4), 10)
            await root.publish("$KV.orders.migration", encode(await _migration(root)))
            for text in (text for text in commands if text.startswith("parti ") and "," not in text):
                # Whoever may is last, so that there is something to refuse to the others.
                for role in sorted(ROLES, key=lambda role: role in commands[text]):
                    before = await _orders(root)
                    code, out, err = await typed(role, *text.split()[1:])
                    tried[text, role] = code == 0
                    if code:
                        assert (code, out) == (2, ""), (text, role, out, err)
                        assert len(err.splitlines()) == 1, err
                        assert "permission denied: this account may not" in err, (text, role, err)
                        assert await _orders(root) == before
    await root.delete_consumer(ORDERS.stream, "shared")
    await make_old_consumers(root)
    for role in sorted(ROLES, key=lambda role: role == "migrator"):
        tried["parti migrate, planned and run, there and back", role] = await _migrates(role, typed)
    for role in ROLES:
        tried["reading a range for Spark", role] = await asyncio.to_thread(_reads_range, guarded, deployment, role)
    wanted = {(text, role): role in roles for text, roles in commands.items() for role in ROLES}
    assert tried == wanted, {cell: tried.get(cell) for cell in wanted if tried.get(cell) != wanted[cell]}


async def test_an_operator_without_a_place_for_marks_is_told_what_an_admin_has_to_run(
    root: JetStreamApi, typed: Type
) -> None:
    await root.ensure_stream({"name": "orders-dlq", "subjects": ["orders-dlq.>"]})
    await root.publish("orders-dlq.ORDERS.orders.in.p0", b"bad", headers={"Parti-Stream": "ORDERS"})
    code, out, err = await typed("operator", "dlq", "replay", "--all", "--yes")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "stream 'orders-dlq-replays', which keeps what was sent back, is missing" in err
    wanted = "nats stream add orders-dlq-replays --subjects 'orders-dlq-replays.*' --max-msgs-per-subject 1"
    assert wanted in err
    assert await _letters(root, 1)


async def test_a_worker_makes_the_marks_of_a_dead_letter_stream_that_was_there_before(
    guarded: Server, root: JetStreamApi
) -> None:
    await root.ensure_stream({"name": "orders-dlq", "subjects": ["orders-dlq.>"]})
    async with ORDERS.app(guarded.url, "leader", Record().handle, PARTITIONS).running() as leader:
        await leader.wait_assigned()
        assert (await root.stream_info("orders-dlq-replays")).subjects == ("orders-dlq-replays.*",)
        assert not leader.health.reasons


def _start_watch(said: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    with said.open("wb") as out:
        return subprocess.Popen(command("priority", "watch", "--json"), stdout=out, env=environment(**variables))


async def test_an_observer_watches_the_stream_of_the_fleet_when_it_names_none(
    guarded: Server, deployment: Deployment, root: JetStreamApi, tmp_path: Path
) -> None:
    await root.put_consumer(ORDERS.stream, SHARED, action="create")
    said = tmp_path / "said"
    pulling = await Connection.open(root_settings(guarded.url), name="pulling")
    async with ORDERS.app(guarded.url, "leader", Record().handle, PARTITIONS).running() as leader:
        await leader.wait_assigned()
        watch = _start_watch(said, deployment.variables(guarded.url, "observer"))
        try:
            await eventually(lambda: len(whole_lines(said)) == 1, 20)
            await root.publish("orders.in.p0", b"x")
            async with PullClient(pulling, stream="ORDERS", consumer="shared", group="g") as client:
                (await anext(client)).ack()  # and it gives the pin back when it leaves
            await eventually(lambda: len(whole_lines(said)) == 3, 10)
            watch.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(watch.wait, EXIT_S) == 0
        finally:
            watch.kill()
            watch.wait(EXIT_S)
            await pulling.close()
    events = [json.loads(line) for line in whole_lines(said)]
    assert [each["event"] for each in events] == ["now", "pinned", "unpinned"]
    assert {(each["stream"], each["consumer"]) for each in events} == {("ORDERS", "shared")}


async def _migration(api: JetStreamApi) -> MigrationRecord:
    """The record of one that was rolled back."""
    created = (await api.stream_info(ORDERS.stream)).created
    about = {"template": "orders.in.{p}", "prefix": "orders", "consumers": "old-{partition}", "workers": 1}
    return MigrationRecord(stream=ORDERS.stream, stream_created=created, retention="limits", **about)  # type: ignore[arg-type]


async def _migrates(role: Role, typed: Type) -> bool:
    write_app(Path.cwd())
    code, _, err = await typed(role, "migrate", "run", *WHAT, "--phase", "shadow")
    if code:
        assert (code, len(err.splitlines()), "permission denied" in err) == (2, 1, True), err
        return False
    code, _, err = await typed(role, "migrate", "run", "--rollback")
    assert code == 0, err
    return True


async def _letters(api: JetStreamApi, count: int) -> bool:
    return (await api.stream_info("orders-dlq")).messages == count


async def _orders(api: JetStreamApi) -> tuple[int, int]:
    """How often orders were given, and how many dead letters there are."""
    info = await api.call("STREAM.INFO.KV_orders", {"subjects_filter": "$KV.orders.orders"})
    letters = await api.stream_info("orders-dlq")
    found = await api.call("STREAM.MSG.GET.KV_orders", {"seq": 1, "next_by_subj": "$KV.orders.>"})
    assert found
    newest = 0
    if info["state"].get("subjects"):
        answer = await api.call("STREAM.MSG.GET.KV_orders", {"last_by_subj": "$KV.orders.orders"})
        newest = answer["message"]["seq"]
    return newest, letters.messages


async def _try_workers(guarded: Server, deployment: Deployment, tried: dict[tuple[str, Role], bool]) -> None:
    """Start a worker as each role; the leader is the first that may, and founds the fleet."""
    alone, beside = "parti worker, the first of its fleet", "parti worker, with may_lead=false beside a leader"
    for role in ROLES:
        tried[alone, role] = await _starts(guarded, deployment, role, may_lead=True)
    for role in ROLES:
        tried[beside, role] = await _starts(guarded, deployment, role, may_lead=False)


async def _starts(guarded: Server, deployment: Deployment, role: Role, *, may_lead: bool) -> bool:
    given = {"may_lead": may_lead, "cold_start_window_s": 0.0}
    app = deployment.app(guarded.url, role, Record().handle, PARTITIONS, **given)
    worker = app.worker()
    try:
        await worker.start()
        if may_lead:
            await worker.wait_assigned()
    except PermissionDenied:
        return False
    await worker.stop()
    return True


def _reads_range(guarded: Server, deployment: Deployment, role: Role) -> bool:
    settings = deployment.settings(guarded.url, role)
    with pytest.MonkeyPatch.context() as patched:
        assert settings.password
        patched.setenv("PARTI_PASSWORD", settings.password.get_secret_value())
        target = Target.of(settings)
        try:
            with BlockingClient.open(target, name="test") as client:
                info = client.stream_info(ORDERS.stream)
            last = int(info["state"]["last_seq"])
            wanted = Wanted(stream=ORDERS.stream, created=info["created"], start=1, end=last + 1)
            return sum(len(chunk) for chunk in RangeReader(target, wanted).chunks()) == last > 0
        except PermissionDenied:
            return False


# ── single calls ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", ROLES)
async def test_every_cell_of_the_table_of_calls(
    role: Role, guarded: Server, deployment: Deployment, root: JetStreamApi
) -> None:
    """What is allowed has no effect here (no JSON, or an expectation that fails); what is not is refused at once."""
    await root.ensure_stream({"name": "orders-dlq", "subjects": ["orders-dlq.>"]})
    names = replace(EXAMPLE, apart=deployment.apart and role not in MEMBERS)
    user = permissions_of([role], names, user=deployment.user(role), inbox_prefix="_INBOX_x")
    connection = await open_as(guarded.url, deployment, role)
    try:
        wanted = {each.what: may(user, each) for each in actions(EXAMPLE)}
        found = {each.what: await _is_allowed(connection, each) for each in actions(EXAMPLE)}
    finally:
        await connection.close()
    assert found == wanted
    assert sorted(await root.stream_names()) == ["KEEPER", "ORDERS", "orders-dlq"]


async def _is_allowed(connection: Connection, action: Action) -> bool:
    if action.listens:
        denied: list[PermissionDenied] = []
        remove = connection.on_permission_denied(denied.append)
        subscription = await connection.client.subscribe(action.subject)
        await connection.flush()
        remove()
        await subscription.unsubscribe()
        return not denied
    try:
        await connection.request(action.subject, b"{", headers=NEVER, timeout_s=0.3)
    except PermissionDenied as error:
        return error.subject != action.subject
    except PartiError:
        pass  # nobody answers, or nobody is there: it got through
    return True


async def test_an_answer_reaches_nobody_but_who_asked(
    guarded: Server, deployment: Deployment, root: JetStreamApi
) -> None:
    """The inbox of a user is its own, and one user's prefix is no part of another's."""
    listener = await open_as(guarded.url, deployment, "observer")
    asker = await open_as(guarded.url, deployment, "operator")
    try:
        heard: list[str] = []

        async def hear(message: object) -> None:
            heard.append(str(message))

        denied: list[PermissionDenied] = []
        listener.on_permission_denied(denied.append)
        await listener.client.subscribe("_INBOX_orders-operator.>", cb=hear)
        await listener.flush()
        assert [each.subject for each in denied] == ["_INBOX_orders-operator.>"]
        assert (await JetStreamApi(asker).stream_info(ORDERS.stream)).name == ORDERS.stream
        await listener.flush()
        assert heard == []
    finally:
        await listener.close()
        await asker.close()


@pytest.mark.parametrize("layout", ["single", "accounts"])
def test_the_server_takes_what_perms_prints_with_every_option(layout: str) -> None:
    options = (
        "--layout",
        layout,
        "--stateful",
        "--jobs",
        "WORK",
        "--jobs-subject",
        "work.>",
        "--retention",
        "interest",
        "--admin",
    )
    text = ORDERS.perms(*options, ledger="full", consumer_shards="3", worker_id="one")
    assert len(re.findall(r"^        user: ", text, re.MULTILINE)) == len(ROLES)
    # As printed, with the names of the roles as users: the server refuses to start with a line that it cannot read.
    passwords = {password_variable(user): "p1" for user in (*ROLES, "admin")}
    with patch.dict(os.environ, passwords), Server(config=text) as server:
        assert server.running


@pytest.mark.parametrize("layout", ["single", "accounts"])
@pytest.mark.parametrize("name", ["ann.b@example.com", "true", "1k", "include"])
def test_the_server_takes_unusual_names_and_subjects(layout: str, name: str) -> None:
    subjects = ("--subject", "größe.{x}.>", "--subject", 'a"b\\c.#.>')
    text = ORDERS.perms("--layout", layout, "--role", "publisher", "--user", name, "--account", name, *subjects)
    with patch.dict(os.environ, {password_variable(name): "p1"}), Server(config=text) as server:
        assert server.running
