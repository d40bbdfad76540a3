"""What another process has begun to write is not read yet."""

from __future__ import annotations

from pathlib import Path

from tests.integration.processes import whole_lines


def test_a_line_that_is_on_its_way_is_left_for_later(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert whole_lines(journal) == []
    journal.write_text("p0 1")
    assert whole_lines(journal) == []
    journal.write_text("p0 1\np1 2\np0 1")
    assert whole_lines(journal) == ["p0 1", "p1 2"]
    journal.write_text("p0 1\np1 2\np0 17\n")
    assert whole_lines(journal) == ["p0 1", "p1 2", "p0 17"]
