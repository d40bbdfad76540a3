"""A few hundred inputs of each fuzz target: hypothesis makes bytes, and mutations of the seeds of `make fuzz`.

`make fuzz` runs the same targets for as long as you like, and follows coverage.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from fuzz import all as fuzz_all
from fuzz import fleet
from fuzz.engine import be_quiet, run_mutations
from fuzz.mutation import mutate
from fuzz.run import line_of
from fuzz.target import Crashes, Target
from fuzz.targets import NAMES, load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

IN_PROCESS = tuple(name for name in NAMES if name != "commands")

target_of = cache(load)


@pytest.fixture(autouse=True)
def quiet() -> None:
    be_quiet()


@st.composite
def inputs(draw: st.DrawFn, name: str) -> bytes:
    seeds = target_of(name).seeds()
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=200))
    return mutate(draw(st.sampled_from(seeds)), random.Random(draw(st.integers(0, 2**32))), seeds)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_target_stands_what_hypothesis_makes(name: str) -> None:
    @settings(deadline=None, max_examples=examples_of(400), suppress_health_check=list(HealthCheck))
    @given(inputs(name))
    def stands(data: bytes) -> None:
        target_of(name).one(data)

    stands()


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_target_stands_its_seeds_and_mutations_of_them(name: str, tmp_path: Path) -> None:
    target = target_of(name)
    count = len(target.seeds()) + examples_of(400)
    outcome = run_mutations(target, Crashes(tmp_path), seconds=40, inputs=count, seed=1)
    assert not outcome.crashes, line_of(outcome)
    assert outcome.inputs


def test_commands_on_a_real_server_stand_hostile_records(tmp_path: Path) -> None:
    target = load("commands")
    with target.opened():
        outcome = run_mutations(target, Crashes(tmp_path), seconds=20, inputs=examples_of(200), seed=2)
    assert not outcome.crashes, line_of(outcome)


@pytest.mark.timeout(180)
async def test_a_fleet_goes_on_under_hostile_messages_and_records() -> None:
    assert await fleet.play_round(seed=1, number=0) >= fleet.MESSAGES


# ── the engines themselves ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def nothing() -> Iterator[None]:
    yield


def test_a_crash_is_kept_once_for_each_place_and_can_be_replayed(tmp_path: Path) -> None:
    def one(data: bytes) -> None:
        if b"!" in data:
            raise ValueError("planted")
        if b"?" in data:
            raise KeyError("planted")

    target = Target("planted", one, lambda: [b"a", b"!", b"?", b"!!"], nothing)
    outcome = run_mutations(target, Crashes(tmp_path), seconds=5, inputs=4, seed=1)
    assert sorted(outcome.crashes.values()) == [1, 2]
    kept = {Path(file).read_bytes() for file in outcome.files.values()}
    assert kept == {b"!", b"?"}
    line = line_of(outcome)
    assert "2 crashes" in line
    assert "python -m fuzz.run planted --replay" in line


def test_mutations_follow_from_the_seed() -> None:
    seeds = [b'{"a": 1}', b"abc"]
    first, again, other = (
        [mutate(b'{"a": 1}', chance, seeds) for _ in range(20)] for chance in map(random.Random, (1, 1, 2))
    )
    assert first == again != other


def test_the_fleet_gets_a_quarter_of_the_time_and_all_targets_have_some() -> None:
    names = [*NAMES, "fleet"]
    shares = fuzz_all.shares(names, 1800)
    assert shares["fleet"] == 450
    assert sum(shares.values()) == pytest.approx(1800)
    assert min(shares.values()) > 60
    assert fuzz_all.shares(["wire"], 60) == {"wire": 60}
