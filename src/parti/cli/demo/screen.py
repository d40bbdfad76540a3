"""The demo's output: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parti.cli.demo.fleet import WorkerProcess
from parti.cli.demo.stage import Stage
from parti.model.fleet import Claim
from parti.strategies import natural_order

COLOURS = ("#2f6fd6", "#c96a08", "#1f9d6b", "#b0389b", "#8a6d00", "#0c8da5", "#d1495b", "#6b5bd2")
"""Those of the report's plots, in the same order."""
_OTHER = "#707a87"
_DRAW_S = 0.15
_EVENTS = 4
_AROUND = 12
"""Lines that are neither cells, workers nor events."""
_BARS = " ▁▂▃▄▅▆▇█"


class Screen:
    """Shows the stage; says what happens, with the time since the load began."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._said: deque[str] = deque(maxlen=_EVENTS)
        self._live = False

    def say(self, text: str, style: str = "", *, whole: bool = False) -> None:
        """Print a line; not while the picture is live. `whole`: it is never broken into two, to be copied."""
        self.console.print(Text(text, style=style), soft_wrap=whole or not self.console.is_terminal)

    def announce(self, text: str) -> None:
        """A chapter begins: a line, unless the picture says so."""
        if not self._live:
            self.say(text)

    def tell(self, text: str, at_s: float) -> None:
        """Something has happened: a line, or the newest of those under the picture."""
        line = f"{at_s:5.1f} s  {text}"
        if self._live:
            self._said.append(line)
        else:
            self.say(line)

    @asynccontextmanager
    async def showing(self, stage: Stage) -> AsyncIterator[None]:
        """Show the stage while the block runs, where this is a terminal; the last picture stays."""
        if not self.console.is_terminal:
            yield
            return
        self._live = True
        try:
            with Live(console=self.console, screen=True, auto_refresh=False) as live:
                drawing = asyncio.create_task(self._keep_drawing(live, stage))
                try:
                    yield
                finally:
                    drawing.cancel()
                    await asyncio.gather(drawing, return_exceptions=True)
        finally:
            self._live = False
            self.console.print(self.draw(stage))

    async def _keep_drawing(self, live: Live, stage: Stage) -> None:
        while True:
            live.update(self.draw(stage), refresh=True)
            await asyncio.sleep(_DRAW_S)

    # ── the picture ───────────────────────────────────────────────────────────────────────────────────────────

    def draw(self, stage: Stage) -> RenderableType:
        """The stage as it is now, as high as the terminal allows."""
        width = self.console.width
        room = self.console.height - _AROUND - len(stage.fleet.workers) - len(self._said)
        return Group(
            _head(stage, width),
            Text(stage.look, style="bold", overflow="ellipsis"),
            Text(),
            _map(stage, width, room),
            Text(),
            _workers(stage),
            Text(),
            _totals(stage),
            _sparkline("msg/s", list(stage.history), width),
            _sparkline("waiting", [float(n) for n in stage.waiting], width),
            Text(),
            *(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in self._said),
        )


def _head(stage: Stage, width: int) -> Text:
    number, total = stage.chapter, len(stage.chapters)
    title = stage.chapters[number - 1].title if number else ""
    dots = "".join("●" if n < number else "◉" if n == number else "○" for n in range(1, total + 1))
    left = Text.assemble(
        ("parti demo", "bold"), "  ", (dots, "cyan"), f"  {number} of {total}: ", (title, "bold cyan")
    )
    left.append(f"{stage.elapsed_s:.0f} s".rjust(max(2, width - left.cell_len - 1)), style="dim")
    return left


def _colour(stage: Stage, worker: str) -> str:
    known = natural_order(set(stage.names.values()))
    place = known.index(worker) if worker in known else len(COLOURS)
    return COLOURS[place] if place < len(COLOURS) else _OTHER


def _map(stage: Stage, width: int, room: int) -> RenderableType:
    """A cell for each partition: with its name where there is room, else a block."""
    names = stage.partitions
    wide = max(map(len, names)) + 2
    named = -(-len(names) // max(1, width // (wide + 1))) <= room
    cell = wide if named else 2
    in_a_row = max(1, width // (cell + 1))
    gone = {stage.names.get(each.name, "") for each in stage.fleet.workers if each.state == "killed"}
    claims = stage.situation.records.claims
    lines = []
    for first in range(0, len(names), in_a_row):
        line = Text(no_wrap=True)
        for name in names[first : first + in_a_row]:
            text = f" {name} ".ljust(wide) if named else "  "
            line.append_text(_cell(stage, text, claims.get(name), gone))
            line.append(" ")
        lines.append(line)
    return Group(*lines)


def _cell(stage: Stage, text: str, claim: Claim | None, gone: set[str]) -> Text:
    if claim is None or not claim.owner:
        return Text(text.replace(" ", "·") if not text.strip() else text, style="dim")
    colour = _colour(stage, claim.owner)
    if claim.owner in gone:
        # It has no live owner: struck out, in the colour of the one who had it.
        name = text.strip()
        return (
            Text.assemble(" ", (name, f"strike bold {colour}"), " " * (len(text) - len(name) - 1))
            if name
            else (Text("✗ ", style=f"bold {colour}"))
        )
    style = f"bold #ffffff on {colour}"
    if claim.state in {"preparing", "moving"} and claim.next:
        return Text.assemble((text[:-1], style), (" ", f"on {_colour(stage, claim.next)}"))
    return Text(text, style=style)


def _workers(stage: Stage) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column("worker", no_wrap=True)
    for title in ("pid", "owns", "msg/s", "lag", "handled"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for worker in sorted(stage.fleet.workers, key=stage.name_of):
        table.add_row(*_worker_row(stage, worker))
    return table


def _worker_row(stage: Stage, worker: WorkerProcess) -> list[Text]:
    name = stage.names.get(worker.name)
    here = worker.state in {"running", "leaving"}
    state, style = _state(stage, worker, name)
    lag = stage.lags.get(name) if name and here else None
    return [
        Text("  ", style=f"on {_colour(stage, name)}") if name and here else _trace(stage, worker, name),
        Text(name or "starts", style="" if here and name else "dim"),
        Text(str(worker.pid), style="dim"),
        Text(str(stage.owned_by(name)) if name and here else ""),
        Text(f"{stage.rates.get(worker.name, 0):,.0f}" if here and name else ""),
        Text("" if lag is None else f"{lag:,}"),
        Text(f"{stage.notes.finished[worker.name]:,}"),
        Text(state, style=style),
    ]


def _trace(stage: Stage, worker: WorkerProcess, name: str | None) -> Text:
    """The colour of one whose cells may still have it."""
    return Text("✗✗", style=f"bold {_colour(stage, name)}") if name and worker.state == "killed" else Text("  ")


def _state(stage: Stage, worker: WorkerProcess, name: str | None) -> tuple[str, str]:
    if worker.state == "killed":
        return "killed (SIGKILL)", "bold red"
    if worker.state == "left":
        return "left", "dim"
    if worker.state == "leaving":
        return "leaves", "yellow"
    if name is None:
        return "starts", "dim"
    if name in stage.situation.orders.drained:
        return "drains", "yellow"
    return ("works, rebalancer", "green") if stage.rebalancer == name else ("works", "green")


def _totals(stage: Stage) -> Text:
    longest_s = max((move.pause_s for move in stage.moves), default=0.0)
    waiting = stage.waiting[-1] if stage.waiting else 0
    return Text.assemble(
        (f"{stage.publisher.acknowledged:,}", "bold"),
        " published, ",
        (f"{len(stage.notes.done):,}", "bold"),
        " finished, ",
        (f"{waiting:,}", "bold"),
        " waiting; ",
        (f"{len(stage.moves):,}", "bold"),
        " changes of owner, longest pause ",
        (f"{longest_s * 1000:,.0f} ms", "bold"),
    )


def _sparkline(title: str, values: Sequence[float], width: int) -> Text:
    """The values as bars, and the last one as a number."""
    columns = max(10, min(60, width - 24))
    step = max(1, -(-len(values) // columns))
    points = [max(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(points, default=0.0)
    bars = "".join(_BARS[round(value / top * (len(_BARS) - 1)) if top else 0] for value in points)
    now = values[-1] if values else 0.0
    return Text.assemble((f"{title:<8}", "dim"), f"{now:>6,.0f} ", (bars, "cyan"))
