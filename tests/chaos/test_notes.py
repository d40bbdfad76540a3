"""Notes are read while they grow, whole lines only, and times are worked out from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.notes import Notes
from chaos.restarts import find_silent
from chaos.timings import Spread, held_by, pauses, takeover_s

MS = 1_000_000


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def call(seq: int, start_ms: float, end_ms: float, fence: int = 1) -> str:
    start, end = (
        f"{what} {int(ms * MS)} p {seq} {fence} worker-0 7\n" for what, ms in (("S", start_ms), ("E", end_ms))
    )
    return start + end


def test_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    append(tmp_path / "a.notes", call(1, 1, 2) + "S 3000000 p 2 1 wor")
    notes.poll(everything=True)
    assert notes.calls["p"].by_start()[-1].seq == 1
    append(tmp_path / "a.notes", "ker-0 7\n")
    notes.poll(everything=True)
    assert [c.seq for c in notes.calls["p"].by_start()] == [1, 2]
    assert notes.calls["p"].by_start()[-1].end_ns == 0
    notes.close()


def test_what_is_published_is_unfinished_until_a_handler_has_ended_in_whatever_order_it_is_read(
    tmp_path: Path,
) -> None:
    notes = Notes(tmp_path)
    append(tmp_path / "x.published", "1 p 5 6\n2 p 7 8\n")
    notes.poll(everything=True)
    assert notes.unfinished == {1, 2}
    append(tmp_path / "a.notes", call(1, 1, 2) + call(3000, 3, 4))
    notes.poll(everything=True)
    append(tmp_path / "x.published", "3000 p 9 10\n")
    notes.poll(everything=True)
    assert notes.unfinished == {2}
    assert notes.acknowledged == 3
    notes.close()


def test_more_than_one_portion_is_read(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    append(tmp_path / "a.notes", "".join(call(seq, seq, seq + 0.5) for seq in range(1, 40_001)))
    notes.poll(everything=True)
    assert notes.finished == len(notes.calls["p"]) == 40_000
    assert notes.stray == 0
    notes.close()


def test_the_pause_of_a_move_leaves_out_the_time_in_which_nothing_was_there(tmp_path: Path) -> None:
    append(tmp_path / "a.notes", call(1, 0, 10) + call(2, 30, 40))
    append(tmp_path / "b.notes", call(3, 100, 110, fence=2) + call(4, 111, 112, fence=2))
    append(
        tmp_path / "x.published", "".join(f"{seq} p {sent * MS} 0\n" for seq, sent in ((2, 29), (3, 60), (4, 100)))
    )
    notes = Notes(tmp_path)
    notes.poll(everything=True)
    found = pauses(notes)
    assert found.at_moves == [pytest.approx(0.040)]
    assert found.otherwise == [pytest.approx(0.001), pytest.approx(0.001)]
    notes.close()


def test_who_holds_what_and_how_long_a_takeover_took(tmp_path: Path) -> None:
    append(tmp_path / "a.notes", call(1, 0, 10))
    notes = Notes(tmp_path)
    notes.poll(everything=True)
    rows = notes.rows()
    assert held_by(notes, "a") == ["p"]
    assert takeover_s(notes, "p", "a", 20 * MS, rows["p"]) is None
    append(tmp_path / "b.notes", call(2, 520, 530, fence=2))
    notes.poll(everything=True)
    assert held_by(notes, "a") == []
    assert held_by(notes, "b") == ["p"]
    assert takeover_s(notes, "p", "a", 20 * MS, rows["p"]) == pytest.approx(0.5)
    notes.close()


def test_a_spread_of_few_figures() -> None:
    assert Spread.of([]) == Spread(0, 0.0, 0.0, 0.0)
    assert Spread.of([2.0]) == Spread(1, 2.0, 2.0, 2.0)
    assert Spread.of(n / 100 for n in range(1, 101)).p50_s == pytest.approx(0.505)


def test_a_handler_that_raised_has_ended_and_its_message_is_remembered(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    append(tmp_path / "x.published", "1 p 5 6\n")
    append(tmp_path / "a.notes", call(1, 1, 2).replace("E ", "R ") + call(2, 3, 4))
    notes.poll(everything=True)
    notes.close()
    assert notes.raised == {1}
    assert not notes.unfinished
    assert notes.finished == 2


@pytest.mark.parametrize(
    ("since_ms", "workers", "found"),
    [
        pytest.param(3, ["a", "b"], [], id="all are at work"),
        pytest.param(4, ["a", "b"], ["a is silent on 1 of its 2 partitions ['p']"], id="one partition stands still"),
        pytest.param(4, ["b"], ["1 partitions of nobody that runs ['p']"], id="nobody has taken it over"),
        pytest.param(3, ["a", "b", "c"], ["c is silent on 0 of its 0 partitions []"], id="a worker without any"),
        pytest.param(
            90,
            ["a", "b"],
            ["a is silent on 2 of its 2 partitions ['p', 'q']", "b is silent on 1 of its 1 partitions ['r']"],
            id="all stand still",
        ),
    ],
)
def test_workers_and_partitions_that_stand_still_are_found(
    tmp_path: Path, since_ms: int, workers: list[str], found: list[str]
) -> None:
    notes = Notes(tmp_path)
    append(tmp_path / "a.notes", call(1, 3, 4) + call(2, 5, 6).replace(" p ", " q "))
    append(tmp_path / "b.notes", call(3, 6, 7).replace(" p ", " r "))
    notes.poll(everything=True)
    notes.close()
    assert find_silent(notes, workers, ["p", "q", "r"], since_ms * MS) == found
