"""Every status that a server may answer a pull request with, by name, and what follows from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PullStep(enum.Enum):
    """What the pull engine does next."""

    ALIVE = "alive"
    """The pull stands; the server says that it is there."""
    PULL_AGAIN = "pull again"
    """This pull has ended in the ordinary way; send the next one."""
    PULL_LARGER = "pull larger"
    """The next message does not fit max_bytes; ask for it without that limit."""
    WAIT_FOR_ROOM = "wait for room"
    """The server has as many pulls or unacknowledged messages as it allows; try later."""
    NEW_SESSION = "new session"
    """Deliveries may be missing; verify the consumer and begin a new session."""
    RECREATE = "recreate"
    """The consumer is gone; make it again at the position."""
    UNPINNED = "unpinned"
    """Somebody else is pinned; pull without the id."""
    REFUSED = "refused"
    """The request is wrong; asking again as it is will not help."""


@dataclass(frozen=True, slots=True)
class _Row:
    code: int
    text: str
    step: PullStep


# First match wins; an empty text matches any description. Texts are matched in lower case.
TABLE: tuple[_Row, ...] = (
    _Row(100, "", PullStep.ALIVE),
    _Row(400, "", PullStep.REFUSED),
    _Row(404, "", PullStep.PULL_AGAIN),
    _Row(408, "requests pending", PullStep.WAIT_FOR_ROOM),
    _Row(408, "", PullStep.PULL_AGAIN),
    _Row(409, "consumer deleted", PullStep.RECREATE),
    _Row(409, "message size exceeds maxbytes", PullStep.PULL_LARGER),
    _Row(409, "batch completed", PullStep.PULL_AGAIN),
    _Row(409, "exceeded maxwaiting", PullStep.WAIT_FOR_ROOM),
    _Row(409, "exceeded maxackpending", PullStep.WAIT_FOR_ROOM),
    _Row(409, "leadership change", PullStep.NEW_SESSION),
    _Row(409, "server shutdown", PullStep.NEW_SESSION),
    _Row(409, "consumer is push based", PullStep.REFUSED),
    _Row(409, "exceeded maxrequest", PullStep.REFUSED),
    _Row(409, "", PullStep.PULL_AGAIN),
    _Row(412, "", PullStep.REFUSED),
    _Row(423, "", PullStep.UNPINNED),
    _Row(503, "", PullStep.NEW_SESSION),
)


def next_step(code: int, description: str) -> PullStep:
    """Look up what a status asks for. An unknown one begins a new session, which is always safe."""
    text = description.lower()
    for row in TABLE:
        if row.code == code and row.text in text:
            return row.step
    return PullStep.NEW_SESSION
