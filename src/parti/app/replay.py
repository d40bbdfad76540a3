"""A replay: a guest of the fleet hands the backlog of chosen partitions to Spark and gives the partitions back.

    claim ──> round, round, … up to the bound ──> give back, leave
                 │
                 └── tasks ask at the desk, several times a second, whether they may go on

Positions are stored while tasks work, under the guest's lease, as a worker stores its own. So a replay that is killed
costs what was finished since the last store, which is handled again, and no message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from parti.app.guest import Guest
from parti.app.worker import Job
from parti.config import Settings
from parti.coordination.lease import clock
from parti.core.lease import NEVER_S
from parti.core.replay import Holding, Holdings, decode_ask, encode
from parti.core.retry import RetryPolicy
from parti.errors import ConfigError, DecodeError, PartiError, ReplayFailed
from parti.jetstream.target import Target
from parti.model.ledger import ledger_subject, sample_limit
from parti.spark.options import Offset
from parti.spark.replay import find_end, why_failed
from parti.spark.replay_desk import LedgerTo
from parti.spark.replay_task import Lot, Work
from parti.strategies import natural_order
from parti.telemetry.health import Health
from parti.telemetry.tasks import beside, owned, supervise
from parti.worker.deadletters import DeadLetterStream
from parti.worker.ledger import ensure_ledger_stream
from parti.worker.state import is_stateful

_log = structlog.get_logger("parti.replay")

_BACK_S = 30.0
_WIDEST = 50
"""A round spans at most so many times as many sequences as it is to have messages."""
_NAMED = 5


class Rounds(Protocol):
    """What runs the tasks of a round; see `parti.spark.replay.SparkRounds`."""

    def run(self, work: Work, start: int) -> int:
        """Handle `[start, work.end)`; blocks, and returns how many messages tasks have finished."""
        ...

    def cancel(self) -> None:
        """End the round that runs, from another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be replayed."""

    name: str
    """Worker id of the guest; whoever comes back with it goes on."""
    choose: Callable[[Sequence[str]], Sequence[str]]
    """Picks partitions from all that there are; raises `ConfigError`."""
    until: Offset = "latest"
    messages_per_round: int = 100_000
    claim_within_s: float = 60.0
    batch_handler: Callable[[Any], Any] | None = None
    """Called with Arrow batches, instead of the app's handler with messages."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a replay is, for people."""

    doing: str
    partitions: int
    at_bound: int
    """Partitions that have reached the bound."""
    handled: int
    dead_lettered: int
    share: float
    """Of the range from the first positions to the bound, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay has done."""

    partitions: int
    handled: int
    dead_lettered: int
    rounds: int
    took_s: float
    complete: bool
    """Every partition has reached the bound."""
    given_back: bool
    """The partitions were with other workers when the guest left."""


