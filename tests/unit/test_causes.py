"""Each change of owner has a cause: the planner's own reason in a word, carried by the claim into the history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from parti.core.causes import Cause, sentence
from parti.core.fleet_view import BeginMove, FleetView, Free, Give, Keep, MemberView, Policy
from parti.core.history import changes
from parti.core.planner import Planner
from parti.model.fleet import Claim, ClaimState, HealthRecord, Orders
from parti.model.history import HistoryRecord, history_pattern, history_subject, missing_before
from parti.model.subjects import covers, overlap
from parti.strategies import Strategy, strategy_named

NOW = datetime(2026, 11, 17, tzinfo=UTC)
PARTITIONS = ("p0", "p1", "p2", "p3")


def claim(owner: str, state: ClaimState = "owned", **fields: Any) -> Claim:
    return Claim(owner=owner, incarnation=1, claimed_at=NOW, ttl_seconds=5, term=1, state=state, **fields)


def shared(*owners: str) -> dict[str, Claim]:
    return {p: claim(owner) for p, owner in zip(PARTITIONS, owners, strict=True)}


def view(
    claims: Mapping[str, Claim], *workers: str, now_s: float = 100.0, left: tuple[str, ...] = (), **more: Any
) -> FleetView:
    health = {w: HealthRecord(incarnation=1, pulling=True, ready=9, applied=9, at=NOW) for w in workers}
    given: dict[str, Any] = {"members": {w: MemberView(1) for w in workers}, "partitions": PARTITIONS, **more}
    return FleetView(now_s=now_s, claims=claims, health=health, left=frozenset(left), **given)


def causes_of(found: FleetView, before: FleetView | None = None, strategy: Strategy | None = None) -> set[str]:
    """What the planner gives as causes, after it has seen the fleet as it was before."""
    planner = Planner(strategy or strategy_named("sticky"), Policy(hysteresis=0.0), elected_s=0.0)
    planner.step(before or replace(found, now_s=found.now_s - 50))
    decision = planner.step(found)
    assert decision.commands, decision
    return {
        str(command.cause) for command in decision.commands if isinstance(command, Give | BeginMove | Free | Keep)
    }


BOTH = ("worker-0", "worker-1")


@pytest.mark.parametrize(
    ("found", "before", "cause"),
    [
        (view({}, "worker-0"), None, Cause.NEW),
        (view(shared("worker-0", "worker-1", "worker-0", "worker-1"), "worker-0"), None, Cause.CRASH),
        (view(shared(*BOTH, *BOTH), "worker-0", left=("worker-1",)), None, Cause.LEAVE),
        (view(shared(*["worker-0"] * 4), *BOTH, orders=Orders(placed={"p0": "worker-1"})), None, Cause.PLACE),
        (view(shared(*BOTH, *BOTH), "worker-0", orders=Orders(paused=("p0",))), None, Cause.PAUSE),
        (view(shared(*BOTH, *BOTH), *BOTH, partitions=("p0", "p1", "p2")), None, Cause.UNWANTED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_planner_names_the_cause(found: FleetView, before: FleetView | None, cause: Cause) -> None:
    assert cause in causes_of(found, before)


def test_a_drain_by_order_and_a_worker_that_stops_are_told_apart() -> None:
    claims = shared(*BOTH, *BOTH)
    assert causes_of(view(claims, *BOTH, orders=Orders(drained=("worker-1",)))) == {"drain"}
    stopping = {"worker-0": MemberView(1), "worker-1": MemberView(1, "draining")}
    assert causes_of(view(claims, *BOTH, members=stopping)) == {"leave"}


def test_a_move_to_somebody_who_has_just_come_is_for_the_join() -> None:
    before = view(shared(*["worker-0"] * 4), "worker-0", now_s=50.0)
    joined = view(shared(*["worker-0"] * 4), *BOTH, now_s=60.0)
    planner = Planner(strategy_named("sticky"), Policy(), elected_s=0.0)
    planner.step(before)
    assert planner.step(joined).commands == ()  # the window
    decision = planner.step(replace(joined, now_s=70.0))
    assert {c.cause for c in decision.commands if isinstance(c, BeginMove)} == {"join"}


def test_a_move_among_those_that_have_long_been_there_is_for_the_balance() -> None:
    uneven = shared("worker-0", "worker-0", "worker-0", "worker-1")
    assert causes_of(view(uneven, *BOTH)) == {"balance"}
    loads = {"p0": 5.0, "p1": 5.0, "p2": 1.0, "p3": 1.0}
    planner = Planner(strategy_named("load"), Policy(hysteresis=0.0, load_window_s=1.0), elected_s=0.0)
    lopsided = shared("worker-0", "worker-0", "worker-1", "worker-1")
    causes = set()
    for now_s in range(50, 150, 10):
        decision = planner.step(view(lopsided, *BOTH, now_s=float(now_s), weights=loads))
        causes |= {c.cause for c in decision.commands if isinstance(c, BeginMove)}
    assert causes == {"load"}


def test_the_same_id_with_a_new_process_is_a_return() -> None:
    members = {"worker-0": MemberView(2)}
    assert causes_of(view(shared(*["worker-0"] * 4), "worker-0", members=members)) == {"return"}


def test_the_cause_of_a_move_is_kept_until_it_is_done() -> None:
    moving = claim("worker-0", "moving", next="worker-1", reason="placed by an operator", cause="place", awaits=3)
    found = view({"p0": moving}, *BOTH, partitions=("p0",), orders=Orders(placed={"p0": "worker-1"}))
    decision = Planner(strategy_named("sticky"), Policy(), elected_s=0.0).step(found)
    assert decision.commands == (Give("p0", "worker-1", "placed by an operator", "place"),)


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_a_sentence(cause: Cause) -> None:
    text = sentence(cause, "worker-0", "worker-1", "words")
    assert text
    assert "{" not in text


def test_a_cause_of_another_version_falls_back_to_the_planners_words() -> None:
    assert sentence("sunspots", "worker-0", "worker-1", "the sun shines") == "the sun shines"
    assert sentence("", "", "", "") == "no reason was recorded"


# ── the history ───────────────────────────────────────────────────────────────────────────────────────────────────


def recorded(before: Claim | None, after: Claim) -> list[tuple[str, str, str, str]]:
    found = changes({"p0": before}, {"p0": after}, by="worker-9", at=NOW, took_s={"p0": 0.25})
    return [(r.step, r.source, r.target, r.cause) for r in found]


def test_a_record_is_made_of_each_change_of_owner_and_of_nothing_else() -> None:
    owned = claim("worker-0", fence_token=7, cause="new")
    preparing = msgspec.structs.replace(owned, state="preparing", next="worker-1", cause="join")
    moving = msgspec.structs.replace(preparing, state="moving")
    given = claim("worker-1", fence_token=8, cause="join")
    free = msgspec.structs.replace(given, owner="", state="free", cause="pause")
    assert recorded(None, owned) == [("given", "", "worker-0", "new")]
    assert recorded(owned, preparing) == []
    assert recorded(preparing, moving) == []
    assert recorded(moving, given) == [("given", "worker-0", "worker-1", "join")]
    kept = msgspec.structs.replace(preparing, state="owned", next="", cause="unready")
    assert recorded(preparing, kept) == [("kept", "worker-0", "worker-0", "unready")]
    assert recorded(given, free) == [("freed", "worker-1", "", "pause")]
    assert recorded(free, free) == []
    again = claim("worker-2", fence_token=9, cause="unowned")
    assert recorded(free, again) == [("given", "", "worker-2", "unowned")]


def test_a_hole_in_the_history_shows() -> None:
    def record(source: str, target: str) -> HistoryRecord:
        return HistoryRecord(partition="p", step="given", source=source, target=target, at=NOW)

    assert missing_before([record("", "a"), record("a", "b"), record("b", "a")]) == set()
    assert missing_before([record("", "a"), record("c", "b"), record("b", "d")]) == {1}


def test_any_partition_has_a_subject_of_its_own() -> None:
    subjects = [history_subject("b", name) for name in ("etch1.c3", "*.7", "ä b")]
    assert subjects == ["b-history.etch1.c3", "b-history.=2A.7", "b-history.=C3=A4=20b"]
    assert all(covers(history_pattern("b"), subject) for subject in subjects)
    # A bucket is often named like the app, and so are its messages.
    assert not overlap(history_pattern("orders"), "orders.>")
