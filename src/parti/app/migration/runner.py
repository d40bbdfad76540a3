"""One action of a migration from beginning to end: whose turn it is, the lease, the records, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from parti.app.migration.abandon import abandon, foresee_abandonment
from parti.app.migration.cleanup import check_clean_up, clean_up
from parti.app.migration.rollback import Rollback
from parti.app.migration.shadow import has_shadows, make_shadows, share
from parti.app.migration.shadow_ledger import ShadowLedger
from parti.app.migration.site import FleetEye, Site, Told, silent, watching
from parti.app.migration.survey import Survey, records_of, remembered, survey
from parti.app.migration.switch import Pace, Switch, with_withheld
from parti.app.migration.validate import Parity
from parti.app.worker import Job
from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.migration_desk import MigrationDesk
from parti.core.abandonment import Abandonment
from parti.core.migration import next_phase
from parti.core.migration_plan import Naming
from parti.core.parity import Slo, Watchman, Window
from parti.core.retention import LIMITS, WORK_QUEUE
from parti.errors import ConfigError
from parti.model.migration import Action, MigrationRecord, Phase


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be migrated."""

    settings: Settings
    job: Job
    naming: Naming
    workers: int


@dataclass(frozen=True, slots=True)
class Manner:
    """How it is to be done."""

    pace: Pace = field(default_factory=Pace)
    windows: int = 3
    window_s: float = 10.0
    slo: Slo = field(default_factory=Slo)
    ledger: ShadowLedger | None = None
    """Where what the shadow consumers were given is recorded, for an audit."""
    confirmed: bool = False
    """Whoever abandons it knows that messages may be handled twice."""


@dataclass(slots=True)
class Result:
    """What came of an action."""

    action: Action
    text: str
    """In a sentence."""
    phase: Phase
    """Where the migration stands now."""
    complete: bool = True
    left: Mapping[str, str] = field(default_factory=dict)
    """Partitions that are not where they should be, and why."""
    windows: Sequence[Window] = ()
    took_s: float = 0.0
    rests_s: Sequence[float] = ()
    rolled_back: bool = False
    """Everything was taken back, because the SLO was broken."""


