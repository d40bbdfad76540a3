"""`parti explain`: one partition's story. Who owned it when, why it moved, where it is, and what waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parti.app.signals import run_interruptibly
from parti.cli.control import Control, count, open_console, open_control, print_json, read_settings, span, timestamp
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.orders import look, partitions_named
from parti.cli.partitions import Row, read_rows, row_json
from parti.coordination.history import read_history
from parti.coordination.orders import Situation, obstacle
from parti.core.causes import sentence
from parti.core.dead_letter import Letter
from parti.errors import ConfigError, PartiError
from parti.jetstream.letters import Letters
from parti.model.fleet import HealthRecord
from parti.model.history import HistoryRecord, history_stream, missing_before


def explain(
    partition: Annotated[str, typer.Argument(metavar="PARTITION", help="As 'parti partitions' lists it.")],
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Tell the story of one partition: who owned it when, why it moved, where its position is, what waits.

    The changes of owner come from the stream BUCKET-history, which the rebalancer writes (setting history); it keeps
    the last 20 of each partition, for a week. Exit codes: 0 told, 2 no server, no fleet or no such partition.
    """
    settings = read_settings(nats, bucket)

    async def read() -> Story:
        async with open_control(settings) as control:
            situation = await look(control)
            (name,) = partitions_named([partition], situation.records.claims)
            return await _read(control, situation, name)

    story = run_interruptibly(read())
    if json:
        print_json(_json(settings.bucket, story))
    else:
        _print(open_console(), story)


@dataclass(frozen=True, slots=True)
class Story:
    """All that is known of a partition."""

    row: Row
    stream: str
    last_seq: int
    """Of the stream; 0: it could not be read."""
    history: Sequence[HistoryRecord] | None
    """Oldest first; None: no history is kept."""
    health: HealthRecord | None
    """What its owner said last."""
    letters: int
    last_letter: Letter | None
    orders: Sequence[str]
    problems: Sequence[str]
    """What keeps it from being handled, or may."""
    notes: Sequence[str]
    """What could not be found out."""
    now: datetime

    @property
    def gaps(self) -> set[int]:
        """Records that follow one that is missing."""
        return missing_before(self.history or ())

    @property
    def unrecorded(self) -> bool:
        """Its owner got it in a way that the history does not tell of."""
        given = [record for record in self.history or () if record.step == "given"]
        claim = self.row.claim
        return bool(claim.owner) and (not given or given[-1].fence_token != claim.fence_token)


# ── finding out ───────────────────────────────────────────────────────────────────────────────────────────────────


async def _read(control: Control, situation: Situation, name: str) -> Story:
    assert situation.fleet
    api, notes = control.plane.api, list[str]()
    stream = situation.fleet.stream
    rows, note = await read_rows(control, situation, [name], open_console(), quiet=True, first=True)
    if not rows:
        template = situation.fleet.template
        raise ConfigError(f"{name!r} has a claim, but no partition of the template {template!r} can have that name")
    (row,) = rows
    notes += [note] * bool(note)
    history: Sequence[HistoryRecord] | None = None
    try:
        history = await read_history(api, control.settings.bucket, name)
    except PartiError as error:
        notes.append(f"the history cannot be read: {error}")
    else:
        if history is None:
            notes.append(
                f"no history is kept: there is no stream {history_stream(control.settings.bucket)} (setting history)"
            )
    letters, last = 0, None
    try:
        desk = await Letters.open(control.plane.connection, api, control.settings.dead_letter_stream)
        letters, last = await desk.count_of(stream, row.subject), await desk.last_of(stream, row.subject)
    except ConfigError:
        notes.append(f"there is no dead-letter stream {control.settings.dead_letter_stream} to look into")
    except PartiError as error:
        notes.append(f"dead letters cannot be read: {error}")
    try:
        last_seq = (await api.stream_info(stream)).last_seq
    except PartiError:
        last_seq = 0
    health = _said_by_owner(situation, row)
    return Story(
        row,
        stream,
        last_seq,
        history,
        health,
        letters,
        last,
        tuple(_orders(situation, row)),
        tuple(_problems(situation, row, health)),
        tuple(notes),
        datetime.now(UTC),
    )


