"""A bar for work that takes a while: on a terminal only, and gone when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(console: Console, doing: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many more are done; nothing is shown elsewhere than on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = console.is_terminal and not quiet
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda number: bar.advance(task, number)
