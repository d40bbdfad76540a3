"""How a migration is shown: its plan, what came of a phase, and how far it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from parti.app.migration.runner import Result
from parti.app.migration.survey import Survey
from parti.cli.control import count, listed, open_console, span, timestamp
from parti.coordination.migration_desk import MigrationDesk
from parti.coordination.orders import Situation
from parti.core.migration_plan import Match, Risk
from parti.core.parity import Window
from parti.model.migration import OldConsumer
from parti.strategies import natural_key

_FIRST = 10
_SAY_S = 5.0
_WHO = {"old": "its old consumer", "both": "both", "fleet": "the fleet"}


class Bar:
    """How far a phase is: a bar on a terminal, a line from time to time elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = open_console()
        self._bar: Progress | None = None
        self._said_s = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, doing: str, done: int, total: int) -> None:
        """Tell it."""
        if self._quiet:
            return
        if self._console.is_terminal:
            if self._bar is None:  # not before something is done: a question may have to be asked first
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
                self._bar = Progress(*columns, console=self._console, transient=True)
                self._bar.add_task(doing)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], description=doing, completed=done, total=total)
        elif time.monotonic() - self._said_s >= _SAY_S:
            self._said_s = time.monotonic()
            self._console.print(f"{doing}: {done:,} of {total:,}")


# ── the plan ──────────────────────────────────────────────────────────────────────────────────────────────────────


def print_plan(console: Console, found: Survey, *, everything: bool) -> None:
    """The plan for people."""
    plan, stream = found.plan, found.stream
    head = Table.grid(padding=(0, 2))
    head.add_row("stream", Text(f"{stream.name}, {stream.retention} retention, {count(stream.messages, 'message')}"))
    head.add_row("consumers", Text(f"{plan.before:,} now, {plan.after:,} when all is done"))
    head.add_row("matched", Text(f"{count(len(plan.matches), 'partition')} with a consumer of its own"))
    head.add_row("waiting", Text(f"{plan.lag_msgs:,} messages, and {plan.in_flight_msgs:,} in flight"))
    for title, names in (
        ("unmatched", list(plan.unmatched)),
        ("overlapping", list(plan.overlapping)),
        ("unread", [p.id for p in plan.uncovered]),
        ("other consumers", list(plan.others)),
    ):
        if names:
            head.add_row(title, Text(f"{len(names):,} ({listed(names, 3)})"))
    console.print(head)
    _print_matches(console, plan.matches, everything=everything)
    for name, why in list(plan.unmatched.items())[:_FIRST]:
        console.print(Text(f"{name}: {why}"), soft_wrap=True)
    if plan.risks:
        console.print()
    for risk in plan.risks:
        console.print(_risk_text(risk), soft_wrap=True)
    console.print()
    if plan.blocked:
        console.print(f"{count(len(plan.blocked), 'thing')} to mend first.", style="bold red")
    else:
        console.print(
            "It can begin: 'parti migrate run MODULE:APP --phase shadow', with the same options.", style="green"
        )


def _print_matches(console: Console, matches: Sequence[Match], *, everything: bool) -> None:
    shown = sorted(matches, key=lambda m: (-m.consumer.lag_msgs, natural_key(m.partition.id)))
    shown = shown if everything else shown[:_FIRST]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("partition", "consumer", "position"):
        table.add_column(title, overflow="fold")
    for title in ("waits", "in flight", "ack floor"):
        table.add_column(title, justify="right")
    for match in shown:
        state = match.consumer
        known = "in flight" if state.position is None else f"{state.position:,}"
        numbers = (f"{state.pending:,}", f"{state.ack_pending:,}", f"{state.ack_floor:,}")
        table.add_row(Text(match.partition.id), Text(state.name), Text(known), *numbers)
    console.print()
    console.print(table)
    if len(matches) > len(shown):
        console.print(f"… and {count(len(matches) - len(shown), 'more partition')} (--all)", style="dim")


def _risk_text(risk: Risk) -> Text:
    text = Text(
        "mend: " if risk.level == "blocks" else "note: ", style="bold red" if risk.level == "blocks" else "yellow"
    )
    text.append(risk.text, style="default")
    if risk.about:
        text.append(f" ({listed(risk.about, 3)})", style="dim")
    return text