def _said_by_owner(situation: Situation, row: Row) -> HealthRecord | None:
    member, said = situation.records.members.get(row.claim.owner), situation.records.health.get(row.claim.owner)
    return said if member and said and said.incarnation == member.incarnation else None


def _orders(situation: Situation, row: Row) -> Iterator[str]:
    orders, name, owner = situation.orders, row.partition, row.claim.owner
    if name in orders.paused:
        yield f"paused: nobody is to handle it, until 'parti resume {name}'"
    if name in orders.withheld:
        yield "withheld: an older consumer handles it, until 'parti migrate run --phase switch' or '--abandon'"
    if worker := orders.placed.get(name):
        gone = "" if worker in situation.records.members else ", which is not here at the moment"
        yield f"placed on {worker}{gone}, until 'parti move {name} --auto'"
    if owner in orders.drained:
        yield f"{owner} is drained: it is to own nothing, until 'parti drain {owner} --undo'"
    if orders.hold_moves:
        yield "no planned moves, until 'parti resume'"


def _problems(situation: Situation, row: Row, health: HealthRecord | None) -> Iterator[str]:
    claim, leader = row.claim, situation.records.leaders.get("rebalancer")
    if row.state == "unowned":
        yield f"{claim.owner or 'its owner'} is gone, and nobody else has it: {obstacle(situation, row.partition)}"
    if row.state == "waiting":
        yield f"{claim.owner} is away, and it waits for it to come back"
    if claim.state in {"preparing", "moving"}:
        yield f"it is on its way to {claim.next or 'nobody'}: {obstacle(situation, row.partition)}"
    if claim.suspect:
        yield (
            f"message {claim.suspect:,} is suspected of taking processes down ({claim.deaths} so far); messages up "
            f"to {claim.careful_to:,} are noted before they are started"
        )
    if leader is None:
        yield "there is no rebalancer, so it stays where it is"
    if health is None:
        if claim.owner in situation.records.members:
            yield f"{claim.owner} has said nothing yet"
        return
    if row.partition in health.failing:
        yield f"its next message fails and is tried again: {health.failing[row.partition]}"
    if row.partition in health.parked:
        yield "it is parked: its owner reads it from the stream itself, because it held up others or has just come"
    if row.partition in health.busy:
        yield f"{claim.owner} was told to let go of it, but its handler still runs"
    if not health.pulling:
        yield f"{claim.owner} does not pull"
    yield from (f"{claim.owner}: {problem}" for problem in health.problems)


# ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _print(console: Console, story: Story) -> None:
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for title, text in _facts(story):
        facts.add_row(title, Text(text))
    console.print(facts)
    console.print()
    if story.history:
        console.print(_table(story))
        console.print()
    for note in story.notes:
        console.print(f"Note: {note}.", style="yellow", soft_wrap=True)
    for problem in story.problems:
        console.print(f"Look at this: {problem}.", style="bold red", soft_wrap=True)
    console.print(_summary(story), soft_wrap=True)


def _facts(story: Story) -> Iterator[tuple[str, str]]:
    row, claim = story.row, story.row.claim
    yield "partition", f"{row.partition}, subject {row.subject} of stream {story.stream}"
    held = f"{claim.owner}, for {span((story.now - claim.claimed_at).total_seconds())}" if claim.owner else "nobody"
    yield "owner", f"{held}, fence token {claim.fence_token}"
    yield "state", f"{row.state} to {claim.next}" if claim.next else row.state
    end = f"; the stream ends at {story.last_seq:,}" if story.last_seq else ""
    began = f", began at {claim.position:,}" if claim.owner else ""
    yield "position", "not known" if row.position is None else f"{row.position:,}{began}{end}"
    yield "waits", _waits(story)
    for order in story.orders:
        yield "order", order
    if story.letters:
        yield "dead letters", _letters(story)


