"""What an operator sees of a fleet: `parti status`, `parti workers`, `parti plan`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.integration.commands import type_command
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.processes import WorkerProcess, environment, write_app
from tests.integration.terminal import Terminal
from tests.pace import unhindered_s

import parti
from parti.cli.control import span
from parti.cli.main import main
from parti.cli.status import draw, take_picture
from parti.coordination.control_plane import read_keys
from parti.coordination.records import KEYS, Records
from parti.jetstream.kv import Bucket, Write
from parti.model.fleet import (
    Assignment,
    Claim,
    HealthRecord,
    LeaderRecord,
    MemberRecord,
    MemberState,
    encode,
    key_of,
)

PARTITIONS = [f"p{n}" for n in range(9)]
FLEET: Mapping[str, Any] = {
    "worker_id": None,
    "fleet": True,
    "cold_start_window_s": 0.1,
    "scale_window_s": 0.2,
    "min_rebalance_interval_s": 0.1,
    "lease_ttl_s": 3.0,
}
COMMANDS = [("status",), ("workers",), ("plan",)]

pytestmark = pytest.mark.usefixtures("no_settings_of_this_machine")


class Operator:
    """Types commands about the fleet of a kit."""

    def __init__(self, kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
        self._place = ("--nats", kit.url, "--bucket", f"b{kit.root}")
        self._capsys = capsys

    async def type(self, *arguments: str) -> tuple[int, str]:
        """Run a command in this process; returns its exit code and what it printed (code 2: on stderr)."""
        said = await type_command(self._capsys, *arguments, *self._place)
        if said.code == 2:
            assert said.out == ""
            return said.code, said.err
        return said.code, said.out

    async def ask(self, *arguments: str) -> dict[str, Any]:
        """Run a command with --json, whatever its exit code."""
        _, text = await self.type(*arguments, "--json")
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def all_is_well(self, workers: int) -> None:
        """Wait until so many workers are there and nothing is left to do."""

        async def settled() -> bool:
            status = await self.ask("status")
            states = [row["state"] for row in status["workers"]]
            return bool(status["ok"]) and not status["notes"] and states == ["stable"] * workers

        await eventually(settled, 20)


@pytest.fixture
def operator(kit: Kit, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(kit, capsys)


def app_of(kit: Kit, **settings: Any) -> parti.App:
    return kit.app(Record().handle, PARTITIONS, **{**FLEET, **settings})


@asynccontextmanager
async def fleet_of(kit: Kit, workers: int, **settings: Any) -> AsyncIterator[list[parti.Worker]]:
    async with AsyncExitStack() as running:
        yield [await running.enter_async_context(app_of(kit, **settings).running()) for _ in range(workers)]


async def records_of(kit: Kit) -> Records:
    return Records.of(await read_keys(kit.connection, kit.api, f"b{kit.root}", KEYS))


async def owners_of(kit: Kit) -> dict[str, str]:
    return {p: c.owner for p, c in (await records_of(kit)).claims.items()}


# ── a fleet that is well ──────────────────────────────────────────────────────────────────────────────────────────


async def test_status_of_a_fleet_that_is_well(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 2):
        await operator.all_is_well(2)
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "parti", "status", "--nats", kit.url],
            env=environment(PARTI_BUCKET=f"b{kit.root}"),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        text = done.stdout
        assert text.rstrip().endswith("All is well: 9 partitions on 2 workers, each with one owner.")
        assert "9: 9 owned, 0 moving, 0 unowned" in text
        assert "2: 2 stable" in text
        rebalancer = next(line for line in text.splitlines() if line.startswith("rebalancer"))
        assert re.search(r"worker-[01], term \d+, since .* s: stable", rebalancer)


STATUS_KEYS = {
    "": {"at", "bucket", "notes", "ok", "orders", "partitions", "problems", "rebalancer", "summary", "workers"},
    "rebalancer": {"reason", "since", "state", "term", "worker"},
    "partitions": {
        *("moving", "moving_partitions", "owned", "paused", "preparing", "total", "unowned", "unowned_partitions"),
        "waiting",
    },
    "workers": {
        *("capacity", "coming", "failures", "finished", "heartbeat_age_s", "host", "identity", "leaving"),
        *("load", "load_share"),
        *("owned", "pid", "problems", "rate", "standby", "state", "version", "worker"),
    },
}
PLAN_KEYS = {
    "": {
        *("at", "begun", "bucket", "given", "joins", "kept", "leaves", "minimum", "moved", "moved_share", "moves"),
        *("notes", "partitions", "strategy", "summary", "unowned", "workers"),
    },
    "workers": {"change", "gets", "gives", "load", "load_then", "owns", "then", "worker"},
    "moves": {"after_s", "from", "kind", "partition", "to", "why"},
}


def keys_of(answer: Mapping[str, Any], parts: Mapping[str, set[str]]) -> dict[str, set[str]]:
    found = {"": set(answer)}
    for name in parts.keys() - {""}:
        part = answer[name]
        found[name] = set(part[0] if isinstance(part, list) else part)
    return found


async def test_the_keys_of_the_json_are_locked(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 2):
        await operator.all_is_well(2)
        assert keys_of(await operator.ask("status"), STATUS_KEYS) == STATUS_KEYS
        assert keys_of(await operator.ask("plan", "--join", "1"), PLAN_KEYS) == PLAN_KEYS
        listed = await operator.ask("workers")
        assert set(listed) == {"at", "bucket", "workers"}
        row_keys = {
            *("coming", "health", "heartbeat_age_s", "leaving", "member", "owned", "roles", "standby", "state"),
            "worker",
        }
        assert all(set(row) == row_keys for row in listed["workers"])
        one = await operator.ask("workers", "worker-1")
        assert set(one) == row_keys | {"at", "bucket", "partitions"}


async def test_workers_shows_every_field_of_the_records_but_the_token(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 2, identity="pod-a") as fleet:
        await operator.all_is_well(2)
        records = await records_of(kit)
        _, text = await operator.type("workers", "--json")
        rows = {row["worker"]: row for row in json.loads(text)["workers"]}
        assert set(rows) == {worker.worker_id for worker in fleet} == set(records.members)
        fields = {field.name for field in msgspec.structs.fields(MemberRecord)} - {"token"}
        assert all(set(row["member"]) == fields for row in rows.values())
        assert all(
            set(row["health"]) == {field.name for field in msgspec.structs.fields(HealthRecord)}
            for row in rows.values()
        )
        roles = {role: held.holder for role, held in records.leaders.items()}
        assert {role: worker for worker, row in rows.items() for role in row["roles"]} == roles
        _, table = await operator.type("workers")
        _, detail = await operator.type("workers", "worker-0")
        for shown in (text, table, detail):
            assert not [m.token for m in records.members.values() if m.token in shown]
        assert "rebalancer" in table
        assert "Left out" not in table
        assert str(os.getpid()) in detail


async def test_a_worker_in_detail_comes_with_its_claims(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 2):
        await operator.all_is_well(2)
        claims = {p: c for p, c in (await records_of(kit)).claims.items() if c.owner == "worker-1"}
        one = await operator.ask("workers", "worker-1")
        shown = {row["partition"]: row for row in one["partitions"]}
        assert set(shown) == set(claims)
        assert len(shown) in {4, 5}
        for partition, claim in claims.items():
            row = shown[partition]
            assert (row["fence_token"], row["position"], row["reason"]) == (
                claim.fence_token,
                claim.position,
                claim.reason,
            )
        code, text = await operator.type("workers", "worker-1")
        assert code == 0
        assert all(str(claim.fence_token) in text for claim in claims.values())
        assert "balance (worker-0 has more)" in text


async def test_a_worker_can_be_named_by_its_identity(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 1, identity="pod-a"):
        code, text = await operator.type("workers", "pod-a")
        assert (code, "worker-0" in text) == (0, True)


# ── a fleet that is not ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_lost_worker_whose_partitions_nobody_can_take_is_a_problem(
    kit: Kit, operator: Operator, tmp_path: Path
) -> None:
    target = write_app(tmp_path, kit, PARTITIONS, **{**FLEET, "capacity": 5, "lease_ttl_s": 2})
    async with fleet_of(kit, 1, capacity=5):
        with WorkerProcess(tmp_path, target, kit.url) as second:
            await operator.all_is_well(2)
            second.kill()

            async def seen() -> bool:
                status = await operator.ask("status")
                return "every worker is full" in str(status["problems"])

            await eventually(seen, 20)
        code, text = await operator.type("status")
        assert code == 1
        status = await operator.ask("status")
        named = ", ".join(status["partitions"]["unowned_partitions"])
        text = " ".join(text.split())
        assert f"4 partitions without a live owner ({named}); the rebalancer says: " in text
        assert text.endswith("every worker is full; start another one, or raise max_subjects or capacity.")
        assert status["partitions"]["unowned"] == len(status["partitions"]["unowned_partitions"]) == 4
        assert [(row["state"], row["owned"]) for row in status["workers"] if row["worker"] == "worker-1"] == [
            ("gone", 4)
        ]

        code, text = await operator.type("plan")
        assert code == 1
        assert "4 of 9 partitions (44.4 %) would have no owner: every worker would be full" in text
        helped = await operator.ask("plan", "--join", "1")
        # The id of the lost worker is the lowest that is free, and what it owned stays with it.
        assert (helped["joins"], helped["kept"], helped["moved"], helped["unowned"]) == (["worker-1"], 4, 0, [])


async def test_a_fleet_that_is_all_gone_is_a_problem(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 1):
        pass
    code, text = await operator.type("status")
    assert code == 1
    assert "no worker is running; start one with 'parti worker MODULE:APP'" in text
    assert "9 partitions without a live owner" in text
    assert "there is no rebalancer" not in text
    code, text = await operator.type("workers")
    assert (code, "gone" in text) == (0, True)


async def test_a_missing_bucket_is_an_error_and_stays_missing(kit: Kit, operator: Operator) -> None:
    before = await kit.api.stream_names()
    for arguments in COMMANDS:
        code, text = await operator.type(*arguments)
        assert code == 2
        assert f"bucket 'b{kit.root}' does not exist: no worker has ever run here" in text
        assert "parti worker MODULE:APP" in text
        assert len(text.splitlines()) == 1
    assert await kit.api.stream_names() == before


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_missing_server_is_an_error(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARTI_CONNECT_TIMEOUT_S", "0.3")
    assert main([*arguments, "--json", "--nats", "nats://127.0.0.1:1"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "127.0.0.1:1" in err


def test_nobody_waits_long_for_a_missing_server(capsys: pytest.CaptureFixture[str]) -> None:
    began_s = unhindered_s()
    assert main(["status", "--nats", "nats://127.0.0.1:1"]) == 2
    assert unhindered_s() - began_s < 6
    assert "127.0.0.1:1" in capsys.readouterr().err


async def test_names_that_nobody_has_get_a_suggestion(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 1, identity="pod-a"):
        for arguments in (("workers", "wroker-0"), ("plan", "--leave", "wroker-0")):
            code, text = await operator.type(*arguments)
            assert code == 2
            assert text == "parti: there is no worker 'wroker-0'; did you mean worker-0? workers here: worker-0\n"
        code, text = await operator.type("workers", "pod-b")
        assert (code, "did you mean pod-a?" in text) == (2, True)


async def test_options_that_make_no_sense_are_refused(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 1):
        for arguments, reason in (
            (("status", "--watch", "--json"), "exclude each other"),
            (("status", "--watch"), "draws on a terminal"),
            (("plan", "--strategy", "stiky"), "unknown strategy 'stiky'"),
            (("plan", "--join", "1000"), "only 999 of 1000 worker ids are free"),
        ):
            code, text = await operator.type(*arguments)
            assert (code, reason in text) == (2, True), text


# ── what would move ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_join_and_a_leave_do_what_was_planned(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 2):
        await operator.all_is_well(2)
        before = await owners_of(kit)
        joining = await operator.ask("plan", "--join", "1")
        assert joining["joins"] == ["worker-2"]
        assert joining["moved"] == joining["minimum"] == len(joining["moves"]) == 3
        async with fleet_of(kit, 1):
            await operator.all_is_well(3)
            after = await owners_of(kit)
            moved = {(p, before[p], worker) for p, worker in after.items() if before[p] != worker}
            assert {(m["partition"], m["from"], m["to"]) for m in joining["moves"]} == moved
            leaving = await operator.ask("plan", "--leave", "worker-2")
            assert (leaving["given"], leaving["moved"], leaving["unowned"]) == (3, 0, [])
            assert {w["worker"]: w["then"] for w in leaving["workers"]} == {
                "worker-0": 5,
                "worker-1": 4,
                "worker-2": 0,
            }
        await operator.all_is_well(2)
        back = await owners_of(kit)
        given = {(p, after[p], worker) for p, worker in back.items() if after[p] != worker}
        assert {(m["partition"], m["from"], m["to"]) for m in leaving["moves"]} == given


async def test_a_plan_for_people(kit: Kit, operator: Operator) -> None:
    async with fleet_of(kit, 1, identity="pod-a"):
        await operator.all_is_well(1)
        code, text = await operator.type("plan")
        assert (code, text.rstrip().splitlines()[-1]) == (0, "Nothing would move.")
        code, text = await operator.type("plan", "--join", "1")
        assert code == 0
        assert "moves        4 (44.4 %), least possible 4" in text
        assert text.rstrip().endswith(
            "If worker-1 joined, 4 of 9 partitions (44.4 %) would move between live workers, the least possible, "
            "once nobody has joined or left for 3 s."
        )
        code, text = await operator.type("plan", "--leave", "worker-0")
        assert code == 1
        assert "9 of 9 partitions (100 %) would have no owner: no worker would be left." in text
        assert "its partitions first wait up to 30 s for it to come back" in text


# ── without a server ──────────────────────────────────────────────────────────────────────────────────────────────

NOW = datetime.now(UTC)


def member(number: int, state: MemberState = "active", version: str = "1.0") -> MemberRecord:
    return MemberRecord(
        token=f"secret{number}",
        incarnation=number,
        state=state,
        identity=f"pod-{number}",
        host="a-host-with-quite-a-long-name.example",
        pid=40_000 + number,
        version=version,
        started_at=NOW - timedelta(hours=1),
        ttl_seconds=5,
    )


def health(number: int, *problems: str, applied: int = 1) -> HealthRecord:
    return HealthRecord(
        incarnation=number,
        applied=applied,
        state="stable",
        pulling=True,
        finished=123_456_789,
        problems=problems,
        at=datetime.now(UTC),
    )


def claim(owner: str, incarnation: int) -> Claim:
    return Claim(owner=owner, incarnation=incarnation, claimed_at=NOW, ttl_seconds=5, term=1)


def leader(state: str = "stable", reason: str = "") -> LeaderRecord:
    return LeaderRecord(
        holder="worker-0", token="secret0", term=1, state=state, reason=reason, since=NOW, ttl_seconds=5
    )


def fleet_records(workers: int) -> Records:
    records = Records(leaders={"rebalancer": leader()} if workers else {})
    for n in range(workers):
        worker = f"worker-{n}"
        records.members[worker] = member(n)
        records.health[worker] = health(n)
        records.assignments[worker] = Assignment(version=1, term=1, incarnation=n)
        for p in range(20):
            records.claims[f"etch{n}.c{p}"] = claim(worker, n)
    return records


def screen_of(records: Records, width: int = 120, height: int = 24, *, fit: bool = False) -> list[str]:
    console = Console(width=width, height=height, file=None, highlight=False, markup=False, force_terminal=False)
    with console.capture() as captured:
        console.print(draw(take_picture("bucket parti on nats://127.0.0.1:4222", records), console, fit=fit))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("workers", [0, 1, 10, 100])
def test_the_screen_fits(workers: int, width: int) -> None:
    records = fleet_records(workers)
    if workers > 1:
        records.health["worker-7"] = health(7, "suspended: connection closed by the server " * 3)
    lines = screen_of(records, width, fit=True)
    assert max(map(len, lines)) <= width
    assert len(lines) < 24
    assert not [line for line in lines if "…" in line and "more worker" not in line]
    shown = [line.split()[0] for line in lines if line.startswith("worker-")]
    assert len(shown) == workers or shown[:2] == ["worker-7", "worker-0"]


def test_a_screen_that_need_not_fit_shows_every_worker() -> None:
    lines = screen_of(fleet_records(100), fit=False)
    assert sum(line.startswith("worker-") for line in lines) == 100


def test_what_passes_by_itself_is_noted_and_no_problem() -> None:
    records = fleet_records(3)
    records.members["worker-1"] = member(1, "away", version="1.1")
    records.assignments["worker-2"] = Assignment(version=2, term=1, incarnation=2)
    records.leaders["rebalancer"] = leader("scaling", "3 partitions are to move")
    verdict = take_picture("here", records).verdict
    assert verdict.problems == ()
    assert verdict.notes == (
        "scaling: 3 partitions are to move",
        "20 partitions wait for worker-1 to come back",
        "worker-2 did not apply the newest assignment yet",
        "different versions of parti are running: 1.0 (2), 1.1 (1)",
    )
    assert verdict.summary.startswith("Nothing is wrong (60 partitions on 3 workers), but note: ")


def test_problems_are_named() -> None:
    records = fleet_records(3)
    del records.members["worker-1"], records.leaders["rebalancer"]
    records.health["worker-0"] = health(0, "no connection")
    records.health["worker-2"] = health(2, "no connection", "cannot store")
    records.unreadable = {"orders": "no JSON", "claims.p1": "no JSON"}
    picture = take_picture("here", records)
    assert picture.verdict.problems == (
        "there is no rebalancer",
        f"20 partitions without a live owner ({', '.join(f'etch1.c{n}' for n in range(10))} and 10 more)",
        "worker-0, worker-2: no connection",
        "worker-2: cannot store",
        "unreadable records orders and 1 more: run 'parti doctor --repair orders', which takes all orders back: give "
        "them again then",
    )
    assert picture.partitions == {"owned": 40, "unowned": 20}
    lines = screen_of(records)
    assert "partitions   60: 40 owned, 0 moving, 20 unowned (etch1.c0, etch1.c1, etch1.c2 and 17 more)" in lines


def test_a_clock_that_is_wrong_is_noted() -> None:
    records = fleet_records(2)
    late = msgspec.structs.replace(records.health["worker-1"], at=datetime.now(UTC) - timedelta(minutes=2))
    records.health["worker-1"] = late
    assert "the clock of worker-1" in take_picture("here", records).verdict.summary


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0.0 s"), (0.44, "0.4 s"), (9.96, "10 s"), (119, "119 s"), (150, "2 min"), (7300, "2 h"), (1e6, "12 d")],
)
def test_spans_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text


# ── reading only, and live ────────────────────────────────────────────────────────────────────────────────────────


async def test_looking_changes_nothing(kit: Kit, operator: Operator) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    records = fleet_records(2)
    await bucket.write(
        [
            *(Write(key_of("ids", w), encode(r), 0) for w, r in records.members.items()),
            *(Write(key_of("health", w), encode(r), 0) for w, r in records.health.items()),
            *(Write(key_of("claims", p), encode(r), 0) for p, r in records.claims.items()),
            *(Write(key_of("leader", n), encode(r), 0) for n, r in records.leaders.items()),
        ]
    )
    before = await bucket.info()
    for arguments in (*COMMANDS, ("plan", "--join", "3"), ("workers", "worker-0")):
        assert (await operator.type(*arguments))[0] == 0
    assert await bucket.info() == before
    consumers = await kit.api.call(f"CONSUMER.NAMES.KV_b{kit.root}")
    assert not consumers["consumers"]


async def test_watching_shows_who_joins_until_ctrl_c(kit: Kit) -> None:
    async with fleet_of(kit, 1):
        terminal = Terminal("status", "--watch", "--nats", kit.url, "--bucket", f"b{kit.root}")
        await eventually(lambda: "9 partitions on 1 worker," in terminal.text, 20)
        assert "worker-1" not in terminal.text
        async with fleet_of(kit, 1):
            await eventually(lambda: "9 partitions on 2 workers, each with one owner." in terminal.text, 20)
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.ends() == 0
        assert "Traceback" not in terminal.text
