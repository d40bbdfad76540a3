"""Every status of a pull, by name."""

from __future__ import annotations

import pytest

from parti.core.pull_status import TABLE, PullStep, next_step

# As nats-server 2.15 spells them.
SPELLED = [
    (100, "Idle Heartbeat", PullStep.ALIVE),
    (100, "FlowControl Request", PullStep.ALIVE),
    (400, "Bad Request", PullStep.REFUSED),
    (400, "Priority Group missing", PullStep.REFUSED),
    (404, "No Messages", PullStep.PULL_AGAIN),
    (408, "Requests Pending", PullStep.WAIT_FOR_ROOM),
    (408, "Request Timeout", PullStep.PULL_AGAIN),
    (408, "Interest Expired", PullStep.PULL_AGAIN),
    (409, "Consumer Deleted", PullStep.RECREATE),
    (409, "Message Size Exceeds MaxBytes", PullStep.PULL_LARGER),
    (409, "Batch Completed", PullStep.PULL_AGAIN),
    (409, "Exceeded MaxWaiting", PullStep.WAIT_FOR_ROOM),
    (409, "Exceeded MaxAckPending", PullStep.WAIT_FOR_ROOM),
    (409, "Leadership Change", PullStep.NEW_SESSION),
    (409, "Server Shutdown", PullStep.NEW_SESSION),
    (409, "Consumer is push based", PullStep.REFUSED),
    (409, "Exceeded MaxRequestBatch of 10", PullStep.REFUSED),
    (409, "Exceeded MaxRequestExpires of 1s", PullStep.REFUSED),
    (409, "Exceeded MaxRequestMaxBytes of 1", PullStep.REFUSED),
    (409, "Something New", PullStep.PULL_AGAIN),
    (412, "Precondition Failed", PullStep.REFUSED),
    (423, "Nats-Pin-Id mismatch", PullStep.UNPINNED),
    (423, "Nats-Wrong-Pin-Id", PullStep.UNPINNED),
    (503, "", PullStep.NEW_SESSION),
    (503, "No Responders", PullStep.NEW_SESSION),
]


@pytest.mark.parametrize(("code", "text", "step"), SPELLED)
def test_each_status_by_name(code: int, text: str, step: PullStep) -> None:
    assert next_step(code, text) is step
    assert next_step(code, text.upper()) is step


def test_every_row_of_the_table_is_reached_by_some_status() -> None:
    reached = set()
    for code, text, _ in SPELLED:
        reached.add(next(row for row in TABLE if row.code == code and row.text in text.lower()))
    assert reached == set(TABLE)


def test_every_text_in_the_table_can_match() -> None:
    assert all(row.text == row.text.lower() for row in TABLE)


@pytest.mark.parametrize("code", [0, 1, 99, 101, 200, 204, 401, 410, 424, 500, 504, 999])
def test_an_unknown_status_begins_a_new_session(code: int) -> None:
    assert next_step(code, "Whatever This Is") is PullStep.NEW_SESSION
