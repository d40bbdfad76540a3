"""Orders of operators: what a partition waits for, and what the screens say of orders that stand."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from rich.console import Console

from parti.cli.orders import partitions_named, worker_named
from parti.cli.status import draw, take_picture
from parti.coordination.orders import Situation, obstacle
from parti.coordination.records import Records
from parti.coordination.worker_rows import worker_rows
from parti.core.fleet_view import FleetState
from parti.errors import ConfigError
from parti.jetstream.kv import Entry
from parti.model.fleet import (
    Claim,
    ClaimState,
    FleetRecord,
    HealthRecord,
    LeaderRecord,
    MemberRecord,
    MemberState,
    Orders,
    encode,
)

NOW = datetime.now(UTC)


def member(state: MemberState = "active", identity: str = "") -> MemberRecord:
    return MemberRecord(token="t", incarnation=7, state=state, identity=identity, started_at=NOW, ttl_seconds=5)


def health(*busy: str, applied: int = 5, ready: int = 5, pulling: bool = True, incarnation: int = 7) -> HealthRecord:
    return HealthRecord(
        incarnation=incarnation,
        applied=applied,
        ready=ready,
        busy=busy,
        pulling=pulling,
        state="stable",
        at=datetime.now(UTC),
    )


def leader(state: FleetState = FleetState.STABLE, reason: str = "", holder: str = "worker-0") -> LeaderRecord:
    return LeaderRecord(holder=holder, token="t", term=1, state=state, reason=reason, since=NOW, ttl_seconds=5)


def claim(state: ClaimState = "owned", *, owner: str = "worker-0", next: str = "", awaits: int = 5) -> Claim:
    return Claim(
        owner=owner, incarnation=7, state=state, next=next, awaits=awaits, claimed_at=NOW, ttl_seconds=5, term=1
    )


def situation(
    p0: Claim | None,
    *,
    orders: Orders | None = None,
    members: Mapping[str, MemberRecord] | None = None,
    said: Mapping[str, HealthRecord] | None = None,
    led: LeaderRecord | None = None,
) -> Situation:
    """Two workers, the first of which leads."""
    everybody = {"worker-0": member(), "worker-1": member()}
    records = Records(
        members={**everybody, **(members or {})},
        health={**dict.fromkeys(everybody, health()), **(said or {})},
        claims={"p0": p0} if p0 else {},
        leaders={"rebalancer": led or leader()},
    )
    return Situation(records, orders or Orders())


MOVING = claim("moving", next="worker-1")
PREPARING = claim("preparing", next="worker-1")
SCALING = leader(FleetState.SCALING, "3 partitions to move, but others have only just moved")


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (situation(claim()), "it is still with worker-0"),
        (situation(claim(), led=SCALING), f"the rebalancer says: {SCALING.reason}"),
        (situation(claim(), orders=Orders(hold_moves=True)), "moves are paused"),
        (situation(claim(), orders=Orders(hold_moves=True, drained=("worker-0",))), "it is still with worker-0"),
        (situation(claim(), said={"worker-1": health(pulling=False)}), "worker-1 does not pull"),
        (situation(claim(), said={"worker-1": health(incarnation=6)}), "worker-1 does not pull"),
        (situation(PREPARING, said={"worker-1": health(ready=4)}), "worker-1 is not ready for it yet"),
        (situation(PREPARING, said={"worker-1": health(pulling=False)}), "worker-1 does not pull"),
        (situation(MOVING, said={"worker-0": health("p0")}), "its handler still runs on worker-0"),
        (situation(MOVING, said={"worker-0": health(applied=4)}), "worker-0 has not let go of it yet"),
        (situation(MOVING, said={"worker-0": health(incarnation=6)}), "worker-0 has not let go of it yet"),
        (situation(MOVING), "it is still with worker-0"),
        (situation(claim("moving"), said={"worker-0": health("p0")}), "its handler still runs on worker-0"),
        (situation(claim(), members={"worker-0": member("away")}, led=leader(holder="worker-1")), "worker-0 is away"),
        (situation(claim(owner="worker-5")), "it is still with worker-5"),
        (situation(claim("free", owner="")), "nobody has been given it yet"),
        (situation(None), "nobody has been given it yet"),
        (situation(None, led=leader(FleetState.DEGRADED, "every worker is full")), "every worker is full"),
        (situation(MOVING, led=leader(holder="worker-9")), "the rebalancer worker-9 is gone"),
    ],
)
def test_what_a_partition_waits_for_is_named(found: Situation, why: str) -> None:
    assert why in obstacle(found, "p0", "worker-1")


def test_without_a_rebalancer_nothing_else_matters() -> None:
    found = situation(MOVING, said={"worker-0": health("p0")})
    found.records.leaders.clear()
    assert obstacle(found, "p0", "worker-1") == "there is no rebalancer"


def test_a_partition_that_goes_to_nobody_in_particular_waits_for_no_heir() -> None:
    found = situation(claim(), said={"worker-1": health(pulling=False)}, orders=Orders(hold_moves=True))
    assert obstacle(found, "p0") == "it is still with worker-0"


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_orders_are_read_with_the_records() -> None:
    orders, fleet = (
        Orders(placed={"p0": "worker-1"}, hold_moves=True),
        FleetRecord(prefix="x", stream="S", template="s.{p}", stream_created="", first_seq=1),
    )
    found = Situation.of(
        {
            "orders": Entry(encode(orders), 12),
            "fleet": Entry(encode(fleet), 3),
            "ids.worker-0": Entry(encode(member()), 4),
        }
    )
    assert (found.orders, found.revision, found.fleet) == (orders, 12, fleet)
    assert found.records.members == {"worker-0": member()}
    found.take("orders", Entry(b"", 13))
    assert (found.orders, found.revision) == (Orders(), 13)
    found.take("orders", Entry(b"nonsense", 14))
    assert (list(found.records.unreadable), found.orders, found.revision) == (["orders"], Orders(), 13)


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_partitions_come_once_and_in_natural_order() -> None:
    assert partitions_named(["p10", "p2", "p10"], {"p2", "p10", "p3"}) == ("p2", "p10")


@pytest.mark.parametrize(
    ("names", "known", "text"),
    [
        (
            ["etch1.c33"],
            ["etch1.c3", "etch2.c3"],
            "there is no partition 'etch1.c33'; did you mean etch1.c3, etch2.c3?",
        ),
        (["x"], ["p0"], "there is no partition 'x'; there is 1 partition, such as p0"),
        (["x"], [], "there is no partition 'x'; no partition has been claimed yet"),
    ],
)
def test_an_unknown_partition_gets_a_hint(names: list[str], known: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        partitions_named(names, known)
    assert str(refused.value) == text


def test_an_identity_of_two_workers_names_neither() -> None:
    found = situation(None, members={"worker-0": member(identity="pod"), "worker-1": member(identity="pod")})
    with pytest.raises(ConfigError, match="the identity of several workers: worker-0, worker-1; name one"):
        worker_named("pod", found)


def test_a_worker_that_nobody_holds_counts_where_an_order_names_it() -> None:
    assert worker_named("worker-8", situation(None), also=("worker-8",)) == "worker-8"


# ── on the screen ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_orders_that_stand_are_noted() -> None:
    records = situation(claim()).records
    records.claims |= {"p1": PREPARING, "p2": MOVING, "p3": claim("free", owner=""), "p4": claim("free", owner="")}
    orders = Orders(
        placed={"p0": "worker-5", "p1": "worker-1"}, drained=("worker-1",), paused=("p3",), hold_moves=True
    )
    picture = take_picture("here", records, orders)
    assert picture.verdict.problems == ()
    assert picture.verdict.notes == (
        "moves are paused, until 'parti resume'",
        "1 partition is paused (p3)",
        "worker-1 is drained",
        "1 partition is placed on worker-5, not here at the moment",
    )
    assert picture.partitions == {"owned": 1, "preparing": 1, "moving": 1, "paused": 1}
    console = Console(width=120, height=24, highlight=False, markup=False, force_terminal=False)
    with console.capture() as captured:
        console.print(draw(picture, console, fit=False))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert "partitions   3: 1 owned, 1 preparing to move, 1 moving, 0 unowned; 1 paused" in lines
    said = "no planned moves; worker-1 to own nothing; 1 partition paused (p3); 2 partitions placed (p0, p1)"
    assert f"orders       {said}" in lines


def test_a_fleet_without_orders_says_nothing_of_them() -> None:
    picture = take_picture("here", situation(claim()).records, Orders())
    assert picture.verdict.summary == "All is well: 1 partition on 2 workers, each with one owner."
    console = Console(width=120, height=24, force_terminal=False)
    with console.capture() as captured:
        console.print(draw(picture, console, fit=False))
    assert "orders" not in captured.get()
    assert "paused" not in captured.get()


def test_a_drained_worker_is_shown_as_such_unless_it_is_leaving_anyway() -> None:
    found = situation(claim(), members={"worker-1": member("draining")})
    rows = worker_rows(found.records, NOW, Orders(drained=("worker-0", "worker-1"), placed={"p0": "worker-0"}))
    assert [(row.worker, row.state, row.placed) for row in rows] == [
        ("worker-0", "drained", 1),
        ("worker-1", "draining", 0),
    ]
