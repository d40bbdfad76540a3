"""What came out, in a few lines: verdicts, pauses, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from parti.cli.demo.check import Findings
from parti.cli.demo.proof import LOG, Proof
from parti.cli.demo.report import audit_commands
from parti.cli.demo.screen import Screen
from parti.spark.report_page import quantile


@dataclass(frozen=True, slots=True)
class Result:
    """What came out."""

    findings: Findings
    proof: Proof | None
    left_out: str
    """Why there is no audit; empty when there is one."""
    pauses_s: Mapping[str, Sequence[float]]
    page: str
    failed: bool = False
    """An audit was begun and did not come to a result."""

    @property
    def broken(self) -> tuple[str, ...]:
        """The promises that one of the witnesses found broken."""
        checks = [*self.findings.checks, *(self.proof.checks if self.proof else ())]
        return tuple(dict.fromkeys(check.name for check in checks if not check.held))


def summarise(screen: Screen, result: Result, report: Path, data: Path) -> None:
    """Print verdicts, pauses, and where everything is."""
    console = screen.console
    console.print()
    console.print(_verdicts(result))
    console.print()
    console.print(_pauses(result.pauses_s))
    console.print()
    if result.failed:
        screen.say(f"The audit in Spark failed: {result.left_out}; see {data / LOG}", style="bold red")
    elif result.left_out:
        screen.say(f"The audit in Spark was left out: {result.left_out}", style="yellow")
    if result.broken:
        screen.say(f"Broken: {', '.join(result.broken)}. Please report it, with {data}.", style="bold red")
    else:
        repeated = result.findings.seen["excused"]
        screen.say(
            f"Every promise was kept: {result.findings.seen['messages']:,} messages, none lost, none out of order; "
            f"{repeated:,} handled again, all of them just finished by the worker that was killed.",
            style="bold green",
        )
    screen.say(f"Report: {report}")
    screen.say(f"Data:   {data}, to be audited again by hand:")
    for command in audit_commands(data / "store", report.with_name("audit.html")):
        screen.say(f"  {command}", style="dim", whole=True)


def _verdicts(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("promise", no_wrap=True)
    table.add_column("what is counted")
    table.add_column("notes", justify="right", no_wrap=True)
    if result.proof:
        table.add_column("Spark", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    noted = {check.name: check for check in result.findings.checks}
    checks = result.proof.checks if result.proof else result.findings.checks
    for check in checks:
        witnesses = [noted.get(check.name), *([check] if result.proof else [])]
        held = check.name not in result.broken
        table.add_row(
            check.name,
            check.title,
            *(Text("" if each is None else f"{each.count:,}") for each in witnesses),
            Text("held", style="green") if held else Text("broken", style="bold red"),
        )
    return table


def _pauses(pauses_s: Mapping[str, Sequence[float]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("changes of owner because of", no_wrap=True)
    for title in ("number", "pause p50", "p99", "longest"):
        table.add_column(title, justify="right", no_wrap=True)
    for reason, found in pauses_s.items():
        shown = (f"{quantile(found, part) * 1000:,.0f} ms" for part in (0.5, 0.99, 1.0))
        table.add_row(reason, f"{len(found):,}", *shown)
    return table
