"""What `parti doctor` makes of what it finds."""

from __future__ import annotations

from typing import Any

import pytest

from parti.core.checkup import (
    Finding,
    Level,
    judge_bucket,
    judge_cliff,
    judge_clock,
    judge_fleets,
    judge_leftovers,
    judge_limits,
    judge_server,
    judge_stream,
    judge_sync,
)
from parti.core.role_calls import ROLES, Names, calls_of
from parti.model.subjects import covers, within

LEAST = (2, 14, 0)
HERE = ("nats://127.0.0.1:4222",)


def stream(
    state: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **config: Any
) -> dict[str, Any]:
    given = {"name": "S", "retention": "limits", "storage": "file", "allow_direct": True, "num_replicas": 1, **config}
    return {"config": given, "state": {"messages": 5, **(state or {})}, **({"cluster": cluster} if cluster else {})}


def worst(findings: Any) -> list[tuple[str, str]]:
    """Level and text of what is not well."""
    return [(f.level.value, f.text) for f in findings if f.level is not Level.OK]


def test_every_warning_and_error_says_what_it_means_and_what_to_do() -> None:
    found: list[Finding] = [
        *judge_server({}, (2, 10, 0), LEAST, ("nats://10.0.0.1:4222",)),
        *judge_limits({"memory": 99, "limits": {"max_memory": 100}}),
        *judge_stream("S", stream(sealed=True, max_msgs_per_subject=5), replicas=3, clustered=True),
        *judge_bucket("b", stream(storage="memory", max_msgs_per_subject=9), replicas=3, clustered=True),
        judge_sync(120_000_000_000, False, replicas=1),
        judge_clock(-7.0),
        *judge_leftovers(consumers=["a"], mirrors=["m"], streams=["s"], running=False, stream="S"),
    ]
    bad = [f for f in found if f.level in {Level.WARNING, Level.ERROR}]
    assert len(bad) >= 8
    assert all(f.meaning and f.fix for f in bad)


def test_an_old_server_is_an_error_and_a_new_one_is_not() -> None:
    assert worst(judge_server({}, (2, 13, 9), LEAST, HERE)) == [("error", "nats-server 2.13.9 is older than 2.14")]
    assert worst(judge_server({"max_payload": 1}, (2, 15, 1), LEAST, HERE)) == []
    assert worst(judge_server({}, (0, 0, 0), LEAST, HERE))[0][0] == "warning"


def test_a_server_without_authentication_is_fine_on_this_machine_only() -> None:
    away = ("nats://10.0.0.1:4222",)
    assert [level for level, _ in worst(judge_server({}, (2, 15, 1), LEAST, away))] == ["warning", "note"]
    closed = {"auth_required": True, "tls_required": True}
    assert worst(judge_server(closed, (2, 15, 1), LEAST, away)) == []


def test_limits_are_judged_by_what_is_left() -> None:
    assert worst(judge_limits({"memory": 5, "limits": {"max_memory": -1}})) == []
    assert worst(judge_limits({"storage": 85, "limits": {"max_storage": 100}})) == [
        ("warning", "85 of 100 bytes storage are used")
    ]
    assert worst(judge_limits({"consumers": 99, "limits": {"max_consumers": 100}}))[0][0] == "error"
    tiers = {"tiers": {"R3": {"streams": 10, "limits": {"max_streams": 10}}}}
    assert worst(judge_limits(tiers)) == [("error", "10 of 10 streams of tier R3 are used")]


@pytest.mark.parametrize(
    ("config", "level", "part"),
    [
        ({"allow_direct": False}, "warning", "allow_direct is off"),
        ({"storage": "memory"}, "warning", "in memory, on one server"),
        ({"sealed": True}, "error", "sealed"),
        ({"max_msgs_per_subject": 10}, "warning", "keeps 10 messages of each subject"),
        ({"max_age": 3_600_000_000_000}, "note", "max_age=3,600 s"),
        ({"max_age": 3_600_000_000_000, "retention": "workqueue"}, "warning", "max_age=3,600 s"),
        ({"max_bytes": 1000, "discard": "new"}, "note", "max_bytes=1,000"),
        ({"max_consumers": 3}, "warning", "of at most 3 consumers"),
    ],
)
def test_what_is_wrong_with_a_stream_is_named(config: dict[str, Any], level: str, part: str) -> None:
    found = worst(judge_stream("S", stream({"consumer_count": 2}, **config), replicas=1, clustered=False))
    assert [(level, True)] == [(lev, part in text) for lev, text in found]


def test_a_work_queue_needs_no_direct_reads() -> None:
    found = judge_stream("S", stream(retention="workqueue", allow_direct=False), replicas=1, clustered=False)
    assert worst(found) == []


