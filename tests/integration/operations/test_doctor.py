"""`parti doctor` on real servers: what it finds, and that it changes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fuzz.raw import Raw, RawClient
from tests.integration.conftest import Kit, Record
from tests.integration.operations.operators import FLEET, Operator

from parti.cli.main import main
from parti.config import Settings
from parti.core.permissions import permissions_of
from parti.core.role_calls import ROLES, Names, Role
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.fleet import FleetRecord, Orders, encode
from parti.model.safe_text import text_of

NAMES = Names("ORDERS", "parti", "parti", "parti-dlq", "parti.dlq", subjects=("orders.>",), mirror="parti-hot-ORDERS")


def areas(answer: dict[str, Any], *levels: str) -> dict[str, list[str]]:
    """Texts of these levels, by area."""
    found: dict[str, list[str]] = {}
    for finding in answer["findings"]:
        if finding["level"] in levels:
            found.setdefault(finding["area"], []).append(finding["text"])
    return found


async def test_a_fleet_that_is_well_has_no_errors(kit: Kit, operator: Operator) -> None:
    app = kit.app(Record().handle, ["p0", "p1"], **FLEET)
    async with app.running():
        await operator.all_is_well(1)
        code, text = await operator.type("doctor", "--json", *operator.place)
        answer = json.loads(text)
        assert (code, answer["ok"]) == (0, True), answer
        assert set(answer) == {"at", "bucket", "findings", "ok", "summary", "version"}
        well = areas(answer, "ok")
        assert well["server"][0].startswith("nats-server 2.")
        assert well["permissions"] == [f"this user can be: {', '.join(ROLES)}"]
        assert well[f"bucket b{kit.root}"][-1] == "1 worker here; 'parti status' tells how it goes"
        assert well["clock"]
        assert areas(answer, "warning")[f"stream {kit.stream}"] == ["it is in memory, on one server"]
        code, text = await operator.type("doctor", *operator.place)
        assert code == 0
        assert "fix: use file storage, or replicas" in text


async def test_files_with_secrets_that_others_may_read_are_warned_of(
    kit: Kit, operator: Operator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, key = tmp_path / "parti.toml", tmp_path / "system.creds"
    key.write_text("never read")
    config.write_text(f'user = "u"\npassword = "hunter2"\nsystem_credentials_file = "{key}"\n')
    monkeypatch.setenv("PARTI_CONFIG", str(config))
    for path in (config, key):
        path.chmod(0o644)
    answer = await operator.ask("doctor", *operator.place)
    assert areas(answer, "warning")["secrets"] == [
        f"system_credentials_file: other users may read or write {key} (mode 0644), expected 0600",
        f"config file: other users may read or write {config} (mode 0644), expected 0600",
    ]
    assert f"chmod 600 {key}" in {finding["fix"] for finding in answer["findings"]}
    assert "hunter2" not in json.dumps(answer)
    for path in (config, key):
        path.chmod(0o600)
    assert "secrets" not in areas(await operator.ask("doctor", *operator.place), "warning")


async def test_what_a_fleet_left_behind_is_found(kit: Kit, operator: Operator) -> None:
    async with kit.app(Record().handle, ["p0"], **FLEET).running():
        await operator.all_is_well(1)
    await kit.api.call(
        f"STREAM.CREATE.w{kit.root}-hot-X", {"name": f"w{kit.root}-hot-X", "subjects": [f"hot.{kit.root}"]}
    )
    try:
        answer = await operator.ask("doctor", *operator.place)
        assert areas(answer, "note")[f"bucket b{kit.root}"] == ["no worker runs at the moment"]
    finally:
        await kit.delete_stream(f"w{kit.root}-hot-X")


async def test_the_prefix_tells_whose_leftovers_they_are(
    kit: Kit, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTI_PREFIX", f"w{kit.root}")
    async with kit.app(Record().handle, ["p0"], **FLEET).running():
        await operator.all_is_well(1)
        assert "leftovers" in areas(await operator.ask("doctor", *operator.place), "ok")
    left = areas(await operator.ask("doctor", *operator.place), "note")["leftovers"]
    assert left == [f"consumers while no worker runs: w{kit.root}-worker-0"]


async def test_a_fleet_record_that_cannot_be_read_does_not_hide_the_next_twin(kit: Kit, operator: Operator) -> None:
    record = FleetRecord(prefix="same", stream=kit.stream, template=kit.template, stream_created="t0", first_seq=1)
    values = {f"b{kit.root}": encode(record), f"b{kit.root}-a": b"nonsense", f"b{kit.root}-b": encode(record)}
    for name, value in values.items():
        bucket = await Bucket.open(kit.api, name, replicas=1)
        await bucket.put("fleet", value, revision=0)
    try:
        (text,) = areas(await operator.ask("doctor", *operator.place), "error")[f"stream {kit.stream}"]
    finally:
        for name in values.keys() - {f"b{kit.root}"}:
            await kit.delete_stream(f"KV_{name}")
    assert text == f"the fleets of bucket b{kit.root} and of bucket b{kit.root}-b have the same prefix same"


ODD_KEYS = (
    *(b"claims.\xff", b"claims.p9/x", b"claims.p=30", b"claims.\x1b[2J", b"claims.*", b"claims.p0.>"),
    *(b"assignment.worker=2D0", b"ids.\xc3", b"progress.\xff", b"state.\xff.x", b"migration.\xff", b"health.=C3"),
)
"""None of them is what `key_of` would make."""
NAMED_KEYS = ("claims.p0.extra", "health.w.x")
VALUES = (b"nonsense", encode(Orders()), b"")


@pytest.mark.parametrize("value", VALUES)
async def test_keys_that_parti_never_writes_are_told_in_one_line_and_left_alone(
    kit: Kit, operator: Operator, value: bytes
) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    with RawClient(kit.url) as client:
        await asyncio.to_thread(client.publish, [Raw(f"$KV.{bucket.name}.".encode() + k, value) for k in ODD_KEYS])
    before = (await bucket.info()).last_seq
    answer = await operator.ask("doctor", *operator.place)
    (told,) = areas(answer, "note")["keys"]
    assert told.startswith("12 keys that parti never writes: assignment.worker=2D0, claims.*, ")
    assert "record" not in {area.split()[0] for area in areas(answer, "error")}
    code, text = await operator.type("doctor", *operator.place)
    assert (code, "\x1b[2J" in text) == (0, False)
    for key in ODD_KEYS:
        for given in (key.decode("utf-8", "surrogateescape"), text_of(key)):
            code, text = await operator.type("doctor", "--repair", given, *operator.place)
            assert code == 2
            assert "is no key of a record" in text
    assert (await bucket.info()).last_seq == before


async def test_a_key_with_more_words_than_parti_writes_is_repaired_by_its_name(kit: Kit, operator: Operator) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    for key in NAMED_KEYS:
        await bucket.put(key, b"nonsense", revision=0)
    for key in NAMED_KEYS:
        errors = areas(await operator.ask("doctor", *operator.place), "error")
        assert f"record {key}" in errors
        code, text = await operator.type("doctor", "--repair", key, *operator.place)
        assert (code, text.startswith(f"Deleted {key}, which was unreadable (")) == (0, True)
    assert (await operator.type("doctor", *operator.place))[0] == 0


@pytest.mark.parametrize(
    "key", ["", ".", "claims", "claims.", "claims..p0", ".p0", "claims.p0.", "claims." + "x" * 5_000]
)
async def test_what_cannot_be_a_key_is_refused_in_one_line(kit: Kit, operator: Operator, key: str) -> None:
    await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    assert (await operator.type("doctor", f"--repair={key}", *operator.place))[0] == 2


async def test_the_cliff_is_seen_on_a_file_stream_with_many_subjects(
    kit: Kit, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kit.delete_stream()
    await kit.create_stream(storage="file", allow_direct=False)
    await kit.publish([f"p{n}" for n in range(150)])
    arguments = ("doctor", "--stream", kit.stream, *operator.place)
    assert "hot mirror (hot_mirror=auto)" in str(areas(await operator.ask(*arguments), "ok"))
    monkeypatch.setenv("PARTI_HOT_MIRROR", "off")
    warned = areas(await operator.ask(*arguments), "warning")[f"stream {kit.stream}"]
    assert warned == ["allow_direct is off", "150 subjects on file storage, and hot_mirror=off"]


async def test_a_server_without_jetstream_is_an_error(operator: Operator) -> None:
    async with Server(jetstream=False) as server:
        code, text = await operator.type("doctor", "--nats", server.url, "--json")
    assert code == 1
    assert areas(json.loads(text), "error") == {"account": ["JetStream is off"]}


async def test_a_wrong_name_is_refused(kit: Kit, operator: Operator) -> None:
    code, text = await operator.type("doctor", "--stream", "NOPE", *operator.place)
    assert (code, "there is no stream 'NOPE'; streams here: " in text) == (2, True)
    code, text = await operator.type("doctor", "--role", "king", *operator.place)
    assert (
        code,
        "expected one of worker, leader, operator, observer, spark-reader, publisher, migrator" in text,
    ) == (2, True)


# ── permissions ───────────────────────────────────────────────────────────────────────────────────────────────────


def user(role: Role) -> str:
    """A user with the permissions of a role, and what it takes to look at everything else."""
    granted = permissions_of([role], NAMES, user=role, inbox_prefix="_INBOX")
    more = ("$SYS.REQ.USER.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.>")
    allowed, heard = json.dumps([*granted.publish_subjects, *more]), json.dumps(granted.subscribe_subjects)
    permissions = f"{{publish: {{allow: {allowed}}}, subscribe: {{allow: {heard}}}}}"
    return f"{{user: {role}, password: {role}, permissions: {permissions}}}"


@pytest.fixture(scope="module")
def accounts() -> Any:
    """A server on which there is a user for each role, with just its permissions, and a system account."""
    users = [user(role) for role in ROLES]
    config = f"""
    accounts {{
        A {{ jetstream: enabled, users: [{{user: root, password: root}}, {", ".join(users)}] }}
        SYS {{ users: [{{user: sys, password: sys}}] }}
    }}
    system_account: SYS
    """
    server = Server(config=config)
    server.start_sync()
    yield server
    server.stop_sync()


@pytest.fixture
async def root(accounts: Server) -> AsyncIterator[JetStreamApi]:
    connection = await Connection.open(Settings(nats=(accounts.url,), user="root", password="root"), name="test")  # type: ignore[arg-type]
    api = JetStreamApi(connection)
    await api.ensure_stream({"name": "ORDERS", "subjects": ["orders.>"], "allow_direct": True})
    await api.ensure_stream({"name": "parti-dlq", "subjects": ["parti.dlq.>"]})
    await api.publish("orders.a", b"x")
    yield api
    await connection.close()


async def states(api: JetStreamApi) -> dict[str, Any]:
    names = await api.stream_names()
    infos = await asyncio.gather(*(api.call(f"STREAM.INFO.{name}") for name in names))
    return {info["config"]["name"]: (info["config"], info["state"]) for info in infos}


@pytest.mark.parametrize("role", ROLES)
async def test_a_user_with_the_permissions_of_a_role_can_be_just_that(
    role: str,
    accounts: Server,
    root: JetStreamApi,
    monkeypatch: pytest.MonkeyPatch,
    no_settings_of_this_machine: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = await states(root)
    monkeypatch.setenv("PARTI_USER", role)
    monkeypatch.setenv("PARTI_PASSWORD", role)
    arguments = ["doctor", "--nats", accounts.url, "--stream", "ORDERS", "--json"]
    capsys.readouterr()
    code = await asyncio.to_thread(main, [*arguments, "--role", role])
    answer = json.loads(capsys.readouterr().out)
    errors = areas(answer, "error").get("permissions", [])
    assert (code, errors) == (0, []), errors
    (able,) = areas(answer, "ok")["permissions"]
    # An operator may do all that an observer and a publisher do, a leader all that a worker does, and both workers
    # read the stream as Spark does; that is all they share.
    wanted = {
        "operator": "operator, observer, publisher",
        "worker": "worker, spark-reader",
        "leader": "worker, leader, spark-reader",
    }.get(role, role)
    assert able == f"this user can be: {wanted}"
    other = {"worker": "leader", "leader": "operator", "operator": "worker"}.get(role, "worker")
    assert await asyncio.to_thread(main, [*arguments, "--role", other]) == 1
    denied = areas(json.loads(capsys.readouterr().out), "error")["permissions"]
    assert denied[0].startswith(f"this user cannot be {other}: it may not publish to $")
    assert await states(root) == before


async def test_the_sync_interval_is_seen_with_the_system_account(
    accounts: Server,
    root: JetStreamApi,
    monkeypatch: pytest.MonkeyPatch,
    no_settings_of_this_machine: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("USER", "root"), ("PASSWORD", "root"), ("SYSTEM_USER", "sys"), ("SYSTEM_PASSWORD", "sys")):
        monkeypatch.setenv(f"PARTI_{name}", value)
    assert await asyncio.to_thread(main, ["doctor", "--nats", accounts.url, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert areas(answer, "warning")["sync"] == ["writes are synced to disk every 120 s"]
    assert "root" not in json.dumps(answer["findings"]).replace("root of account A", "")
