"""The page of states, with its diagrams: drawn from the tables in the code, written by docs/generate.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from parti.core.fleet_view import FleetState
from parti.core.move import TABLE, Heir, Owner
from parti.core.transitions import LANE_PHASES, WORKER_STATES, WORKING, claim_steps
from parti.model.fleet import ClaimState

Places = Mapping[str, tuple[float, float]]
Edges = Mapping[tuple[str, str], str]

WIDTH, BOX_W, BOX_H = 880, 128, 42
INK, MUTED, BOX, WORKING_BOX = "#1c2430", "#5d6b7d", "#eef3f8", "#e3f1e6"
WORKING_NAME = "working"

# No three in a line, so that no arrow runs behind a box.
WORKER_PLACES: Places = {
    "init": (80, 150),
    "claiming id": (290, 45),
    "standby": (240, 260),
    WORKING_NAME: (600, 130),
    "degraded": (540, 335),
    "draining": (790, 45),
    "stopped": (790, 335),
}
LANE_PLACES: Places = {
    "idle": (110, 190),
    "ready": (330, 45),
    "held": (330, 335),
    "running": (590, 45),
    "backoff": (790, 190),
    "closed": (590, 335),
}
CLAIM_PLACES: Places = {"owned": (440, 45), "free": (110, 270), "preparing": (770, 270), "moving": (440, 335)}
HEIGHT = 380


def pages() -> dict[str, str]:
    """By path below docs/: the text of every generated file."""
    return {
        "states.md": _page(),
        "states/worker.svg": draw("States of a worker and what follows on what", WORKER_PLACES, _worker_edges()),
        "states/lane.svg": draw("Phases of a lane and what follows on what", LANE_PLACES, _lane_edges()),
        "states/claim.svg": draw("States of a claim and the steps between them", CLAIM_PLACES, _claim_edges()),
    }


def _worker_edges() -> Edges:
    """The table, with the states of a working worker as one."""

    def name(state: FleetState) -> str:
        return WORKING_NAME if state in WORKING else state.value

    pairs = {(name(a), name(b)) for a, following in WORKER_STATES.items() for b in following}
    return {pair: "" for pair in sorted(pairs) if pair[0] != pair[1]}


def _lane_edges() -> Edges:
    return {(a.value, b.value): "" for a, following in LANE_PHASES.items() for b in sorted(following, key=str)}


def _claim_edges() -> Edges:
    return {edge: ", ".join(why) for edge, why in claim_steps().items()}


# ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def draw(label: str, places: Places, edges: Edges) -> str:
    """A diagram that stands alone: boxes where they are put, and an arrow for each edge."""
    missing = {name for edge in edges for name in edge} - places.keys()
    assert not missing, f"no place for {missing}"
    arrows = [_arrow(places[a], places[b], text, both=(b, a) in edges) for (a, b), text in edges.items()]
    boxes = [_box(name, *places[name]) for name in places]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(label)}" font-family="system-ui, sans-serif">\n'
        f'<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{MUTED}"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n' + "\n".join([*arrows, *boxes]) + "\n</svg>\n"
    )


def _box(name: str, x: float, y: float) -> str:
    fill = WORKING_BOX if name == WORKING_NAME else BOX
    return (
        f'<rect x="{x - BOX_W / 2}" y="{y - BOX_H / 2}" width="{BOX_W}" height="{BOX_H}" rx="8" fill="{fill}" '
        f'stroke="{MUTED}"/><text x="{x}" y="{y + 5}" text-anchor="middle" fill="{INK}" font-size="15">'
        f"{escape(name)}</text>"
    )


def _arrow(start: tuple[float, float], end: tuple[float, float], text: str, *, both: bool) -> str:
    """From border to border, bent to the left if there is one back."""
    bend = 40.0 if both else 0.0
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy)
    left = (dy / length, -dx / length)
    middle = ((start[0] + end[0]) / 2 + left[0] * bend, (start[1] + end[1]) / 2 + left[1] * bend)
    (x1, y1), (x2, y2) = _border(start, middle), _border(end, middle)
    path = (
        f'<path d="M{x1:.1f} {y1:.1f}Q{middle[0]:.1f} {middle[1]:.1f} {x2:.1f} {y2:.1f}" fill="none" '
        f'stroke="{MUTED}" stroke-width="1.4" marker-end="url(#tip)"/>'
    )
    if not text:
        return path
    # The curve passes half as far from the straight line as its control point; the words stand outside of it.
    x, y = middle[0] - left[0] * (bend / 2 - 8), middle[1] - left[1] * (bend / 2 - 8) + 4
    anchor = "middle" if abs(left[0]) < 0.3 else "start" if left[0] > 0 else "end"
    return path + (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{MUTED}" font-size="12" stroke="#fff" '
        f'stroke-width="4" paint-order="stroke">{escape(text)}</text>'
    )


def _border(centre: tuple[float, float], towards: tuple[float, float]) -> tuple[float, float]:
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    scale = min(
        (BOX_W / 2 + 2) / abs(dx) if dx else math.inf,
        (BOX_H / 2 + 2) / abs(dy) if dy else math.inf,
    )
    return centre[0] + dx * scale, centre[1] + dy * scale


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────────────────


PAGE = """\
# States

Generated by `docs/generate.py` from the tables in `parti.core.transitions` and `parti.core.move`; do not edit.
Simulated fleets are checked against them.

## Of a worker

![States of a worker](states/worker.svg)

*Working* stands for {working}: a worker that holds its id is in the one that follows from what it has and what the
rebalancer says, and any of them may follow any other. In `degraded` no handler is started: the lease has ended, or
the control plane cannot be reached or was reset. The states are shown by `parti status`, told to
[hooks](fleet.md#hooks-and-states) and counted in [`parti_fleet_state`](reference/metrics.md).

{workers}

## Of a claim

![States of a claim](states/claim.svg)

A planned move goes from `owned` over `preparing`, where the owner still handles while the next one gets ready, and
`moving`, where the owner lets go, to `owned` by the next. What the rebalancer does at each look follows from what is
known of the two. While the claim is *preparing*:

{preparing}

While it is *moving*:

{moving}

## Of a lane

![Phases of a lane](states/lane.svg)

A lane is `held` while nothing may be started in it: the partition is not this worker's yet, its state is being saved,
or what is about to start is being noted down first. `backoff` is the pause before the next attempt. A lane that is
`closed` has been let go of; what still runs in it is finished, and nothing else is started.

{lanes}
"""


def _page() -> str:
    workers = {state.value: [s.value for s in FleetState if s in after] for state, after in WORKER_STATES.items()}
    lanes = {phase.value: [p.value for p in LANE_PHASES if p in after] for phase, after in LANE_PHASES.items()}
    return PAGE.format(
        working=", ".join(f"`{state.value}`" for state in FleetState if state in WORKING),
        workers=_follows(workers),
        preparing=_moves("preparing"),
        moving=_moves("moving"),
        lanes=_follows(lanes),
    )


def _follows(table: Mapping[str, Sequence[str]]) -> str:
    rows = [f"| `{name}` | {', '.join(f'`{n}`' for n in after) or 'nothing'} |" for name, after in table.items()]
    return "\n".join(["| State | What may follow |", "|---|---|", *rows])


def _moves(state: ClaimState) -> str:
    head = "| Owner | " + " | ".join(f"next is {heir.value}" for heir in Heir) + " |"
    rows = [
        f"| {owner.value} | " + " | ".join(TABLE[state, owner, heir].value for heir in Heir) + " |" for owner in Owner
    ]
    return "\n".join([head, "|---" * (len(Heir) + 1) + "|", *rows])