def plan_json(bucket: str, found: Survey) -> dict[str, Any]:
    """The plan for scripts."""
    plan, stream = found.plan, found.stream
    return {
        "bucket": bucket,
        "at": timestamp(datetime.now(UTC)),
        "stream": stream.name,
        "retention": stream.retention,
        "ok": not plan.blocked,
        "consumers": {"before": plan.before, "after": plan.after},
        "waiting": plan.lag_msgs,
        "in_flight": plan.in_flight_msgs,
        "partitions": [
            {
                "partition": match.partition.id,
                "consumer": match.consumer.name,
                "position": match.consumer.position,
                "waiting": match.consumer.pending,
                "in_flight": match.consumer.ack_pending,
                "ack_floor": match.consumer.ack_floor,
            }
            for match in plan.matches
        ],
        "unmatched": dict(plan.unmatched),
        "overlapping": {partition: list(names) for partition, names in plan.overlapping.items()},
        "unread": [partition.id for partition in plan.uncovered],
        "missing": list(plan.missing),
        "other_consumers": list(plan.others),
        "risks": [{"level": risk.level, "text": risk.text, "about": list(risk.about)} for risk in plan.risks],
    }


# ── what came of a phase ──────────────────────────────────────────────────────────────────────────────────────────


def print_result(console: Console, result: Result) -> None:
    """What came of it, for people."""
    if result.windows:
        _print_windows(console, result.windows)
    text = f"{result.text[0].upper()}{result.text[1:]} ({span(result.took_s)})."
    console.print(text, style="green" if result.complete else "bold red", soft_wrap=True)
    by_reason: dict[str, list[str]] = {}
    for partition, why in result.left.items():
        by_reason.setdefault(why, []).append(partition)
    for why, partitions in list(by_reason.items())[:_FIRST]:
        console.print(Text(f"  {listed(partitions)}: {why}"), soft_wrap=True)
    console.print(f"The migration is {result.phase}.", soft_wrap=True)


