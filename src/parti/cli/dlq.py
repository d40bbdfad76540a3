"""`parti dlq`: dead letters. List them, look at one, send them back, remove them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Console

from parti.app.signals import run_interruptibly
from parti.cli.control import count, listed, open_console, open_server, print_json, shown
from parti.cli.letters import letter_json, list_json, payload_json, print_letter, print_list
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.progress import progress_bar
from parti.cli.questions import can_ask, confirmed
from parti.config import Settings, load_settings
from parti.core.dead_letter import Letter
from parti.errors import ConfigError, PartiError
from parti.jetstream.kv import Bucket
from parti.jetstream.letter_replay import LetterReplay, Outcome, delete_letter, read_marks
from parti.jetstream.letters import Letters
from parti.model.fleet import key_of
from parti.model.letter_mark import LetterMark
from parti.model.safe_text import escape_line
from parti.strategies import natural_order

app = typer.Typer(help="Look at dead letters, send them back to their stream, remove them.", no_args_is_help=True)

StreamOption = Annotated[
    str | None, typer.Option("--stream", metavar="NAME", help="The dead-letter stream, if not that of the settings.")
]
PartitionOption = Annotated[str | None, typer.Option(metavar="PARTITION", help="Only those of this partition.")]
ReasonOption = Annotated[str | None, typer.Option(metavar="TEXT", help="Only those whose error has this in it.")]
OlderOption = Annotated[str | None, typer.Option(metavar="AGE", help="Only older ones, such as 90s, 10m, 2h or 7d.")]
NewerOption = Annotated[str | None, typer.Option(metavar="AGE", help="Only newer ones.")]
AllOption = Annotated[bool, typer.Option("--all", help="All that there are.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
SeqsArgument = Annotated[
    list[int] | None,
    typer.Argument(metavar="SEQ", help="Letters by their sequence, as 'parti dlq ls' lists it."),
]

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)")
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_FAILURES = 10
_DELETES_AT_ONCE = 32
_MOST_NAMED = 500
"""More letters than these are found by reading through the stream."""


@app.command("ls")
def ls_(
    partition: PartitionOption = None,
    reason: ReasonOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="The newest so many; all are counted.")] = 50,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
    stream: StreamOption = None,
) -> None:
    """List dead letters, the newest last, and count them by partition and reason.

    Exit codes: 0 listed, also when there are none; 2 no server, no dead-letter stream or no such partition.
    """
    choice = Choice((), partition, reason, _age(older_than), _age(newer_than))
    settings = load_settings({"nats": nats, "bucket": bucket, "dead_letter_stream": stream})
    console = open_console()

    async def read() -> tuple[list[Letter], dict[int, LetterMark]]:
        async with _opened(settings) as letters:
            found = await _read(letters, choice, console, quiet=json)
            if partition is not None and not found.of_partition:
                await _check_partition(letters, settings.bucket, partition, found)
            return found.chosen, await read_marks(letters)

    chosen, marks = run_interruptibly(read())
    if json:
        print_json(list_json(settings.dead_letter_stream, chosen, marks, limit))
    else:
        print_list(console, settings.dead_letter_stream, chosen, marks, limit)


@app.command()
def show(
    seq: Annotated[int, typer.Argument(metavar="SEQ", min=1, help="A letter, as 'parti dlq ls' lists it.")],
    bytes_: Annotated[
        int, typer.Option("--bytes", metavar="N", min=0, help="Show no more of the payload than this.")
    ] = 2000,
    json: JsonOption = False,
    nats: NatsOption = None,
    stream: StreamOption = None,
) -> None:
    """Show one dead letter: its story, its headers, and its payload as text or bytes.

    Exit codes: 0 shown, 2 no server, no dead-letter stream or no such letter.
    """
    settings = load_settings({"nats": nats, "dead_letter_stream": stream})

    async def read() -> tuple[Letter, bytes, LetterMark | None]:
        async with _opened(settings) as letters:
            found = await letters.get(seq)
            if found is None:
                raise ConfigError(_no_such(letters, [seq]))
            letter, payload = found
            if letter.payload_left_out and (original := await letters.original(letter)):
                payload = original.data
            return letter, payload, (await read_marks(letters)).get(seq)

    letter, payload, mark = run_interruptibly(read())
    if json:
        print_json({**letter_json(letter, mark), "headers": dict(letter.headers), **payload_json(payload, bytes_)})
    else:
        print_letter(open_console(), letter, payload, mark, bytes_)


@app.command()
def replay(
    seqs: SeqsArgument = None,
    partition: PartitionOption = None,
    reason: ReasonOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    all_: AllOption = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave them in the dead-letter stream, marked as sent.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also those that are marked as sent, or may have been.")
    ] = False,
    yes: YesOption = False,
    json: JsonOption = False,
    nats: NatsOption = None,
    stream: StreamOption = None,
) -> None:
    """Send dead letters back to the subjects that they came from, as new messages, and remove them here.

    Those of one partition are sent in the order of their origin. A run that was interrupted is simply repeated: none
    is lost and none is sent twice. Exit codes: 0 all sent, 1 some could not be (or nothing was confirmed), 2 refused,
    and nothing was changed.
    """
    choice = _choice(seqs, partition, reason, older_than, newer_than, all_)
    settings = load_settings({"nats": nats, "dead_letter_stream": stream})
    console = open_console()

    async def work() -> Outcome | None:
        async with _opened(settings) as letters:
            chosen = await _choose(letters, choice, console, quiet=json)
            if not chosen:
                return Outcome()
            streams = listed(natural_order({letter.stream for letter in chosen}))
            if not yes and not await _confirmed(f"Send {count(len(chosen), 'dead letter')} back to {streams}?"):
                return None
            with progress_bar(console, "sending", len(chosen), quiet=json) as done:
                return await LetterReplay(letters, keep=keep, again=again).run(chosen, done)

    outcome = run_interruptibly(work())
    if outcome is None:
        _leave_unchanged(console)
    else:
        _tell_replay(console, outcome, keep=keep, json=json)


@app.command()
def purge(
    seqs: SeqsArgument = None,
    partition: PartitionOption = None,
    reason: ReasonOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    all_: AllOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
    nats: NatsOption = None,
    stream: StreamOption = None,
) -> None:
    """Remove dead letters for good.

    Letters that arrive meanwhile stay. Exit codes: 0 removed, 1 nothing was confirmed, 2 refused, and nothing was
    changed.
    """
    choice = _choice(seqs, partition, reason, older_than, newer_than, all_)
    settings = load_settings({"nats": nats, "dead_letter_stream": stream})
    console = open_console()

    async def work() -> int | None:
        async with _opened(settings) as letters:
            chosen = await _choose(letters, choice, console, quiet=json)
            if chosen and not yes and not await _confirmed(f"Remove {count(len(chosen), 'dead letter')} for good?"):
                return None
            with progress_bar(console, "removing", len(chosen), quiet=json) as done:
                return await _remove(letters, chosen, done)

    removed = run_interruptibly(work())
    if removed is None:
        _leave_unchanged(console)
    elif json:
        print_json({"removed": removed})
    else:
        console.print(f"Removed {count(removed, 'dead letter')}.", style="green")


# ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Choice:
    """Which letters are meant."""

    seqs: Sequence[int]
    partition: str | None = None
    reason: str | None = None
    older_s: float | None = None
    newer_s: float | None = None

    def takes(self, letter: Letter, now: datetime) -> bool:
        """Whether a letter is meant."""
        age = now - letter.stored_at
        return (
            (not self.seqs or letter.seq in self.seqs)
            and (self.partition is None or letter.partition == self.partition)
            and (self.reason is None or self.reason.lower() in letter.error.lower())
            and (self.older_s is None or age > timedelta(seconds=self.older_s))
            and (self.newer_s is None or age < timedelta(seconds=self.newer_s))
        )


@dataclass(slots=True)
class _Found:
    """What was read."""

    chosen: list[Letter]
    partitions: set[str]
    """Of all letters."""
    of_partition: bool = False
    """Whether there is any of the partition that was asked for."""


def _age(text: str | None) -> float | None:
    if text is None:
        return None
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no age; expected a number and a unit, such as 90s, 10m, 2h or 7d")
    return float(found[1]) * _UNITS_S[found[2]]


def _choice(
    seqs: Sequence[int] | None,
    partition: str | None,
    reason: str | None,
    older_than: str | None,
    newer_than: str | None,
    everything: bool,
) -> Choice:
    """What is to be changed; nothing is by accident all there is."""
    given = any(each is not None for each in (partition, reason, older_than, newer_than))
    if everything and (seqs or given):
        raise ConfigError("--all and a choice of letters exclude each other; leave one of them out")
    if not everything and not seqs and not given:
        raise ConfigError(
            "say which dead letters: their sequences, --partition, --reason, --older-than, --newer-than or --all"
        )
    return Choice(tuple(seqs or ()), partition, reason, _age(older_than), _age(newer_than))


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Letters]:
    async with open_server(settings) as (connection, api):
        yield await Letters.open(connection, api, settings.dead_letter_stream)


async def _read(letters: Letters, choice: Choice, console: Console, *, quiet: bool) -> _Found:
    found, now = _Found([], set()), datetime.now(UTC)
    if 0 < len(choice.seqs) <= _MOST_NAMED:
        read_ones = [await letters.get(seq) for seq in sorted(set(choice.seqs))]
        named = [one[0] for one in read_ones if one]
        found.partitions = {letter.partition for letter in named}
        found.of_partition = choice.partition in found.partitions
        found.chosen = [letter for letter in named if choice.takes(letter, now)]
        return found
    with progress_bar(console, "reading dead letters", letters.info.messages, quiet=quiet) as read:
        async with aclosing(letters.all(min(choice.seqs, default=1))) as every:
            async for letter in every:
                read(1)
                found.partitions.add(letter.partition)
                found.of_partition = found.of_partition or letter.partition == choice.partition
                if choice.takes(letter, now):
                    found.chosen.append(letter)
    return found


async def _choose(letters: Letters, choice: Choice, console: Console, *, quiet: bool) -> list[Letter]:
    """The letters that are to be changed; `ConfigError` when some of those that are named are not there."""
    found = await _read(letters, choice, console, quiet=quiet)
    missing = sorted(set(choice.seqs) - {letter.seq for letter in found.chosen})
    if missing:
        raise ConfigError(_no_such(letters, missing))
    if choice.partition is not None and not found.of_partition:
        raise _no_letters_of(choice.partition, found)
    return found.chosen


def _no_such(letters: Letters, missing: Sequence[int]) -> str:
    several = f"are no letters {listed([str(seq) for seq in missing])}"
    which = f"is no letter {missing[0]}" if len(missing) == 1 else several
    return f"there {which} in stream {letters.name!r}; 'parti dlq ls' lists those that there are"


def _no_letters_of(partition: str, found: _Found) -> ConfigError:
    known = natural_order(found.partitions)
    here = f"there are some of {listed(known)}" if known else "there are none at all"
    return ConfigError(f"there are no dead letters of partition {partition!r}; {here}")


async def _check_partition(letters: Letters, bucket: str, partition: str, found: _Found) -> None:
    """Refuse a partition that nobody has ever heard of; one without dead letters is fine."""
    try:
        claim = await Bucket(letters.api, bucket).get(key_of("claims", partition))
    except PartiError:
        return
    if claim is None:
        raise _no_letters_of(partition, found)


async def _confirmed(question: str) -> bool:
    if not can_ask():
        raise ConfigError(f"{question.rstrip('?')}: nobody is here to confirm it; use --yes if that is what you want")
    return await confirmed(escape_line(question), err=True)


def _leave_unchanged(console: Console) -> None:
    console.print("Nothing was changed.")
    raise typer.Exit(1)


# ── removing ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def _remove(letters: Letters, chosen: Sequence[Letter], done: Any) -> int:
    turns = asyncio.Semaphore(_DELETES_AT_ONCE)

    async def remove(letter: Letter) -> bool:
        async with turns:
            removed = await delete_letter(letters, letter)
        done(1)
        return removed

    return sum(await asyncio.gather(*(remove(letter) for letter in chosen)))


# ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _tell_replay(console: Console, outcome: Outcome, *, keep: bool, json: bool) -> None:
    sent, failed = len(outcome.sent), outcome.failed
    if json:
        print_json(
            {
                "ok": not failed,
                "sent": [{"letter": seq, "sent_as": new} for seq, new in sorted(outcome.sent.items())],
                "sent_before": outcome.before,
                "kept": keep,
                "failed": [{"letter": seq, "why": why} for seq, why in sorted(failed.items())],
            }
        )
    else:
        before = f", {outcome.before:,} of them by an earlier run" if outcome.before else ""
        kept = "; they stay here, marked as sent" if keep and sent else ""
        console.print(f"Sent {count(sent, 'dead letter')}{before}{kept}.", style="yellow" if failed else "green")
        for seq, why in sorted(failed.items())[:_FAILURES]:
            console.print(shown(f"  letter {seq} was not sent: {why}"), style="bold red", soft_wrap=True)
        if len(failed) > _FAILURES:
            console.print(f"  … and {len(failed) - _FAILURES:,} more (--json)", style="dim")
    if failed:
        raise typer.Exit(1)
