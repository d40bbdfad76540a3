"""Dead letters as they are read back, and what belongs to their message."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from parti.core.dead_letter import ORIGINALS, Letter, dead_letter_subject, is_original, reason_of
from parti.core.quantiles import quantile
from parti.model.letter_mark import mark_subject, replay_id
from parti.model.mapping import SubjectMapping
from parti.model.message import Ownership, StoredMessage
from parti.model.partition import Partition


def letter(**headers: str) -> Letter:
    return Letter(7, datetime.now(UTC), {name.replace("_", "-"): value for name, value in headers.items()})


def test_the_headers_of_the_message_are_told_from_those_of_its_story() -> None:
    found = letter(
        Parti_Stream="S", Parti_Sequence="12", Parti_Error="E: x", Nats_Msg_Id="i", Trace="t", Parti_Worker="w"
    )
    assert (found.stream, found.origin_seq, found.error, found.worker) == ("S", 12, "E: x", "w")
    assert found.own_headers == {"Trace": "t"}


def test_a_letter_that_somebody_else_wrote_is_read_as_far_as_it_goes() -> None:
    found = letter(Parti_Sequence="many", Parti_Attempts="")
    assert (found.origin_seq, found.attempts, found.partition, found.payload_left_out) == (0, 0, "", False)


def test_reasons_are_what_errors_have_in_common() -> None:
    assert [reason_of(text) for text in ("ValueError: 1", "ValueError: 2", "", "broken")] == [
        *("ValueError", "ValueError", "unknown", "broken"),
    ]


@pytest.mark.parametrize("subject", [f"orders.{ORIGINALS}.9", f"{ORIGINALS}.9", f"orders.{ORIGINALS}.9.x"])
def test_no_subject_makes_its_dead_letter_look_like_an_original(subject: str) -> None:
    ownership = Ownership(Partition(subject, subject, {}), "S", "w")
    written = dead_letter_subject("dlq", StoredMessage(subject, b"", 7, ownership))
    assert not is_original(written)
    assert ORIGINALS not in written.split(".")
    assert written.startswith("dlq.S.orders." if subject.startswith("orders") else "dlq.S.sha256-")


def test_a_letter_has_the_same_id_however_often_it_is_sent() -> None:
    assert replay_id("dlq", "2026", 7) == replay_id("dlq", "2026", 7)
    assert len({replay_id("dlq", "2026", 7), replay_id("dlq", "2027", 7), replay_id("dlq", "2026", 8)}) == 3
    assert mark_subject("dlq", 7) == "dlq-replays.7"


def test_a_mapping_is_undone_where_nothing_was_lost() -> None:
    mapping = SubjectMapping("orders.*.*", "{{partition(16,1,2)}}.o.{{wildcard(2)}}.{{wildcard(1)}}")
    stored = mapping.apply("orders.eu.ada")
    assert stored is not None
    assert mapping.undo(stored) == "orders.eu.ada"
    assert mapping.undo("99.o.ada.eu") is None
    assert mapping.undo("o.ada.eu") is None
    assert SubjectMapping("orders.*.*", "o.{{wildcard(1)}}.{{partition(4,2)}}").undo("o.eu.1") is None


def test_quantiles_are_estimated_within_their_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, (0, 0, 0, 0), 0.5) == 0.0
    assert quantile(bounds, (10, 0, 0, 0), 0.5) == 0.5
    assert quantile(bounds, (0, 0, 10, 0), 0.5) == 3.0
    assert quantile(bounds, (98, 1, 1, 0), 0.99) == 2.0
    assert quantile(bounds, (0, 0, 0, 5), 0.99) == 4.0
