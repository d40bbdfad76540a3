"""What the console shows: drawn from the fleet's records, and sent as differences that lead to the same picture."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.console.picture import SECTIONS, Colours, Difference, Picture, Reading, difference, draw, totals
from parti.coordination.orders import Situation
from parti.core.dead_letter import Letter
from parti.jetstream.kv import Entry
from parti.jobs.desk import Line
from parti.model.fleet import Claim, FleetRecord, HealthRecord, LeaderRecord, MemberRecord, Orders, encode, key_of
from parti.model.history import HistoryRecord
from parti.model.job import JobRecord, JobState

NOW = datetime(2026, 11, 17, 12, 0, tzinfo=UTC)
SECRET = "4e1b6f0c-nobody-may-see-this"

values = st.dictionaries(st.text(max_size=3), st.integers() | st.lists(st.integers(), max_size=2), max_size=6)
pictures = st.dictionaries(st.sampled_from(SECTIONS), values)


def apply(before: Picture, changes: Difference) -> Picture:
    """Do what the page does."""
    after = {section: dict(before.get(section, {})) for section in SECTIONS}
    for section, change in changes.items():
        for key in change["gone"]:
            del after[section][key]
        after[section].update(change["set"])
    return after


@settings(max_examples=examples_of(50))
@given(st.lists(pictures, min_size=2, max_size=4))
def test_differences_lead_from_each_picture_to_the_next(states: list[Picture]) -> None:
    shown = states[0]
    for before, after in pairwise(states):
        sent = json.loads(json.dumps(difference(before, after)))
        shown = apply(shown, sent)
        assert shown == {section: after.get(section, {}) for section in SECTIONS}


@given(pictures)
def test_a_picture_does_not_differ_from_itself(picture: Picture) -> None:
    assert difference(picture, json.loads(json.dumps(picture))) == {}


def member(**given: Any) -> MemberRecord:
    defaults: dict[str, Any] = {"token": SECRET, "incarnation": 1, "started_at": NOW, "ttl_seconds": 2.0}
    return MemberRecord(**{**defaults, "host": "h", "pid": 7, "version": "1.0", **given})


def claim(owner: str, state: Any = "owned", **given: Any) -> Claim:
    return Claim(owner=owner, state=state, claimed_at=NOW, ttl_seconds=2.0, term=1, fence_token=3, **given)


def situation(**records: msgspec.Struct) -> Situation:
    """Keys with `__` for the dot."""
    found = Situation()
    for revision, (key, record) in enumerate(records.items(), start=1):
        kind, _, name = key.partition("__")
        found.take(key_of(kind, name.replace("_", "-")) if name else kind, Entry(encode(record), revision))
    return found


def fleet() -> Situation:
    return situation(
        fleet=FleetRecord(prefix="parti", stream="S", template="s.{p}", stream_created="", first_seq=1),
        ids__w_0=member(),
        ids__w_1=member(state="away", identity="pod-1"),
        health__w_0=HealthRecord(incarnation=1, state="stable", rate=12.5, failing={"a": "KeyError: 'x'"}, at=NOW),
        leader__rebalancer=LeaderRecord(
            holder="w-0", token=SECRET, term=4, state="stable", since=NOW, ttl_seconds=2.0, reason="all is well"
        ),
        claims__a=claim("w-0"),
        claims__b=claim("w-0", "moving", next="w-1"),
        claims__c=claim("w-1"),
        claims__d=claim("w-9"),
        claims__e=claim("", "free"),
        claims__f=claim("", "free"),
        orders=Orders(paused=("e",), drained=("w-0",)),
    )


def test_each_partition_has_the_state_that_an_operator_would_name() -> None:
    picture = draw(Reading(situation=fleet()), Colours(), NOW)
    states = {name: (shown[0], shown[1], shown[2]) for name, shown in picture["partitions"].items()}
    assert states == {
        "a": ("w-0", "owned", ""),
        "b": ("w-0", "moving", "w-1"),
        "c": ("w-1", "waiting", ""),
        "d": ("w-9", "unowned", ""),
        "e": ("", "paused", ""),  # f, which nobody wants, is not shown
    }
    assert picture["failing"] == {"a": "KeyError: 'x'"}


def test_workers_are_shown_with_their_lease_their_orders_and_what_they_say() -> None:
    picture = draw(Reading(situation=fleet(), lags={"w-0": 5, "left-behind": 900}), Colours(), NOW)
    shown = picture["workers"]
    assert {name: row["state"] for name, row in shown.items()} == {"w-0": "drained", "w-1": "away", "w-9": "gone"}
    assert shown["w-0"]["drained"]
    assert shown["w-0"]["roles"] == ["rebalancer"]
    assert (shown["w-0"]["rate"], shown["w-0"]["lag"], shown["w-0"]["pid"]) == (12.5, 5, 7)
    assert picture["fleet"]["lag"] == 5
    assert picture["fleet"]["unowned"] == 1
    assert picture["fleet"]["problems"] == ["1 partitions have no live owner"]
    assert totals(Reading(situation=fleet(), lags={"w-0": 5, "left-behind": 900})) == (12.5, 5)


def test_no_token_no_header_and_no_payload_gets_into_a_picture() -> None:
    letter = Letter(3, NOW, {"Parti-Error": "bad", "Parti-Subject": "s.a", "Authorization": SECRET})
    record = HistoryRecord(partition="a", step="given", source="w-1", target="w-0", cause="join", at=NOW)
    job = JobRecord(stream="J", seq=1, subject="j", published_ns=0, state=JobState.RUNNING, incarnation=SECRET)
    jobs = {"j.1": Line("j.1", job)}
    reading = Reading(situation=fleet(), letters={3: letter}, moves={8: record}, jobs=jobs, points={1: (1.0, 2)})
    picture = draw(reading, Colours(), NOW)
    assert SECRET not in json.dumps(picture)
    assert picture["letters"]["3"][4:6] == ["s.a", "bad"]
    assert picture["moves"]["8"][1:6] == ["a", "w-1", "w-0", "join", "w-0 had only just come and got its share"]
    assert picture["jobs"]["j.1"]["state"] == "running"


def test_time_alone_changes_nothing() -> None:
    reading, colours = Reading(situation=fleet()), Colours()
    before = draw(reading, colours, NOW)
    assert difference(before, draw(reading, colours, NOW + timedelta(minutes=1))) == {}


def test_a_heartbeat_is_a_small_difference() -> None:
    reading, colours = Reading(situation=fleet()), Colours()
    before = draw(reading, colours, NOW)
    said = HealthRecord(incarnation=1, state="stable", rate=99.0, failing={"a": "KeyError: 'x'"}, at=NOW)
    reading.situation.take("health.w-0", Entry(encode(said), 99))
    changes = difference(before, draw(reading, colours, NOW))
    assert {name: list(change["set"]) for name, change in changes.items()} == {"fleet": ["rate"], "workers": ["w-0"]}


def test_a_fleet_without_workers_is_a_problem_that_is_named() -> None:
    assert draw(Reading(), Colours(), NOW)["fleet"]["problems"] == ["no worker is running"]


def test_a_worker_keeps_its_colour_and_a_new_one_gets_a_colour_that_is_free() -> None:
    colours = Colours()
    assert dict(colours.assign(["a", "b", "c"])) == {"a": 0, "b": 1, "c": 2}
    assert dict(colours.assign(["a", "c"])) == {"a": 0, "c": 2}
    assert dict(colours.assign(["a", "c", "d", "e"])) == {"a": 0, "c": 2, "d": 1, "e": 3}


def test_control_characters_of_letters_jobs_and_workers_are_shown_as_escapes() -> None:
    evil = "a\x1b[2J\u202e\u2028b"
    headers = dict.fromkeys(("Parti-Error", "Parti-Subject", "Parti-Partition", "Parti-Stream", "Parti-Worker"), evil)
    record = JobRecord(
        stream="S", seq=1, subject=evil, published_ns=1, state=JobState.RUNNING, phrase=evil, error=evil
    )
    reading = Reading(
        situation=situation(
            ids__w_0=member(),
            health__w_0=HealthRecord(incarnation=1, problems=(evil,), failing={"p": evil}, at=NOW),
        ),
        letters={3: Letter(3, NOW, headers)},
        jobs={"j.1": Line("j.1", record)},
    )
    picture = draw(reading, Colours(), NOW)
    for section in ("workers", "failing", "letters", "jobs"):
        text = json.dumps(picture[section], ensure_ascii=False)
        assert "a\\\\x1b[2J\\\\u202e\\\\u2028b" in text
        assert not set(text) & set("\x1b\u202e\u2028")
