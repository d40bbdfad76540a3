"""A planned move, as a table: what is the next step, given where the claim, its owner and its heir stand?

    owned ──> preparing ──> moving ──> owned by the next
                  │            │
                  └── kept     └── given back, or to somebody else

The claim's state and the health records of the two workers are all that goes in, so a new rebalancer continues what
the last one began. While a claim is *preparing* its owner goes on handling; only when the heir pulls and carries the
subject is the owner told to let go (*moving*). A live owner is waited for as long as its handler runs, a dead one not
at all.
"""

from __future__ import annotations

import enum

from parti.model.fleet import ClaimState


class Owner(enum.Enum):
    """What is known of the owner."""

    HANDLES = "handles"
    LET_GO = "let go"
    """It reported so, or its id belongs to a new process."""
    AWAY = "away"
    """It stopped, and is expected back."""
    GONE = "gone"
    UNSURE = "unsure"
    """It is not there, but it is too early to call it gone."""


class Heir(enum.Enum):
    """What is known of the next owner."""

    READY = "ready"
    """It pulls, and its consumer carries the subject."""
    COMING = "coming"
    LATE = "late"
    """It is there, but has not got ready in time."""
    UNABLE = "unable"
    """There is none, or it is gone or about to leave."""
    UNSURE = "unsure"


class Step(enum.Enum):
    """What to do."""

    WAIT = "wait"
    RELEASE = "release"
    KEEP = "keep"
    GIVE = "give"
    """To the heir."""
    GIVE_BACK = "give back"
    GIVE_ELSEWHERE = "give elsewhere"
    ORPHAN = "orphan"
    """Nobody handles it: it is given away like any partition without owner, to the heir if that is still there."""


_W, _ORPHAN, _KEEP = Step.WAIT, Step.ORPHAN, Step.KEEP

# Columns: the heir is ready, coming, late, unable, unsure.
_PREPARING: dict[Owner, tuple[Step, ...]] = {
    Owner.HANDLES: (Step.RELEASE, _W, _KEEP, _KEEP, _W),
    Owner.LET_GO: (Step.GIVE_BACK,) * 5,
    Owner.AWAY: (_KEEP,) * 5,
    Owner.GONE: (_ORPHAN,) * 5,
    Owner.UNSURE: (_W,) * 5,
}
_MOVING: dict[Owner, tuple[Step, ...]] = {
    Owner.HANDLES: (_W, _W, _W, Step.GIVE_BACK, _W),
    Owner.LET_GO: (Step.GIVE, Step.GIVE, Step.GIVE, Step.GIVE_ELSEWHERE, _W),
    Owner.AWAY: (Step.GIVE, Step.GIVE, Step.GIVE, _ORPHAN, _W),
    Owner.GONE: (_ORPHAN,) * 5,
    Owner.UNSURE: (_W,) * 5,
}
_ROWS: dict[ClaimState, dict[Owner, tuple[Step, ...]]] = {"preparing": _PREPARING, "moving": _MOVING}
TABLE: dict[tuple[ClaimState, Owner, Heir], Step] = {
    (state, owner, heir): step
    for state, rows in _ROWS.items()
    for owner, steps in rows.items()
    for heir, step in zip(Heir, steps, strict=True)
}


def next_step(state: ClaimState, owner: Owner, heir: Heir) -> Step:
    """The step that follows from the table."""
    return TABLE[state, owner, heir]
