"""The comparison of topologies: what each layout holds, what can be told from arrivals, how bad arguments end."""

from __future__ import annotations

from array import array

import pytest
from benchmarks.approaches import parse
from benchmarks.arrivals import Arrivals
from benchmarks.topologies import TOPOLOGIES, Size, Topology

SECOND = 10**9
ALL = pytest.mark.parametrize("key", list(TOPOLOGIES))


def subjects(topology: Topology) -> list[str]:
    return sorted(subject for consumer in topology.consumers.values() for subject in consumer.subjects)


@ALL
def test_each_partition_is_read_by_one_consumer(key: str) -> None:
    topology = TOPOLOGIES[key](Size())
    assert subjects(topology) == sorted(topology.subjects)
    assert len(set(topology.subjects)) == 2_000


def test_layouts_are_those_of_the_design_document() -> None:
    sizes = {key: (len(t.streams), len(t.consumers)) for key, make in TOPOLOGIES.items() for t in [make(Size())]}
    assert sizes["P"] == (1, 2_000)
    assert sizes["A"] == (100, 2_000)
    assert sizes["B"][0] == 100
    assert 500 <= sizes["B"][1] <= 1_500
    assert sizes["C"] == (1, 25)
    assert sizes["C+mirror"] == (2, 25)


@ALL
def test_the_partitions_of_a_leaver_are_read_by_others(key: str) -> None:
    topology = TOPOLOGIES[key](Size())
    change = topology.without(0)
    left = {k: c for k, c in topology.consumers.items() if c not in change.delete}
    left |= {consumer.key: consumer for consumer in change.pull}
    assert sorted(s for consumer in left.values() for s in consumer.subjects) == sorted(topology.subjects)
    assert all(consumer.worker != 0 for consumer in left.values())
    moved = {topology.subjects[number] for number in topology.of_worker(0)}
    assert len(moved) == 80
    assert moved <= {subject for consumer in change.pull for subject in consumer.subjects}


def arrivals(ages_ms: list[float], *, rate: int, seconds: int) -> Arrivals:
    """So many messages a second for some seconds, each as old as the next of `ages_ms`."""
    sent = [n * SECOND // rate for n in range(rate * seconds)]
    came = sorted((ns + int(age * 1e6), int(age * 1e6)) for ns, age in zip(sent, ages_ms * len(sent), strict=False))
    samples = [(ns, number + 1, number + 1) for number, ns in enumerate(sent)]
    return Arrivals(array("q", (at for at, _ in came)), array("q", (age for _, age in came)), samples)


def test_a_load_that_is_held_has_its_percentiles() -> None:
    found = arrivals([2.0] * 98 + [9.0] * 2, rate=1_000, seconds=4).steady(1_000, SECOND, 3 * SECOND)
    assert (found["sent_per_s"], found["p50_ms"], found["p99_ms"]) == (1_000, 2.0, 9.0)
    assert not found["collapsed"]


def test_a_backlog_that_grows_is_a_collapse() -> None:
    slower = [3.0 * n for n in range(4_000)]
    found = arrivals(slower, rate=1_000, seconds=4).steady(1_000, SECOND, 3 * SECOND)
    assert found["collapsed"]
    assert found["delivered_per_s"] < 500
    assert found["backlog_msgs"] > 1_000


def test_recovery_is_timed_from_the_end_of_the_stall() -> None:
    # From second 2 on nothing comes until second 3; what gathered comes then within half a second.
    ages = [1.0] * 2_000 + [1_000.0 - n + n / 2 for n in range(1_000)] + [1.0] * 3_000
    found = arrivals(ages, rate=1_000, seconds=6).recovery(1_000, 2 * SECOND, 3 * SECOND, 6 * SECOND)
    assert found["backlog_at_resume"] == 1_000
    assert found["backlog_gone_s"] == pytest.approx(0.45, abs=0.1)
    assert found["p99_back_s"] == pytest.approx(0.5, abs=0.5)
    assert not found["collapsed_before"]


def test_what_never_recovers_has_no_time() -> None:
    ages = [1.0] * 2_000 + [10_000.0] * 4_000
    found = arrivals(ages, rate=1_000, seconds=6).recovery(1_000, 2 * SECOND, 3 * SECOND, 6 * SECOND)
    assert found["backlog_gone_s"] is None
    assert found["p99_back_s"] is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "C,D"], "unknown topology 'D': expected some of P,A,B,C,C+mirror"),
        (["--page", "--quick"], "--page measures nothing"),
        (["--results", __file__], "is not a directory"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments_get_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert text in printed
    assert printed.count("\n") == 1