def _print_windows(console: Console, windows: Sequence[Window]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    titles = ("window", "stored", "old: delivered", "waits", "again", "new: delivered", "waits", "again", "differ")
    for title in titles:
        table.add_column(title, justify="right")
    for window in windows:
        differ = len({*window.unassigned, *window.duplicated, *window.incomplete})
        sides = [f"{n:,}" for s in (window.old, window.new) for n in (s.deliveries, s.lag_msgs, s.redelivered)]
        table.add_row(str(window.number), f"{window.stored:,}", *sides, str(differ))
    console.print(table)
    for text in dict.fromkeys(line for window in windows for line in _differences(window)):
        console.print(Text(f"  {text}", style="bold red"), soft_wrap=True)


def _differences(window: Window) -> Iterator[str]:
    rows = {row.partition: row for row in window.rows}
    for partition in window.unassigned:
        yield f"{partition}: unassigned: nobody has it"
    for partition in window.duplicated:
        row = rows[partition]
        have = f"{' and '.join(row.readers)} have it" if len(row.readers) > 1 else "messages came twice"
        yield f"{partition}: duplicated: {have}"
    for partition in window.incomplete:
        yield f"{partition}: {rows[partition].missing:,} messages did not come"


def result_json(bucket: str, result: Result) -> dict[str, Any]:
    """What came of it, for scripts."""
    return {
        "bucket": bucket,
        "at": timestamp(datetime.now(UTC)),
        "action": result.action,
        "ok": result.complete,
        "phase": result.phase,
        "summary": result.text,
        "took_s": round(result.took_s, 3),
        "rolled_back": result.rolled_back,
        "rests_s": [round(rest, 3) for rest in result.rests_s],
        "left": [{"partition": partition, "why": why} for partition, why in result.left.items()],
        "windows": [_window_json(window) for window in result.windows],
    }


def _window_json(window: Window) -> dict[str, Any]:
    return {
        "number": window.number,
        "seconds": round(window.seconds, 3),
        "first_seq": window.first_seq,
        "last_seq": window.last_seq,
        "stored": window.stored,
        "compared_deliveries": window.delivered,
        "unassigned": list(window.unassigned),
        "duplicated": list(window.duplicated),
        "incomplete": list(window.incomplete),
        "old": _side_json(window.old.deliveries, window.old.redelivered, window.old.lag_msgs),
        "new": _side_json(window.new.deliveries, window.new.redelivered, window.new.lag_msgs),
        "partitions": [
            {
                "partition": row.partition,
                "stored": row.stored,
                "old_delivered": row.old_deliveries,
                "old_waiting": row.old_lag_msgs,
                "seen": row.seen,
                "repeated": row.repeated,
                "waiting": row.lag_msgs,
                "readers": list(row.readers),
            }
            for row in window.rows
        ],
    }


def _side_json(delivered: int, redelivered: int, waiting: int) -> dict[str, int]:
    return {"delivered": delivered, "redelivered": redelivered, "waiting": waiting}


# ── how far it is ─────────────────────────────────────────────────────────────────────────────────────────────────


def _handled_by(desk: MigrationDesk) -> Mapping[str, int]:
    return Counter(old.holder for old in desk.old.values())


def print_status(
    console: Console, place: str, desk: MigrationDesk, situation: Situation, *, everything: bool
) -> None:
    """How far it is, for people."""
    record, held = desk.migration, _handled_by(desk)
    begun = f"; '{record.doing}' was begun and has not ended" if record.doing else ""
    head = Table.grid(padding=(0, 2))
    head.add_row("migration", Text(f"{record.stream}, {record.retention} retention, in {place}"))
    head.add_row("phase", Text(f"{record.phase}{begun}", style="yellow" if begun else "bold"))
    shares = ", ".join(f"{held[who]:,} with {text}" for who, text in _WHO.items() if held.get(who))
    head.add_row("partitions", Text(f"{len(desk.old):,}: {shares}"))
    deleted = sum(old.removed for old in desk.old.values())
    head.add_row("old consumers", Text(f"{sum(bool(o.consumer) for o in desk.old.values()):,}, {deleted:,} deleted"))
    if withheld := situation.orders.withheld:
        until = "until they are switched, or 'parti migrate run --abandon'"
        head.add_row("withheld", Text(f"{count(len(withheld), 'partition')}, {until}"))
    workers = sum(1 for member in situation.records.members.values() if not member.guest)
    head.add_row("fleet", Text(count(workers, "worker")))
    console.print(head)
    if record.notes:
        console.print()
    for note in record.notes[-(len(record.notes) if everything else _FIRST) :]:
        line = f"{note.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC  {note.action}  {note.by}: {note.text}"
        console.print(Text(line), soft_wrap=True)
    if everything:
        console.print()
        console.print(_partition_table(desk.old))


def _partition_table(olds: Mapping[str, OldConsumer]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("partition", "old consumer", "handled by", "switched at"):
        table.add_column(title, overflow="fold")
    for partition in sorted(olds, key=natural_key):
        old = olds[partition]
        consumer = f"{old.consumer or '(none)'}{' (deleted)' if old.removed else ''}"
        position = f"{old.position:,}" if old.holder != "old" and old.position else ""
        table.add_row(Text(partition), Text(consumer), Text(_WHO[old.holder]), Text(position))
    return table


def status_json(bucket: str, desk: MigrationDesk, situation: Situation, *, everything: bool) -> dict[str, Any]:
    """How far it is, for scripts."""
    record, held = desk.migration, _handled_by(desk)
    return {
        "bucket": bucket,
        "at": timestamp(datetime.now(UTC)),
        "stream": record.stream,
        "retention": record.retention,
        "phase": record.phase,
        "doing": record.doing,
        "partitions": {who: held.get(who, 0) for who in _WHO},
        "withheld": len(situation.orders.withheld),
        "workers": sum(1 for member in situation.records.members.values() if not member.guest),
        "notes": [
            {"action": n.action, "at": timestamp(n.at), "by": n.by, "phase": n.phase, "text": n.text}
            for n in record.notes
        ],
        "old_consumers": [
            {
                "partition": old.partition,
                "consumer": old.consumer,
                "holder": old.holder,
                "position": old.position,
                "removed": old.removed,
                "at": timestamp(old.at) if old.at else None,
            }
            for old in desk.old.values()
        ]
        if everything
        else [],
    }
