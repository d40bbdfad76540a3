"""Ending a migration where it stands: from where the fleet may have what is withheld, and what speaks against it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from parti.core.abandonment import Abandonment, Around, Doubt, judge
from parti.core.migration import FOREVER, ConsumerState
from parti.errors import ConfigError
from parti.model.migration import Holder, OldConsumer

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SAME = Around("limits", same_stream=True, returning=False, at=NOW)
QUEUE = Around("workqueue", same_stream=True, returning=False, at=NOW)
ANEW = Around("limits", same_stream=False, returning=False, at=NOW)
RETURNING = Around("limits", same_stream=True, returning=True, at=NOW)


def old(**fields: Any) -> OldConsumer:
    return OldConsumer(**{"partition": "p", "subject": "s.p", "consumer": "old-p", "position": 5, **fields})


def state(until: datetime | None = None, **fields: Any) -> ConsumerState:
    config = {"pause_until": until.isoformat()} if until else {}
    known: dict[str, Any] = {"subjects": ("s.p",), "ack_floor": 10, "delivered": 10, "ack_pending": 0, "pending": 3}
    return ConsumerState(**{"name": "old-p", "config": config, "paused": bool(until), **known, **fields})


@pytest.mark.parametrize(
    ("record", "found", "around", "doubt", "position", "holder"),
    [
        (old(consumer="", position=0), None, SAME, None, 0, "fleet"),
        (old(), state(FOREVER), SAME, None, 11, "fleet"),
        (old(holder="fleet", position=30), state(FOREVER), SAME, None, 30, "fleet"),
        (old(), state(FOREVER, ack_floor=7, ack_pending=2), SAME, "busy", 8, "fleet"),
        # A pause that ends, as the first one of a switch does: it goes on by itself.
        (old(), state(NOW), SAME, "read", 11, "both"),
        (old(), state(), SAME, "read", 11, "both"),
        (old(), state(ack_floor=7, ack_pending=2), SAME, "read", 8, "both"),
        (old(), None, SAME, "gone", 5, "fleet"),
        (old(holder="fleet", removed=True), None, SAME, None, 5, "fleet"),
        (old(holder="fleet", removed=True), None, RETURNING, "gone", 5, "fleet"),
        # What is unfinished stays in a work-queue, and a worker can have a subject only when nobody else has it.
        (old(), None, QUEUE, None, 5, "fleet"),
        (old(), state(FOREVER), QUEUE, "taken", 11, "fleet"),
        # Nothing that was recorded holds for another stream of the same name.
        (old(), None, ANEW, None, 0, "fleet"),
        (old(), state(), ANEW, "read", 0, "both"),
    ],
)
def test_the_fleet_begins_where_the_old_consumer_surely_was_and_what_may_be_repeated_is_said(
    record: OldConsumer,
    found: ConsumerState | None,
    around: Around,
    doubt: Doubt | None,
    position: int,
    holder: Holder,
) -> None:
    verdict = judge("p", record, found, around)
    assert verdict.old
    assert (verdict.doubt, verdict.old.position, verdict.old.holder) == (doubt, position, holder)
    assert (verdict.old.at, verdict.old.removed) == (NOW, bool(record.consumer) and found is None)


def test_a_partition_that_no_record_speaks_of_is_doubtful() -> None:
    verdict = judge("p", None, None, SAME)
    assert (verdict.old, verdict.doubt) == (None, "unknown")


def test_what_is_doubtful_is_refused_in_one_line_until_it_is_confirmed() -> None:
    read, gone = judge("p", old(), state(), SAME), judge("q", old(partition="q", consumer="old-q"), None, SAME)
    found = Abandonment((read, gone, judge("r", None, None, SAME)))
    with pytest.raises(ConfigError, match="say --yes if that is meant") as refused:
        found.check(confirmed=False)
    assert "\n" not in str(refused.value)
    assert all(name in str(refused.value) for name in ("old-p", "old-q", "(r)"))
    found.check(confirmed=True)
    Abandonment((judge("p", old(), state(FOREVER), SAME),)).check(confirmed=False)
    Abandonment(()).check(confirmed=False)


def test_a_work_queue_with_its_old_consumers_is_refused_even_when_it_is_confirmed() -> None:
    with pytest.raises(ConfigError, match=r"delete them first.*old-p"):
        Abandonment((judge("p", old(), state(), QUEUE),)).check(confirmed=True)