def _waits(story: Story) -> str:
    backlog = story.row.backlog
    if backlog.messages is None:
        return "not known"
    if not backlog.messages:
        return "nothing"
    oldest = ""
    if backlog.first_at:
        age = span((story.now - backlog.first_at).total_seconds())
        oldest = f"; the oldest is message {backlog.first_seq:,}, stored {age} ago"
    return f"{count(backlog.messages, 'message')}, those in hand included{oldest}"


def _letters(story: Story) -> str:
    text = f"{story.letters:,} (parti dlq ls --partition {story.row.partition})"
    if story.last_letter is None:
        return text
    letter = story.last_letter
    age = span((story.now - letter.stored_at).total_seconds())
    return f"{text}; the last one, {letter.seq}, {age} ago: {letter.error}"


def _table(story: Story) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("when (UTC)", "from", "to", "cause"):
        table.add_column(title, no_wrap=True)
    table.add_column("position", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", min_width=20)
    for number, record in enumerate(story.history or ()):
        if number in story.gaps:
            table.add_row("…", *[""] * 5, Text("at least one change in between was not recorded", style="dim"))
        table.add_row(
            timestamp(record.at)[:19].replace("T", " "),
            Text(record.source or "nobody"),
            Text("nobody" if not record.target else record.target),
            record.cause,
            f"{record.position:,}",
            span(record.took_s) if record.took_s else "",
            Text(_told(record)),
        )
    return table


def _told(record: HistoryRecord) -> str:
    why = sentence(record.cause, record.source, record.target, record.why)
    return f"a move was called off: {why}" if record.step == "kept" else why


def _summary(story: Story) -> str:
    row, claim = story.row, story.row.claim
    if not claim.owner:
        return f"Nobody owns {row.partition}: {row.state}."
    held = span((story.now - claim.claimed_at).total_seconds())
    if story.unrecorded:
        how = f"its claim says: {claim.reason or 'nothing'} (that change is not in the history)"
    else:
        given = [record for record in story.history or () if record.step == "given"]
        how = _told(given[-1])
    waits = story.row.backlog.messages
    what = "" if waits is None else "; nothing waits" if not waits else f"; {count(waits, 'message')} wait"
    return f"{claim.owner} has had {row.partition} for {held}: {how}{what}."


def _json(bucket: str, story: Story) -> dict[str, Any]:
    backlog, letter = story.row.backlog, story.last_letter
    return {
        "bucket": bucket,
        "at": timestamp(story.now),
        "summary": _summary(story),
        "stream": story.stream,
        "last_seq": story.last_seq,
        **row_json(story.row),
        "began_at": story.row.claim.position,
        "first_waiting": backlog.first_seq or None,
        "first_waiting_at": timestamp(backlog.first_at) if backlog.first_at else None,
        "parked": bool(story.health and story.row.partition in story.health.parked),
        "failing": story.health.failing.get(story.row.partition) if story.health else None,
        "orders": list(story.orders),
        "problems": list(story.problems),
        "notes": list(story.notes),
        "dead_letters": story.letters,
        "last_dead_letter": letter
        and {"seq": letter.seq, "error": letter.error, "stored_at": timestamp(letter.stored_at)},
        "history": None if story.history is None else [_record_json(story, n) for n in range(len(story.history))],
        "unrecorded": story.unrecorded,
    }


def _record_json(story: Story, number: int) -> dict[str, Any]:
    assert story.history
    record = story.history[number]
    return {
        "at": timestamp(record.at),
        "step": record.step,
        "from": record.source,
        "to": record.target,
        "cause": record.cause,
        "why": _told(record),
        "position": record.position,
        "fence_token": record.fence_token,
        "term": record.term,
        "by": record.by,
        "took_s": record.took_s,
        "follows_a_gap": number in story.gaps,
    }
