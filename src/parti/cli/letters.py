"""Dead letters on the screen and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parti.cli.control import count, shown, span, timestamp
from parti.core.dead_letter import Letter, reason_of
from parti.model.letter_mark import LetterMark
from parti.model.safe_text import escape

_DUMP_WIDTH = 16


def print_list(
    console: Console, stream: str, chosen: Sequence[Letter], marks: dict[int, LetterMark], limit: int
) -> None:
    """The table of the newest letters, and how many there are of what."""
    if not chosen:
        console.print(f"No dead letters in stream {stream}.", style="green")
        return
    now = datetime.now(UTC)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("letter", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("partition", overflow="fold", min_width=9)
    table.add_column("from", no_wrap=True)
    table.add_column("tries", justify="right", no_wrap=True)
    table.add_column("worker", no_wrap=True)
    table.add_column("error", overflow="fold", min_width=20)
    for letter in chosen[-limit:]:
        table.add_row(
            str(letter.seq),
            span((now - letter.stored_at).total_seconds()),
            shown(letter.partition),
            shown(f"{letter.stream} {letter.origin_seq}"),
            str(letter.attempts or ""),
            shown(letter.worker),
            shown(f"{_mark_text(marks.get(letter.seq))}{letter.error}"),
        )
    console.print(table)
    if len(chosen) > limit:
        console.print(f"… and {count(len(chosen) - limit, 'older letter')} (--limit)", style="dim")
    console.print()
    by_reason = Counter(reason_of(letter.error) for letter in chosen)
    by_partition = Counter(letter.partition for letter in chosen)
    for title, counts in (("reasons", by_reason), ("partitions", by_partition)):
        named = ", ".join(f"{name} {number:,}" for name, number in counts.most_common(5))
        more = f" and {len(counts) - 5:,} more" if len(counts) > 5 else ""
        console.print(Text.assemble((f"{title}: ", "bold"), shown(f"{named}{more}")), soft_wrap=True)
    console.print(
        f"{count(len(chosen), 'dead letter')} of {count(len(by_partition), 'partition')}; 'parti dlq show LETTER' "
        f"shows one, 'parti dlq replay' sends them back.",
        soft_wrap=True,
    )


def _mark_text(mark: LetterMark | None) -> str:
    if mark is None:
        return ""
    if mark.state == "sent":
        return f"(sent again as {mark.sent_as}) "
    return "(was being sent: repeat 'parti dlq replay') "


def print_letter(console: Console, letter: Letter, payload: bytes, mark: LetterMark | None, most: int) -> None:
    """One letter in full, with as many bytes of its payload as asked for."""
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    age = span((datetime.now(UTC) - letter.stored_at).total_seconds())
    facts.add_row("letter", f"{letter.seq}, stored {age} ago")
    facts.add_row("from", shown(f"message {letter.origin_seq} of stream {letter.stream}, subject {letter.subject}"))
    facts.add_row("partition", shown(letter.partition))
    facts.add_row("error", shown(letter.error, "bold red"))
    facts.add_row("tries", shown(f"{letter.attempts}, by {letter.worker or 'nobody known'}"))
    facts.add_row("published", shown(letter.headers.get("Parti-Published", "")))
    if letter.cut:
        facts.add_row("cut", shown(_cut_text(letter), "yellow"))
    if mark:
        facts.add_row("replay", shown(f"{_mark_text(mark).strip()} by {mark.by} at {timestamp(mark.at)}"))
    for name, value in letter.own_headers.items():
        facts.add_row("header", shown(f"{name}: {value}"))
    console.print(facts)
    console.print()
    if letter.traceback:
        console.print("traceback:", style="bold")
        console.print(Text(escape(letter.traceback)), soft_wrap=True)
        console.print()
    where = f" (left in {_original_place(letter)})" if letter.payload_left_out else ""
    console.print(shown(f"payload, {count(len(payload), 'byte')}{where}:", "bold"))
    console.print(Text(escape(_readable(payload[:most]))), soft_wrap=True)
    if len(payload) > most:
        console.print(f"… and {count(len(payload) - most, 'more byte')} (--bytes)", style="dim")


def _cut_text(letter: Letter) -> str:
    """What is not in the letter as it was, and where it is."""
    cut = letter.cut
    said = ["subject (not told exactly, so it cannot be sent back)"] * ("subject" in cut)
    if rest := " and ".join(sorted(cut - {"subject"})):
        said.append(f"{rest} (see {_original_place(letter)}; a replay takes them from there)")
    return ", ".join(said)


def _original_place(letter: Letter) -> str:
    if letter.original is not None:
        return f"message {' and '.join(map(str, letter.original[1]))} of the dead-letter stream"
    return f"stream {letter.stream}"


def _text(payload: bytes) -> str | None:
    """The payload as text, if it is any; a character cut in two at the end is no reason against it."""
    for cut in range(4):
        try:
            text = payload[: len(payload) - cut].decode()
        except UnicodeDecodeError:
            continue
        return text if all(c.isprintable() or c in "\n\r\t" for c in text) else None
    return None


def _readable(payload: bytes) -> str:
    text = _text(payload)
    if text is not None:
        return text
    lines = []
    for start in range(0, len(payload), _DUMP_WIDTH):
        row = payload[start : start + _DUMP_WIDTH]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):<{3 * _DUMP_WIDTH}} {shown}")
    return "\n".join(lines)


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def list_json(stream: str, chosen: Sequence[Letter], marks: dict[int, LetterMark], limit: int) -> dict[str, Any]:
    """The listing for scripts."""
    return {
        "stream": stream,
        "at": timestamp(datetime.now(UTC)),
        "total": len(chosen),
        "by_reason": dict(Counter(reason_of(letter.error) for letter in chosen).most_common()),
        "by_partition": dict(Counter(letter.partition for letter in chosen).most_common()),
        "letters": [letter_json(letter, marks.get(letter.seq)) for letter in chosen[-limit:]],
    }


def letter_json(letter: Letter, mark: LetterMark | None) -> dict[str, Any]:
    """One letter for scripts, without headers and payload."""
    return {
        "seq": letter.seq,
        "stored_at": timestamp(letter.stored_at),
        "partition": letter.partition,
        "stream": letter.stream,
        "origin_seq": letter.origin_seq,
        "subject": letter.subject,
        "error": letter.error,
        "attempts": letter.attempts,
        "worker": letter.worker,
        "cut": sorted(letter.cut),
        "replay": mark and {"state": mark.state, "sent_as": mark.sent_as or None, "by": mark.by},
    }


def payload_json(payload: bytes, most: int) -> dict[str, Any]:
    """A payload for scripts: as text if it is any, else as hex digits."""
    text = _text(payload[:most])
    return {
        "payload_bytes": len(payload),
        "payload_cut": len(payload) > most,
        "payload_text": text,
        "payload_hex": payload[:most].hex() if text is None else None,
    }