class Migrator:
    """Does actions in one bucket."""

    def __init__(self, plane: ControlPlane, by: str, *, told: Told = silent) -> None:
        self.desk = MigrationDesk(plane, by)
        self._plane = plane
        self._told = told

    async def check(self, action: Action) -> tuple[MigrationRecord | None, Phase]:
        """What is recorded, and where an action would lead; raises `ConfigError` when it is not its turn."""
        record = await self.desk.load()
        if record is None and action == "shadow":
            return None, "shadow"
        if record is None:
            raise ConfigError(
                "there is no migration in this bucket; 'parti migrate run MODULE:APP --phase shadow' begins one"
            )
        return record, next_phase(record.phase, record.doing, action)

    # ── shadow ────────────────────────────────────────────────────────────────────────────────────────────────

    async def look(self, wish: Wish) -> Survey:
        """Match consumers and partitions; nothing is changed."""
        record = await self.desk.load()
        begun = record is not None and (record.phase not in {"planned", "abandoned"} or record.doing != "")
        return await survey(
            self._plane.connection, wish.settings, wish.job, wish.naming, workers=wish.workers, begun=begun
        )

    async def shadow(self, wish: Wish) -> Result:
        """Record the old consumers, keep the fleet from their partitions, and make the shadow consumers."""
        began_s = time.monotonic()
        _, phase = await self.check("shadow")
        async with self.desk.held(), watching(self._plane) as eye:
            known, phase = await self.check("shadow")
            left_behind = known is not None and known.phase == "abandoned"
            if not left_behind and any(old.holder != "old" for old in self.desk.old.values()):
                raise ConfigError("some partitions are with the fleet; finish the switch, or roll back first")
            surveyed = await self.look(wish)
            names = [*(m.partition.id for m in surveyed.plan.matches), *(p.id for p in surveyed.plan.uncovered)]
            shares = share(names, wish.workers, wish.settings.room, wish.job.strategy)
            record, olds = records_of(
                surveyed, wish.settings, wish.job, wish.naming, workers=wish.workers, by_worker=shares
            )
            if known is not None and known.stream_created == record.stream_created:
                olds = remembered(olds, self.desk.old)
            notes = self.desk.record.notes if self.desk.record else ()
            await self.desk.found(msgspec.structs.replace(record, doing="shadow", notes=notes), olds)
            # First of all: from now on workers may be started, and will leave these alone.
            await self.desk.change_orders(lambda orders: with_withheld(orders, names))
            made = await make_shadows(Site(self._plane, self.desk, eye, self._told), shares)
            text = (
                f"{len(olds):,} partitions are kept from the fleet; {made} shadow consumers carry them"
                if has_shadows(record.retention)
                else f"{len(olds):,} partitions are kept from the fleet; a {record.retention} stream has no shadows"
            )
            await self.desk.end("shadow", phase, text)
            return Result("shadow", text, phase, took_s=time.monotonic() - began_s)

    # ── the others ────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, action: Action, manner: Manner) -> Result:
        """Validate, switch, clean up, roll back or abandon."""
        began_s = time.monotonic()
        await self.check(action)
        async with self.desk.held(), watching(self._plane) as eye:
            record, phase = await self.check(action)
            assert record
            site = Site(self._plane, self.desk, eye, self._told)
            do = {
                "validate": self._validate,
                "switch": self._switch,
                "cleanup": self._clean_up,
                "rollback": self._roll_back,
                "abandon": self._abandon,
            }[action]
            result = await do(site, phase, manner)
            return replace(result, took_s=time.monotonic() - began_s)

    async def _validate(self, site: Site, phase: Phase, manner: Manner) -> Result:
        await site.check_stream()
        after = self.desk.migration.phase in {"switched", "cleaned"}
        ledger = manner.ledger
        if ledger and (after or not has_shadows(self.desk.migration.retention)):
            raise ConfigError("--ledger records what shadow consumers are given; there are none now; leave it out")
        if ledger:
            await ledger.check(site)
        watchman = Watchman(manner.slo)
        parity = Parity(site, manner.window_s, ledger.note) if ledger else Parity(site, manner.window_s)
        windows: list[Window] = []
        for number in range(manner.windows):
            window = await (parity.fleet_window() if after else parity.shadow_window())
            windows.append(window)
            site.told("comparing", number + 1, manner.windows)
            if watchman.look(window):
                return await self._give_up(site, manner, windows)
        if ledger:
            await ledger.publish(site, parity.partition_of)
        different = [window for window in windows if not window.same]
        broken = [why for window in windows for why in window.breaches(manner.slo)]
        good = not different and not broken
        text = _parity_said(windows, after=after) if good else _difference_said(different, broken)
        await self.desk.end("validate", phase if good else self.desk.migration.phase, text)
        return Result("validate", text, self.desk.migration.phase, complete=good, windows=windows)

    async def _give_up(self, site: Site, manner: Manner, windows: Sequence[Window]) -> Result:
        why = "; ".join(windows[-1].breaches(manner.slo))
        said = f"the SLO was broken in {manner.slo.breaches} windows in a row ({why})"
        if self.desk.migration.phase == "cleaned":
            # Whoever read the old consumers may have been stopped for good.
            text = (
                f"{said}; nothing is taken back, because the old consumers are gone: see to the fleet, or roll back"
            )
            await self.desk.end("validate", self.desk.migration.phase, text)
            return Result("validate", text, self.desk.migration.phase, False, windows=windows)
        head = f"{said}, so everything is taken back"
        await self.desk.end("validate", self.desk.migration.phase, head)
        back = await self._roll_back(site, "planned", manner)
        return Result(
            "validate", f"{head}: {back.text}", back.phase, False, back.left, windows, rolled_back=back.complete
        )

    async def _switch(self, site: Site, phase: Phase, manner: Manner) -> Result:
        if manner.pace.dual and self.desk.migration.retention != LIMITS.name:
            raise ConfigError(
                f"--dual: the stream has {self.desk.migration.retention} retention, where a message that one side "
                f"has finished is gone for the other; leave it out"
            )
        switch = Switch(site, manner.pace)
        await switch.check()
        await self.desk.begin("switch")
        outcome = await switch.run()
        both = sum(old.holder == "both" for old in self.desk.old.values())
        complete = not outcome.left and not both
        said = f"{outcome.done:,} of {len(self.desk.old):,} partitions are with the fleet"
        text = f"{said}, {both:,} of them with the old consumers too (dual mode)" if both else said
        if outcome.taken_over:
            text += f"; {outcome.taken_over:,} messages were in flight and are handled as after a crash"
        if outcome.repeats:
            text += f", and {outcome.repeats:,} that were finished before them are handled again"
        await self.desk.end("switch", phase, text, complete=complete)
        done = not outcome.left
        return Result("switch", text, self.desk.migration.phase, done, outcome.left, rests_s=outcome.rests_s)

    async def _clean_up(self, site: Site, phase: Phase, manner: Manner) -> Result:
        await check_clean_up(site)
        await self.desk.begin("cleanup")
        removed = await clean_up(site)
        text = f"{removed:,} old consumers deleted"
        await self.desk.end("cleanup", phase, text)
        return Result("cleanup", text, phase)

    async def _roll_back(self, site: Site, phase: Phase, manner: Manner) -> Result:
        await site.check_stream()
        await self.desk.begin("rollback")
        outcome = await Rollback(site, manner.pace).run()
        text = f"{outcome.done:,} partitions went back to their old consumers"
        if outcome.resumed:
            text += f", and {outcome.resumed:,} that had only been stopped go on"
        await self.desk.end("rollback", phase, text, complete=not outcome.left)
        return Result(
            "rollback", text, self.desk.migration.phase, not outcome.left, outcome.left, rests_s=outcome.rests_s
        )

    async def _abandon(self, site: Site, phase: Phase, manner: Manner) -> Result:
        found = await foresee_abandonment(site)
        found.check(confirmed=manner.confirmed)
        await self.desk.begin("abandon")
        await abandon(site, found)
        await self.desk.end("abandon", phase, found.said)
        return Result("abandon", found.said, phase)

    # ── foreseeing ────────────────────────────────────────────────────────────────────────────────────────────

    async def foresee(self, action: Action, manner: Manner) -> str:
        """What an action would do, in a sentence; nothing is changed."""
        record, _ = await self.check(action)
        assert record
        held = Counter(old.holder for old in self.desk.old.values())
        olds = list(self.desk.old.values())
        if action == "abandon":
            return f"would {(await self.foresee_abandonment()).foreseen}"
        if action == "validate":
            return f"would compare {manner.windows} windows of {manner.window_s:g} s"
        if action == "switch":
            deletes = record.retention == WORK_QUEUE.name
            also = " and delete their old consumers" if deletes else ""
            way = "let the fleet handle beside the old consumers" if manner.pace.dual else "give to the fleet"
            return f"would {way} {held['old'] + (0 if manner.pace.dual else held['both']):,} partitions{also}"
        if action == "cleanup":
            there = sum(1 for old in olds if old.consumer and not old.removed)
            return f"would delete {there:,} old consumers"
        anew = sum(1 for old in olds if old.removed and old.holder == "fleet")
        back = len(olds) - held["old"]
        return f"would give {back:,} partitions back to their old consumers, {anew:,} of them made anew"

    async def foresee_abandonment(self) -> Abandonment:
        """What an end where it stands comes to; raises `ConfigError` where it cannot be at all."""
        await self.check("abandon")
        found = await foresee_abandonment(Site(self._plane, self.desk, FleetEye()))
        found.check(confirmed=True)
        return found

    async def foresee_shadow(self, wish: Wish) -> str:
        """The same for the first phase."""
        await self.check("shadow")
        plan = (await self.look(wish)).plan
        return f"would keep {len(plan.matches) + len(plan.uncovered):,} partitions from the fleet"


def _parity_said(windows: Sequence[Window], *, after: bool) -> str:
    stored, seen = sum(window.stored for window in windows), f"{len(windows)} window{'s' * (len(windows) != 1)}"
    if after:
        return f"every partition has an owner in {seen}; {windows[-1].new.lag_msgs:,} messages wait"
    if not windows[0].delivered:
        return f"every partition has one worker in {seen}; this stream has no deliveries to compare"
    if not stored:
        return f"no message came in {seen}: only the filters were compared, and each partition is in one of them"
    return f"the shadow consumers were given each of {stored:,} messages once, in {seen}"


def _difference_said(different: Sequence[Window], broken: Sequence[str]) -> str:
    said = []
    for title, names in (
        ("nobody has", {p for window in different for p in window.unassigned}),
        ("several have", {p for window in different for p in window.duplicated}),
        ("messages are missing in", {p for window in different for p in window.incomplete}),
    ):
        if names:
            shown = sorted(names)
            said.append(f"{title} {', '.join(shown[:10])}{f' and {len(shown) - 10} more' if len(shown) > 10 else ''}")
    return "; ".join([*said, *dict.fromkeys(broken)])