class Replay:
    """One replay, from `run` to its end; `stop` ends it early, in good order."""

    def __init__(
        self, settings: Settings, job: Job, request: Request, on_standing: Callable[[Standing], None] = lambda _: None
    ) -> None:
        self._request = request
        self._job = job
        self._target = Target.of(settings)
        self._on_standing = on_standing
        self._guest = Guest(settings, job, request.name)
        self._settings = self._guest.settings
        self._chosen: tuple[str, ...] = ()
        self._bound = 0
        self._from = 0
        self._rounds = 0
        self._doing = ""
        self._desk = ""
        self._stopping = False
        self._lost = False
        """The lease was lost in this round."""
        if is_stateful(job.handler) and request.batch_handler is None:
            raise ConfigError("a handler with state cannot be replayed: its state is with the workers")

    def stop(self) -> None:
        """Start nothing more; `run` gives the partitions back and returns."""
        self._stopping = True

    async def run(self, open_rounds: Callable[[], Rounds]) -> Outcome:
        """Claim, handle up to the bound, give back; `open_rounds` is called, in a thread, once all is checked.

        Raises `ConfigError` when it cannot be begun, with nothing changed, and `ReplayFailed` when tasks failed or
        the partitions did not come: they are given back then as well, at the positions that were reached.
        """
        began_s = time.monotonic()
        await self._guest.connect()
        joined = given_back = False
        try:
            await self._prepare()
            self._say("starting Spark")
            rounds = await asyncio.to_thread(open_rounds)
            self._say("joining the fleet")
            await self._guest.join()
            joined = True
            await self._guest.place(self._chosen)
            await self._replay(rounds)
        finally:
            if joined:
                self._say("giving back")
                given_back = await self._give_back()
            clean = await self._guest.leave()
        if not clean:
            _log.warning("the last positions may not have been stored: some messages will be handled again")
        holdings = self._guest.reading.holdings
        return Outcome(
            len(self._chosen),
            holdings.handled,
            holdings.dead_lettered,
            self._rounds,
            time.monotonic() - began_s,
            self._reached() == len(self._chosen),
            given_back,
        )

    async def _prepare(self) -> None:
        """Everything that can be refused is refused here."""
        visit, s = self._guest.visit, self._settings
        self._chosen = tuple(self._request.choose(natural_order(visit.partitions)))
        if not self._chosen:
            raise ConfigError("no partition was chosen; name some with --partitions or --all-of")
        if unknown := [p for p in self._chosen if p not in visit.partitions]:
            named = ", ".join(unknown[:_NAMED])
            raise ConfigError(f"there is no partition {named}; see 'parti partitions' for those that there are")
        self._bound = await asyncio.to_thread(find_end, self._target, visit.stream.name, self._request.until)
        await DeadLetterStream.open(
            visit.api,
            Health(),
            s,
            max_payload=visit.connection.max_payload,
            omit_large=True,
        )
        if s.ledger != "off":
            await ensure_ledger_stream(visit.api, s, visit.stream.name)

    # ── rounds ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _replay(self, rounds: Rounds) -> None:
        guest, cancelling = self._guest, set[asyncio.Task[None]]()
        self._desk = guest.visit.connection.client.new_inbox()
        await guest.visit.connection.client.subscribe(self._desk, cb=self._answer)
        await guest.visit.connection.flush()

        def lost() -> None:
            self._lost = True
            if self._doing == _HANDLING:
                owned(asyncio.to_thread(rounds.cancel), "replay-cancel", keep=cancelling)

        guest.reading.on_lost = lost
        storing = supervise(self._keep_storing, "replay-storing")
        try:
            await self._run_rounds(rounds)
        finally:
            guest.reading.on_lost = lambda: None
            storing.cancel()
            await asyncio.gather(storing, return_exceptions=True)

    async def _run_rounds(self, rounds: Rounds) -> None:
        span = self._request.messages_per_round
        while not self._stopping:
            self._say("claiming")
            await self._claim()
            holdings = self._guest.reading.holdings
            todo = [held for p in self._chosen if (held := holdings.held.get(p)) and held.position < self._bound]
            if not todo or self._stopping:
                return
            start = min(held.position for held in todo)
            self._from = self._from or start
            span = await self._run_round(rounds, todo, start, min(self._bound, start + span)) or span

    async def _claim(self) -> None:
        owns = self._guest.owns(
            self._chosen, within_s=self._request.claim_within_s, told=lambda count: self._say("claiming")
        )
        async with beside(owns, name="replay-claim") as (waiting,):
            while not waiting.done() and not self._stopping:
                await asyncio.wait({waiting}, timeout=0.1)
            if not waiting.done():
                return
            try:
                await waiting
            except PartiError as error:
                raise ReplayFailed(f"the partitions could not be claimed: {error}") from None

    async def _run_round(self, rounds: Rounds, todo: Sequence[Holding], start: int, end: int) -> int:
        """One round; returns how wide the next one should be, or 0 when this one tells nothing about that."""
        holdings, complete, finished = self._guest.reading.holdings, False, 0
        self._rounds += 1
        self._lost = False
        number = holdings.begin_round([held.partition for held in todo], end)
        work = self._work(number, todo, end)
        self._say(_HANDLING)
        try:
            finished = await asyncio.to_thread(rounds.run, work, start)
            complete = True
        except Exception as error:
            if not self._lost:
                raise ReplayFailed(f"round {self._rounds} failed: {why_failed(error)}") from error
            _log.warning("a round was ended with the lease; going on when the partitions are here again")
        finally:
            holdings.end_round(complete=complete)
            self._doing = ""
            await self._quiet(holdings)
            await self._guest.reading.store()
        _log.info("round done", number=self._rounds, start=start, end=end, finished=finished)
        if not complete or not finished or self._stopping:
            return 0
        most = self._request.messages_per_round
        return min(_WIDEST * most, max(most, (end - start) * most // finished))

    async def _quiet(self, holdings: Holdings) -> None:
        """Tasks that were cut off may still have permission; nobody else gets it before that has ended."""
        # Again and again: whoever says that it is done sets this back.
        while (left_s := holdings.free_at_s() - clock()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, 0.1))

    def _work(self, number: int, todo: Sequence[Holding], end: int) -> Work:
        s, visit = self._settings, self._guest.visit
        ledger = None
        if s.ledger != "off":
            ledger = LedgerTo(
                subject=ledger_subject(s.prefix, visit.stream.name, self._guest.name),
                stream=visit.stream.name,
                stream_created=visit.stream.created,
                worker=self._guest.name,
                below=sample_limit(1 if s.ledger == "full" else s.ledger_sample),
            )
        return Work(
            target=self._target,
            desk=self._desk,
            number=number,
            end=end,
            stream=visit.stream.name,
            worker=self._guest.name,
            lots={held.partition: self._lot(held) for held in todo},
            handler=self._request.batch_handler or self._job.handler,
            batches=self._request.batch_handler is not None,
            policy=RetryPolicy(s.attempts, s.backoff_s),
            timeout_s=s.handler_timeout_s,
            threads=s.handler_threads,
            dead_letter_subject=s.dead_letter_subject,
            ledger=ledger,
        )

    def _lot(self, held: Holding) -> Lot:
        partition = self._guest.visit.partitions[held.partition]
        condemned = held.suspect if held.deaths >= self._settings.crash_limit else 0
        keys = tuple(partition.keys.items())
        return Lot(partition.id, partition.subject, keys, held.fence, held.position, condemned, held.deaths)

    # ── the desk ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, message: Any) -> None:
        """A task asks whether it may go on."""
        reading = self._guest.reading
        try:
            ask = decode_ask(message.data)
        except DecodeError as error:
            _log.error("a question at the desk is unreadable and ignored", error=str(error))
            return
        answer = reading.holdings.answer(ask, clock(), NEVER_S if self._stopping else reading.permitted_until_s)
        self._tell()
        with suppress(PartiError):  # it will ask again
            await self._guest.visit.connection.publish(message.reply, encode(answer))

    async def _keep_storing(self) -> None:
        while True:
            await asyncio.sleep(self._settings.progress_interval_s)
            await self._guest.reading.store()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _give_back(self) -> bool:
        try:
            return await self._guest.give_back(within_s=_BACK_S)
        except PartiError as error:
            _log.error(
                "the order that places the partitions here could not be taken back; use 'parti move ... --auto'",
                error=str(error),
            )
            return False

    def _reached(self) -> int:
        positions = self._guest.reading.holdings.positions
        return sum(positions.get(p, 0) >= self._bound for p in self._chosen)

    def _say(self, doing: str) -> None:
        self._doing = doing
        self._tell()

    def _tell(self) -> None:
        if self._doing in {"starting Spark", "joining the fleet"}:
            self._on_standing(Standing(self._doing, len(self._chosen), 0, 0, 0, 0.0))
            return
        holdings = self._guest.reading.holdings
        width = max(1, self._bound - self._from) * max(1, len(self._chosen))
        done = sum(min(self._bound, max(self._from, holdings.positions.get(p, 0))) - self._from for p in self._chosen)
        share = done / width if self._from else 0.0
        self._on_standing(
            Standing(self._doing, len(self._chosen), self._reached(), holdings.handled, holdings.dead_lettered, share)
        )


_HANDLING = "handling"
