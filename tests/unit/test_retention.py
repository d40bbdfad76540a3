"""Kinds of streams: each has its rules, and one that nobody knows is told in one line."""

from __future__ import annotations

import pytest

from parti.core.retention import INTEREST, LIMITS, WORK_QUEUE, retention_named
from parti.errors import ConfigError


def test_every_kind_is_found_by_the_servers_name_for_it() -> None:
    assert [retention_named(name) for name in ("limits", "interest", "workqueue")] == [LIMITS, INTEREST, WORK_QUEUE]


def test_a_kind_that_this_version_does_not_know_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as refused:
        retention_named("forever")
    assert str(refused.value) == (
        "the stream has the retention 'forever', which this version of parti does not know: expected one of limits, "
        "interest, workqueue; use a newer version of parti, or a stream of another kind"
    )
