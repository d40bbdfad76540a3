"""Three mistakes that are easy to make, planted on demand: a simulation that does not find them proves nothing.

Each is a patch of the real code for the duration of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from parti.core.lease import NEVER_S
from parti.core.progress import Progress
from parti.errors import ConfigError
from parti.model.partition import Partition
from parti.sim.patches import Patches
from parti.worker.consumer import WorkerConsumer
from parti.worker.lanes import Lanes
from parti.worker.roster import Roster
from parti.worker.starts import Starts


def plant(name: str, patches: Patches) -> None:
    """Plant a bug by name, until the patches are undone; ConfigError for a name that is none."""
    if name not in BUGS:
        raise ConfigError(f"there is no planted bug {name!r}; choose one of {', '.join(BUGS)}")
    BUGS[name](patches)


def _unfenced_claim(patches: Patches) -> None:
    """A worker goes on starting handlers until it is told that its claim is over, whatever its lease says."""
    permit = Lanes.permit

    def permit_for_ever(self: Lanes, until_s: float) -> None:
        permit(self, until_s if until_s == NEVER_S else float("inf"))

    patches.set(Lanes, "permit", permit_for_ever)


def _filter_edit_without_backfill(patches: Patches) -> None:
    """A gained partition simply goes live: nobody reads the unfinished messages that the consumer has passed."""

    async def find_nothing(self: Starts, partition: Partition) -> int | None:
        return None

    def go_live(self: Roster, partition: Partition, position: int, *, feed_to: int = 0) -> None:
        pass

    patches.set(Starts, "first_unfinished", find_nothing)
    patches.set(Roster, "gain", go_live)


def _position_before_finish(patches: Patches) -> None:
    """The stored positions count messages whose handler still runs."""
    summarise = WorkerConsumer.summarise

    def summarise_early(self: WorkerConsumer, writer: str) -> Progress:
        progress = summarise(self, writer)
        early = {lane.ownership.partition.id: lane.waiting[0].seq + 1 for lane in self._ports.lanes.running_lanes()}
        behind = {p: max(position, early.get(p, 0)) for p, position in progress.behind.items()}
        ahead = progress.ahead | {p: position for p, position in early.items() if p not in behind}
        return msgspec.structs.replace(progress, ahead=ahead, behind=behind)

    patches.set(WorkerConsumer, "summarise", summarise_early)


BUGS: Mapping[str, Callable[[Patches], None]] = MappingProxyType(
    {
        "unfenced-claim": _unfenced_claim,
        "filter-edit-without-backfill": _filter_edit_without_backfill,
        "position-before-finish": _position_before_finish,
    }
)
"""The planted bugs by name."""
