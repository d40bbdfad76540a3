"""What a rebalancer does at once: it frees what nobody wants, ends moves, and gives away what has no owner.

Guards OneOwner: a partition is given to somebody only when whoever had it cannot be handling it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parti.core.causes import Cause
from parti.core.fleet_view import BeginMove, Command, FleetState, Free, Give, Keep, Release, count_of, names_of
from parti.core.move import Heir, Owner, Step, next_step
from parti.core.situation import Situation
from parti.model.fleet import Claim
from parti.strategies.ordering import natural_order


class Giving:
    """Decides for one look at the fleet."""

    def __init__(self, here: Situation) -> None:
        self._here = here
        self._memory = here.memory

    def unwanted(self) -> Iterator[Command]:
        """Partitions that the source no longer names: their owner lets go of them first."""
        for partition, claim in self._here.view.claims.items():
            if partition in self._here.wanted or (claim.state == "free" and claim.cause != Cause.FULL):
                continue
            if claim.state == "free":
                yield Free(partition, *self._why_unwanted(partition))  # it does not wait for room any more
                continue
            if self._here.owner(partition, claim) not in {Owner.HANDLES, Owner.UNSURE}:
                yield Free(partition, *self._why_unwanted(partition))
            elif claim.state != "moving" and claim.owner in self._here.view.members:
                yield BeginMove(partition, "", *self._why_unwanted(partition))

    def _why_unwanted(self, partition: str) -> tuple[str, Cause]:
        if partition in self._here.view.orders.paused:
            return "paused", Cause.PAUSE
        if partition in self._here.view.orders.withheld:
            return "back to its old consumer", Cause.MIGRATION
        return "no longer wanted", Cause.UNWANTED

    def returned(self) -> Iterator[Command]:
        """Workers that are back under the same id: what they own, and have room for, is given to them anew."""
        for worker, partitions in self._here.returning.items():
            for partition in partitions:
                if partition not in self._here.surplus:
                    yield Give(partition, worker, "same id, new process", Cause.RETURN)

    def continue_moves(self) -> list[Command]:
        """The next step of each move that has begun."""
        commands: list[Command] = []
        for partition, claim in self._here.view.claims.items():
            if claim.state not in {"preparing", "moving"} or partition not in self._here.wanted:
                continue
            if partition in self._here.surplus:
                continue  # it is given away with what has no owner
            step = next_step(claim.state, self._here.owner(partition, claim), self._here.heir(partition, claim))
            if command := self._command(partition, claim, step):
                commands.append(command)
        return commands

    def _command(self, partition: str, claim: Claim, step: Step) -> Command | None:
        """A step of a move as a command; None when there is nothing to do, or when others see to it."""
        why, cause = f"{claim.next} cannot take it" if claim.next else "wanted again", Cause.UNREADY
        if step is Step.RELEASE:
            return Release(partition, claim.reason)
        if step is Step.KEEP:
            if self._here.owner(partition, claim) is Owner.AWAY:
                why = f"{claim.owner} is away"
            elif self._here.heir(partition, claim) is Heir.LATE:
                why = f"{claim.next} did not get ready in time"
                # Others may move elsewhere meanwhile, and whoever loses its owner is not kept waiting.
                self._memory.late[claim.next] = self._here.view.now_s + self._here.policy.min_rebalance_interval_s
            return Keep(partition, why, cause)
        if step is Step.GIVE:
            return Give(partition, claim.next, claim.reason, claim.cause)
        if step is Step.GIVE_BACK and claim.state == "moving":
            return Give(partition, claim.owner, why, cause if claim.next else Cause.RESUME)
        if step is Step.GIVE_ELSEWHERE:
            # With no room anywhere else even a draining owner is better than none.
            worker = self._here.target.get(partition, "")
            return Give(partition, worker if worker in self._here.active else claim.owner, why, cause)
        return None

    def orphans(self) -> list[str]:
        """Partitions that nobody handles and that nobody is about to get."""
        orphans = []
        for partition in self._here.view.partitions:
            claim = self._here.view.claims.get(partition)
            if claim is None or claim.state == "free" or not claim.owner or partition in self._here.surplus:
                orphans.append(partition)
                continue
            owner = self._here.owner(partition, claim)
            if claim.state == "owned":
                abandoned = owner is Owner.GONE
            else:
                abandoned = next_step(claim.state, owner, self._here.heir(partition, claim)) is Step.ORPHAN
            if abandoned:
                orphans.append(partition)
        return natural_order(orphans)

    def _may_have(self, worker: str, partition: str) -> bool:
        """Whether a partition without owner may be given to a worker: to a guest only what is placed there."""
        if worker in self._here.guests:
            return worker in self._here.active and self._here.placed.get(partition) == worker
        return worker in self._here.active

    def give_away(self, orphans: Sequence[str]) -> tuple[FleetState | None, str, list[Command]]:
        """Who gets what has no owner, with the state of the fleet (None: nothing to say) and its reason."""
        if not orphans:
            return None, "", []
        if why := self._wait_for_workers():
            return FleetState.WAITING, why, []
        due = [p for p in orphans if p not in self._memory.held_back]
        places = self._places(orphans, due)
        given: list[Command] = [Give(p, places[p], *self._why_given(p)) for p in due if p in places]
        if unplaced := [p for p in due if p not in places]:
            return FleetState.DEGRADED, self._why_unplaced(unplaced), [*given, *self._wait_for_room(unplaced)]
        if not given:
            return FleetState.DEGRADED, f"{count_of(len(orphans))} without owner: claims could not be written", []
        lost = sorted({c.owner for p in due if (c := self._here.view.claims.get(p)) and c.owner})
        if not lost or self._here.surplus.issuperset(due):
            return FleetState.REBALANCING, f"{count_of(len(given))} without owner given away", given
        state = FleetState.REBALANCING if self._here.view.left.issuperset(lost) else FleetState.EMERGENCY
        return state, f"{count_of(len(given))} of {', '.join(lost[:5])} given away", given

    def _wait_for_room(self, unplaced: Sequence[str]) -> Iterator[Command]:
        """Claims that have to say that their partition waits for room, and do not yet."""
        for partition in unplaced:
            claim = self._here.view.claims.get(partition)
            if partition in self._here.surplus:
                yield Free(partition, *self._why_given(partition))
            elif claim and claim.state == "free" and claim.cause != Cause.FULL:
                yield Free(partition, "nobody has room for it", Cause.FULL)

    def _why_unplaced(self, partitions: Sequence[str]) -> str:
        """Which partitions have no owner, why, and what to do."""
        if self._here.residents:
            why = "every worker is full; start another one, or raise max_subjects or capacity"
        else:
            why = "only guests are here; start a worker"
        return f"{count_of(len(partitions))} without owner ({names_of(partitions)}): {why}"

    def _wait_for_workers(self) -> str:
        """Why nothing is given to anybody yet; empty when it may be."""
        if not self._here.active:
            return "no worker is there that could take anything"
        ends_s = self._memory.window_ends_s(self._here.policy.cold_start_window_s)
        owned = any(c.owner in self._here.view.members for c in self._here.view.claims.values())
        if owned or self._here.view.now_s >= ends_s:
            return ""
        self._here.wake_at_s.append(ends_s)
        return f"cold start: {count_of(len(self._here.active), 'worker')} here, waiting for others"

    def _places(self, orphans: Sequence[str], due: Sequence[str]) -> dict[str, str]:
        """Who gets which orphan: whoever was about to get it or is to have it in the end, or else who has least."""
        places: dict[str, str] = {}
        moves = {p: c.next for p in orphans if (c := self._here.view.claims.get(p)) and c.next}
        self._here.incoming.subtract(moves.values())
        for partition in due:
            worker = moves.get(partition, "")
            worker = worker if self._may_have(worker, partition) else self._here.target.get(partition, "")
            if self._may_have(worker, partition) and self._here.room(worker):
                places[partition] = worker
                self._here.loads[worker] += 1
        for partition in due:
            if partition not in places:
                # What it is to have in the end may not fit yet: others are still to leave.
                if not (worker := self._here.spare(self._here.residents)):
                    break
                places[partition] = worker
                self._here.loads[worker] += 1
        return places

    def _why_given(self, partition: str) -> tuple[str, Cause]:
        claim = self._here.view.claims.get(partition)
        if claim is None:
            return "new partition", Cause.NEW
        if not claim.owner:
            return "had no owner", Cause.UNOWNED
        if partition in self._here.surplus:
            return f"{claim.owner} has no room for it", Cause.FULL
        if claim.owner in self._here.view.members:
            return f"{claim.owner} is away", Cause.AWAY
        if claim.owner in self._here.view.left:
            return f"{claim.owner} left", Cause.LEAVE
        return f"{claim.owner} is lost", Cause.CRASH
