"""Judges what workers logged: an error that is neither about an outage nor asked for by the run fails it.

Reads JSON lines and console lines. A line that is neither, such as a traceback that Python itself printed, counts as
an error too. What may be logged is `ALLOWED`, each with its reason; everything else at error level is a finding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

ERRORS = frozenset({"error", "critical"})
AFTERMATH_S = 6.0
"""How long after the server is back an error may still be about its absence: a call waits 5 s for its answer."""
_CONSOLE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+Z?) \[(?P<level>\w+) *\] (?P<event>.*?)(?: +\[[\w.]+\](?P<rest>.*))?"
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_AWAY = r"not connected to|connection (broke|suspended|is closed)|no answer on|nobody listens on"
"""What calls to the server fail with while it is away."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    level: str
    event: str
    detail: str = ""
    """What it says of the cause: the fields `error` and `reason`, and the last line of a traceback."""
    at_ns: int = 0
    """0: not known."""
    seq: int = 0
    """The message that it is about; 0: none."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """An error that a run may cause."""

    event: str
    why: str
    detail: str = ""
    """A pattern that the cause must match."""
    refused: bool = False
    """Allowed for messages that a handler refused, at any time; otherwise during an outage only."""


ALLOWED: tuple[Allowed, ...] = (
    Allowed("positions not stored", "positions are on the server; they are written when it is back", _AWAY),
    Allowed("dead letter not stored, will try again", "the dead-letter stream is on the server", _AWAY),
    Allowed("message dead-lettered", "the handler refused the message, as the run wants it to", refused=True),
)


@dataclass(slots=True)
class Circumstances:
    """What happened during a run, as far as it excuses errors."""

    outages: Sequence[tuple[int, float]] = ()
    """From a kill of the server until it was back, in nanoseconds."""
    refused: Collection[int] = field(default_factory=set)
    """Sequences of the messages that a handler refused."""

    def away(self, at_ns: int) -> bool:
        """Whether the server was away then, or a moment before."""
        return any(start <= at_ns <= end + AFTERMATH_S * 1e9 for start, end in self.outages)


def parse_line(text: str) -> LogLine:
    """Read one line; what is no log line is a critical one."""
    text = _COLOUR.sub("", text).rstrip()
    try:
        entry: Any = json.loads(text)
    except ValueError:
        entry = None
    if isinstance(entry, dict) and "event" in entry and "level" in entry:
        return _from_json(entry)
    if found := _CONSOLE.fullmatch(text):
        rest = (found["rest"] or "").strip()
        seq = re.search(r"\bseq=(\d+)", rest)
        return LogLine(found["level"], found["event"].strip(), rest, _ns(found["time"]), int(seq[1]) if seq else 0)
    return LogLine("critical", text)


def _from_json(entry: dict[str, Any]) -> LogLine:
    trace = str(entry.get("exception") or "").strip().splitlines()
    causes = [str(entry[name]) for name in ("error", "reason", "trouble") if entry.get(name)] + trace[-1:]
    seq = entry.get("seq")
    return LogLine(
        str(entry["level"]),
        str(entry["event"]),
        "; ".join(causes),
        _ns(str(entry.get("timestamp", ""))),
        seq if isinstance(seq, int) else 0,
    )


def _ns(text: str) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e9)
    except ValueError:
        return 0


def excuse(line: LogLine, about: Circumstances) -> Allowed | None:
    """The rule that allows an error; None if there is none."""
    for rule in ALLOWED:
        fits = line.event == rule.event and re.search(rule.detail, line.detail, re.IGNORECASE)
        if fits and (line.seq in about.refused if rule.refused else about.away(line.at_ns)):
            return rule
    return None


def unexcused(lines: Iterable[str], about: Circumstances) -> Iterator[LogLine]:
    """The errors that nothing allows."""
    for text in lines:
        line = parse_line(text)
        if (line.level in ERRORS or line.event.startswith("Task exception")) and excuse(line, about) is None:
            yield line


def judge_logs(paths: Iterable[Path], about: Circumstances) -> dict[str, list[LogLine]]:
    """The errors that nothing allows, by the name of the log."""
    found = {path.stem: [*unexcused(_whole_lines(path), about)] for path in paths}
    return {name: lines for name, lines in sorted(found.items()) if lines}


def _whole_lines(path: Path) -> list[str]:
    """The lines of a log; SIGKILL may have come in the middle of the last one."""
    text = path.read_text(errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()