def test_replicas_are_judged_against_settings_and_cluster() -> None:
    well = stream(cluster={"leader": "n1", "replicas": []}, num_replicas=3)
    assert worst(judge_stream("S", well, replicas=3, clustered=True)) == []
    alone = stream(cluster={"leader": "n1"})
    assert worst(judge_stream("S", alone, replicas=1, clustered=True)) == [("warning", "one replica in a cluster")]
    assert worst(judge_stream("S", alone, replicas=3, clustered=True))[0][1].endswith("the settings want 3")
    broken = stream(cluster={"replicas": [{"name": "n2", "offline": True}]}, num_replicas=3)
    assert worst(judge_stream("S", broken, replicas=3, clustered=True)) == [
        ("error", "it has no leader"),
        ("warning", "offline: n2"),
    ]


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({"subjects": 20}, Level.OK),
        ({"storage": "memory"}, Level.OK),
        ({}, Level.OK),
        ({"hot_mirror": "off"}, Level.WARNING),
        ({"memory_left": 10}, Level.WARNING),
        ({"retention": "workqueue"}, Level.NOTE),
    ],
)
def test_the_cliff_is_seen_before_anybody_falls(given: dict[str, Any], level: Level) -> None:
    facts = {
        **{"storage": "file", "retention": "limits", "subjects": 2000, "hot_mirror": "auto"},
        **{"mirror_bytes": 100, "memory_left": -1},
        **given,
    }
    finding = judge_cliff("S", **facts)
    assert finding.level is level
    if level is not Level.OK:
        assert "about 2,1" in finding.meaning  # as measured: 2.2 k a second with 2,000 subjects


def test_syncing_is_judged_by_what_can_be_lost() -> None:
    assert judge_sync(None, False, replicas=1).level is Level.NOTE
    assert judge_sync(0, True, replicas=1).level is Level.OK
    assert judge_sync(120_000_000_000, False, replicas=1).level is Level.WARNING
    assert judge_sync(120_000_000_000, False, replicas=3).level is Level.NOTE


def test_clocks_may_differ_a_little() -> None:
    assert [judge_clock(s).level.value for s in (0.1, -0.7, 30.0)] == ["ok", "note", "warning"]


def test_what_is_left_behind_depends_on_who_is_there() -> None:
    nothing: dict[str, Any] = {"consumers": [], "mirrors": [], "streams": [], "stream": "S"}
    assert worst(judge_leftovers(running=True, **nothing)) == []
    assert worst(judge_leftovers(running=True, **{**nothing, "mirrors": ["parti-hot-S"]})) == []
    found = worst(judge_leftovers(running=False, **{**nothing, "mirrors": ["parti-hot-S"], "consumers": ["c"] * 7}))
    assert [level for level, _ in found] == ["note", "warning"]


# ── roles ─────────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = Names("ORDERS", "parti", "parti", "parti-dlq", "parti.dlq")


@pytest.mark.parametrize("role", ROLES)
def test_a_probe_is_covered_by_the_permission_that_it_stands_for(role: Any) -> None:
    for call in calls_of(role, NAMES):
        assert call.purpose
        assert covers(call.subject, call.probe) or call.subject == call.probe, call


def test_no_probe_can_delete_or_purge_anything() -> None:
    for role in ROLES:
        for call in calls_of(role, NAMES):
            if call.kind in {"none", "listen"}:
                continue
            assert ".PURGE." not in call.probe
            assert ".STREAM.DELETE." not in call.probe
            if ".CONSUMER.DELETE." in call.probe:
                assert call.probe.endswith(".parti-doctor")
            if ".CREATE." in call.probe or ".MSG.DELETE." in call.probe:
                assert call.kind == "broken"  # a body that is no JSON
            if not call.probe.startswith(("$JS.", "$SYS.")):
                assert call.kind == "expecting"  # a publish that a stream refuses


def test_roles_contain_each_other_as_people_expect() -> None:
    subjects = {role: [call.subject for call in calls_of(role, NAMES)] for role in ROLES}
    assert set(subjects["observer"]) < set(subjects["operator"])
    assert set(subjects["worker"]) < set(subjects["leader"])
    assert within("$KV.parti.progress.worker-0", subjects["worker"])
    assert not within("$KV.parti.claims.p0", subjects["worker"])
    assert within("$KV.parti.claims.p0", subjects["leader"])
    assert not within("$KV.parti.claims.p0", subjects["operator"])
    assert not any(subject.startswith("$KV.") for subject in subjects["observer"])


def test_fleets_with_the_same_prefix_on_a_stream_are_an_error_that_says_what_to_do() -> None:
    assert list(judge_fleets("S", "orders", "a", {}, ())) == []
    (finding,) = judge_fleets("S", "orders", "a", {"b": ["orders-worker-0"]}, ["b"])
    assert finding.level is Level.ERROR
    assert "bucket a and of bucket b have the same prefix orders, such as orders-worker-0" in finding.text
    assert "PARTI_PREFIX" in finding.fix
    assert len(list(judge_fleets("S", "orders", "a", {"b": ["orders-worker-0"]}, ["c"]))) == 2
