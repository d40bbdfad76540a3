"""Scenarios as text: events in, the planner's decisions out.

    strategy sticky               which strategy; a line `policy scale_window_s=3` changes windows
    partitions p0..p7             what is wanted at the beginning
    settled worker-0..worker-1    these have shared it long ago; otherwise the fleet begins empty
    prompt                        workers let go as soon as they are told to, without an `applied`
    lazy                          workers get ready for nothing without an `applied` or `ready`

    at 5.0  join worker-2         an event and its time in seconds
            -> 5.0 [scaling] …    what follows from it, until the next event

Between events the planner is called when it asked to be (`wake_at_s`), and never without a reason: a decision that
nobody wakes it for is missed here. It is called again as long as it has commands. Each command is a line, and so is
each change of the fleet's state or its reason. `at 5.0 unnoticed …` is an event that nobody looks at before the next
one. Events:

    join W… [capacity=N] [weight=X]   these joined
    visit W…                          these joined as guests
    leave W…, lose W…                 stopped and said so; the lease ended
    away W…, rejoin W…                stopped, to be back under the same id; a new process has the id
    drain W…                          wants to give everything away
    applied W… [busy P…]              put its assignment in force; the handlers of P… still run
    ready W…                          its consumer carries what it was told of, and what it is to get
    deaf W…, slow W…, well W…         its consumer does not work; takes up nothing new; works again
    place P… W, unplace P…            operators want these there; wherever the strategy wants them
    drained W…, undrain W…            operators want these to own nothing; want that no more
    pause P…, resume P…               operators want nobody to handle these; want them handled again
    hold, unhold                      operators want no moves between live workers; allow them again
    partitions P…, loads P=X…         the source now names these; partitions have these loads
    refuse P…, accept P…              claims of these cannot be written; can be written again
    vacate, elect                     there is no rebalancer any more; a new one begins from the records alone
    stale W…, fresh W…                the rebalancer reads the record of the process before; of this one again
    tick                              nothing happened, but the planner is asked
    owners                            who owns what

`PARTI_REWRITE_SCENARIOS=1` writes what was decided into the files, to be reviewed as a diff.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.scenarios.fleet_model import FleetModel

from parti.core.fleet_view import BeginMove, Command, Free, Give, Keep, Policy, Release
from parti.strategies import natural_order, strategy_named

_RANGE = re.compile(r"(.*?)(\d+)\.\.(?:\1)?(\d+)")
_NUMBERED = re.compile(r"(.*?)(\d+)")
_INDENT = " " * 8
_QUIET_S = 60.0
"""How long the planner is watched after the last event."""
_MOST_STEPS = 50
_LONG_AGO_S = -100.0


@dataclass(slots=True)
class Event:
    """One line `at …` and what is expected after it."""

    at_s: float
    verb: str
    words: list[str]
    source: str
    noticed: bool = True
    """Whether the planner is asked after it."""
    expected: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Scenario:
    """A scenario as it was read."""

    head: list[str] = field(default_factory=list)
    """Lines before the first event, as they are."""
    events: list[Event] = field(default_factory=list)
    prompt: bool = False
    lazy: bool = False
    strategy: str = "sticky"
    partitions: list[str] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    settled_expected: list[str] = field(default_factory=list)
    policy: Policy = field(default_factory=Policy)

    def text(self, settled: Sequence[str], outcomes: Sequence[Sequence[str]]) -> str:
        """The file with these decisions in it."""
        lines = []
        for line in self.head:
            lines.append(line)
            if line.startswith("settled"):
                lines.extend(f"{_INDENT}-> {line}" for line in settled)
        for event, outcome in zip(self.events, outcomes, strict=True):
            lines.append(event.source)
            lines.extend(f"{_INDENT}-> {line}" for line in outcome)
        return "\n".join(lines) + "\n"


def read(path: Path) -> Scenario:
    """Read a scenario; ValueError for a line that is none."""
    scenario = Scenario()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            _read_line(scenario, line)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path.name}, line {number}: {line.strip()!r}: {error}") from None
    return scenario


def _read_line(scenario: Scenario, line: str) -> None:
    text = line.strip()
    if text.startswith("->"):
        place = scenario.events[-1].expected if scenario.events else scenario.settled_expected
        place.append(text.removeprefix("->").strip())
    elif text.startswith("at "):
        _, at, verb, *words = text.split()
        noticed = verb != "unnoticed"
        verb, words = (verb, words) if noticed else (words[0], words[1:])
        scenario.events.append(Event(float(at), verb, words, line.rstrip(), noticed))
    elif not text or text.startswith("#"):
        if scenario.events:
            raise ValueError("remarks and empty lines belong before the first event")
        scenario.head.append(line.rstrip())
    else:
        scenario.head.append(line.rstrip())
        _read_setting(scenario, text)


def _read_setting(scenario: Scenario, text: str) -> None:
    keyword, _, rest = text.partition(" ")
    match keyword:
        case "prompt":
            scenario.prompt = True
        case "lazy":
            scenario.lazy = True
        case "strategy":
            scenario.strategy = rest
        case "partitions":
            scenario.partitions = expand(rest.split())
        case "settled":
            scenario.settled = expand(rest.split())
        case "policy":
            changes = dict(word.split("=") for word in rest.split())
            scenario.policy = replace(scenario.policy, **{k: json.loads(v) for k, v in changes.items()})
        case _:
            raise ValueError("expected strategy, partitions, settled, prompt, lazy, policy or at")


def expand(words: Iterable[str]) -> list[str]:
    """`p0..p2 q` as p0, p1, p2, q."""
    names: list[str] = []
    for word in words:
        if found := _RANGE.fullmatch(word.rstrip(",")):
            prefix, first, last = found[1], int(found[2]), int(found[3])
            names.extend(f"{prefix}{n}" for n in range(first, last + 1))
        else:
            names.append(word.rstrip(","))
    return names


def compress(names: Iterable[str]) -> str:
    """The inverse of `expand`, in natural order."""
    runs: list[tuple[str, int, int] | str] = []
    for name in natural_order(names):
        found = _NUMBERED.fullmatch(name)
        last = runs[-1] if runs else ""
        if not found:
            runs.append(name)
        elif isinstance(last, tuple) and (last[0], last[2] + 1) == (found[1], int(found[2])):
            runs[-1] = (last[0], last[1], int(found[2]))
        else:
            runs.append((found[1], int(found[2]), int(found[2])))
    return ", ".join(
        run if isinstance(run, str) else f"{run[0]}{run[1]}" + (f"..{run[0]}{run[2]}" if run[2] > run[1] else "")
        for run in runs
    )


def describe(commands: Iterable[Command], claims: Callable[[str], str]) -> list[str]:
    """One line for all commands that differ in their partition only; `claims` names the owner of a partition."""
    groups: dict[str, list[str]] = {}
    for command in commands:
        match command:
            case Give(partition, owner, reason):
                phrase = f"give {{}} to {owner}: {reason}"
            case BeginMove(partition, "", reason):
                phrase = f"take {{}} from {claims(partition)}: {reason}"
            case BeginMove(partition, next_owner, reason):
                phrase = f"move {{}} from {claims(partition)} to {next_owner}: {reason}"
            case Release(partition, reason):
                phrase = f"release {{}} from {claims(partition)}: {reason}"
            case Keep(partition, reason):
                phrase = f"keep {{}} on {claims(partition)}: {reason}"
            case Free(partition, reason):
                phrase = f"free {{}}: {reason}"
        groups.setdefault(phrase, []).append(partition)
    return [phrase.format(compress(partitions)) for phrase, partitions in groups.items()]


class Run:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.fleet = FleetModel(strategy_named(scenario.strategy), scenario.policy, scenario.partitions)
        self._wake_at_s: float | None = None
        self._said = ""

    def settle(self) -> list[str]:
        """Let the settled workers share the partitions, long ago; returns who owns what."""
        if not self._scenario.settled:
            return []
        fleet = self.fleet
        fleet.now_s = _LONG_AGO_S
        fleet.elect()
        for worker in self._scenario.settled:
            fleet.join(worker)
        self._look(prompt=True)
        self._advance(0.0, prompt=True)
        fleet.tally = type(fleet.tally)()
        return [self._owners()]

    def play(self) -> list[list[str]]:
        """The decisions after each event."""
        events = self._scenario.events
        outcomes = []
        for event, until_s in zip(events, [*(e.at_s for e in events[1:]), float("inf")], strict=True):
            if event.at_s < self.fleet.now_s:
                raise ValueError(f"{event.source!r} is earlier than the one before")
            self.fleet.now_s = event.at_s
            outcome = self._happen(event)
            outcome += self._look(self._scenario.prompt) if event.noticed else []
            outcome += self._advance(min(until_s, event.at_s + _QUIET_S), self._scenario.prompt)
            outcomes.append(outcome)
        return outcomes

    def _advance(self, until_s: float, prompt: bool) -> list[str]:
        """Wake the planner as often as it asks for it before then."""
        lines: list[str] = []
        for _ in range(_MOST_STEPS):
            if self._wake_at_s is None or self._wake_at_s >= until_s:
                self.fleet.now_s = max(self.fleet.now_s, min(until_s, self.fleet.now_s + _QUIET_S))
                return lines
            self.fleet.now_s = self._wake_at_s
            lines += self._look(prompt)
        raise AssertionError(f"the planner does not come to rest: {lines[-6:]}")

    def _look(self, prompt: bool) -> list[str]:
        """Step until there is nothing to do."""
        if self.fleet.planner is None:
            self._wake_at_s = None
            return []
        lines: list[str] = []
        for _ in range(_MOST_STEPS):
            owners = {p: c.owner for p, c in self.fleet.claims.items()}
            decision, refused = self.fleet.step()
            at = f"{self.fleet.now_s:.1f}"
            done = [c for c in decision.commands if c not in refused]
            lines += [f"{at} {line}" for line in describe(done, owners.__getitem__)]
            lines += [f"{at} could not {line}" for line in describe(refused, owners.__getitem__)]
            if (said := f"[{decision.state}] {decision.reason}") != self._said:
                self._said = said
                lines.append(f"{at} {said}")
            self._wake_at_s = decision.wake_at_s
            for worker, process in self.fleet.members.items():
                if process.state != "away" and prompt:
                    self.fleet.apply(worker)
                elif process.state != "away" and not self._scenario.lazy:
                    self.fleet.get_ready(worker)
            if not decision.commands:
                return lines
        raise AssertionError(f"the planner does not come to rest: {lines[-6:]}")

    def _owners(self) -> str:
        owners = self.fleet.owners()
        return " | ".join(
            f"{worker or 'nobody'}: {compress(owners[worker])}" for worker in sorted(owners, key=lambda w: (not w, w))
        )

    def _happen(self, event: Event) -> list[str]:
        names = expand(word for word in event.words if "=" not in word)
        options = dict(word.split("=") for word in event.words if "=" in word)
        if event.verb == "owners":
            return [f"{event.at_s:.1f} {self._owners()}"]
        if event.verb == "applied":
            workers, busy = (names[: (i := names.index("busy"))], names[i + 1 :]) if "busy" in names else (names, [])
            for worker in workers:
                self.fleet.apply(worker, busy)
        elif event.verb in _OF_WORKERS:
            for worker in names:
                _OF_WORKERS[event.verb](self.fleet, worker, options)
        elif event.verb in _OF_THE_REST:
            _OF_THE_REST[event.verb](self.fleet, names, options)
        else:
            raise ValueError(f"{event.source!r} names no event")
        return []


def _misread(fleet: FleetModel, worker: str, *, stale: bool) -> None:
    process = fleet.members[worker]
    process.stale_incarnation = process.incarnation - 1 if stale else 0


def _place(fleet: FleetModel, partitions: Sequence[str], worker: str = "") -> None:
    others = {p: w for p, w in fleet.orders.placed.items() if p not in partitions}
    fleet.order(placed=others | (dict.fromkeys(partitions, worker) if worker else {}))


def _without(names: Sequence[str], gone: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in set(gone))


_OF_WORKERS: dict[str, Callable[[FleetModel, str, dict[str, str]], None]] = {
    "join": lambda fleet, worker, options: fleet.join(
        worker, capacity=int(options.get("capacity", 500)), weight=float(options.get("weight", 1))
    ),
    "visit": lambda fleet, worker, options: fleet.join(worker, guest=True),
    "rejoin": lambda fleet, worker, options: fleet.rejoin(worker),
    "leave": lambda fleet, worker, options: fleet.leave(worker),
    "lose": lambda fleet, worker, options: fleet.lose(worker),
    "away": lambda fleet, worker, options: fleet.away(worker),
    "drain": lambda fleet, worker, options: fleet.drain(worker),
    "ready": lambda fleet, worker, options: fleet.get_ready(worker),
    "deaf": lambda fleet, worker, options: fleet.pull(worker, pulls=False),
    "slow": lambda fleet, worker, options: fleet.pull(worker, slow=True),
    "well": lambda fleet, worker, options: fleet.pull(worker),
    "stale": lambda fleet, worker, options: _misread(fleet, worker, stale=True),
    "fresh": lambda fleet, worker, options: _misread(fleet, worker, stale=False),
}
_OF_THE_REST: dict[str, Callable[[FleetModel, list[str], dict[str, str]], object]] = {
    "partitions": lambda fleet, names, options: setattr(fleet, "partitions", tuple(names)),
    "loads": lambda fleet, names, options: setattr(fleet, "loads", {p: float(x) for p, x in options.items()}),
    "refuse": lambda fleet, names, options: fleet.refused.update(names),
    "accept": lambda fleet, names, options: fleet.refused.difference_update(names),
    "vacate": lambda fleet, names, options: setattr(fleet, "planner", None),
    "elect": lambda fleet, names, options: fleet.elect(),
    "place": lambda fleet, names, options: _place(fleet, names[:-1], names[-1]),
    "unplace": lambda fleet, names, options: _place(fleet, names),
    "drained": lambda fleet, names, options: fleet.order(drained=(*fleet.orders.drained, *names)),
    "undrain": lambda fleet, names, options: fleet.order(drained=_without(fleet.orders.drained, names)),
    "pause": lambda fleet, names, options: fleet.order(paused=(*fleet.orders.paused, *names)),
    "resume": lambda fleet, names, options: fleet.order(paused=_without(fleet.orders.paused, names)),
    "hold": lambda fleet, names, options: fleet.order(hold_moves=True),
    "unhold": lambda fleet, names, options: fleet.order(hold_moves=False),
    "tick": lambda fleet, names, options: None,
}
