"""Log lines that clients can provoke appear once in a while, with the number of those that were left out."""

from __future__ import annotations

import logging

import pytest

from parti.telemetry.log_rate import LogRate, limited_loggers


def test_one_line_in_each_interval_passes_and_the_next_one_counts_the_others() -> None:
    now = 0.0
    rate = LogRate(10.0, lambda: now)
    assert [rate.passes("a") for _ in range(4)] == [0, None, None, None]
    assert rate.passes("b") == 0
    now = 9.9
    assert rate.passes("a") is None
    now = 10.0
    assert [rate.passes("a"), rate.passes("a")] == [4, None]
    now = 20.0
    assert rate.passes("a") == 1


def test_keys_from_outside_do_not_fill_the_memory() -> None:
    rate = LogRate(10.0, lambda: 0.0)
    for number in range(10_000):
        rate.passes(str(number))
    assert rate.passes("0") == 0  # forgotten meanwhile


def test_lines_of_libraries_are_limited_for_the_length_of_a_block(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("some.library")
    with limited_loggers("some.library"):
        for number in range(100):
            log.warning("bad request %d", number)
    assert [record.getMessage() for record in caplog.records] == ["bad request 0"]
    log.warning("bad request 100")
    assert len(caplog.records) == 2
