"""No task and no thread without an owner: whoever starts one does so through `parti.telemetry.tasks`, or is listed.

A task that nobody owns dies without a word, and with it whatever waited for it. The list below names each place that
starts one all the same, and who notices its end.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "parti"
STARTERS = frozenset(
    {"create_task", "ensure_future", "run_coroutine_threadsafe", "run_in_executor", "Thread", "start_new_thread"}
)

ROOMS = {
    "sim": "a simulated world steps its tasks itself",
    "testing": "a test's own process: what fails there fails the test",
    "embedded": "starts a server for tests and demos: awaited, shielded, in the same function",
    "cli/demo": "the demo's own process: awaited by the scene that starts them",
}
"""Where no worker, leader, job worker, console or Spark driver runs."""

PLACES = {
    "telemetry/tasks.py owned": "the owners themselves",
    "telemetry/tasks.py _begin": "the owners themselves",
    "telemetry/tasks.py beside": "the owners themselves",
    "app/supervisor.py run": "a TaskGroup, awaited where it is made",
    "coordination/candidacy.py _serve": "a TaskGroup, awaited where it is made",
    "jetstream/waiting.py count": "a TaskGroup, awaited where it is made",
    "jetstream/requested.py _read_block": "a TaskGroup, awaited where it is made",
    "spark/replay_task.py _run_async": "a TaskGroup, awaited where it is made",
    "coordination/sources.py _call_in_thread": "a user's function: awaited, or its outcome is looked at",
    "app/migration/site.py in_portions": "each is awaited before the next, and at the end",
    "jetstream/state_store.py _send": "chunks under way: awaited in their order",
    "jetstream/state_store.py get": "chunks under way: awaited in their order",
    "jobs/hand.py _run": "the handler's call: waited for, and looked at how it ended",
    "jobs/calls.py run": "threads of handlers: whatever a call raises goes to who awaits it",
    "worker/state_exchange.py next_in_thread": "the thread waits for its result",
    "worker/state_exchange.py _start": "a thread of a handler's method: whatever it raises goes to who awaits it",
    "worker/runners.py _start_pump": "a runner: whoever started it is called when it ends, and its lane goes on",
    "worker/runners.py kick": "threads of handlers: whatever a call raises is posted to the event loop",
    "jetstream/connection.py _within": "awaited in the same function, whatever happens",
    "telemetry/watchdog.py start": "the watchdog's thread: each turn catches what it raises",
    "coordination/stall_notes.py write": "a note of a stall: what it raises is logged, and the next one waits for it",
    "app/gil_guard.py exit_when_gil_is_held": "joined where it is made; what it calls to no avail is tried again",
    "telemetry/http.py start": "the thread of the metrics server: socketserver catches what a request raises",
    "spark/replay_desk.py __init__": "the desk's thread: what it raises is `failure`, which every lane looks at",
    "spark/interruption.py interrupted_by": "joined where it is made; what Spark raises meanwhile is suppressed",
}
"""Module and function, and who notices the end of what is started there."""


class Finder(ast.NodeVisitor):
    """Finds what starts a task or a thread, and in which function."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._function = ""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._function = self._function, self._function or node.name
        self.generic_visit(node)
        self._function = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast looks for

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in STARTERS:
            self.found.append(self._function)
        self.generic_visit(node)


def started_in(path: Path) -> list[str]:
    """The functions that start a task or a thread; empty names are the module itself."""
    finder = Finder()
    finder.visit(ast.parse(path.read_text()))
    return finder.found


def starters() -> set[str]:
    """Every place that starts something, but for the rooms: module and function."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(tuple(f"{room}/" for room in ROOMS)):
            found |= {f"{name} {function}" for function in started_in(path)}
    return found


def test_every_task_and_thread_has_an_owner() -> None:
    strangers = sorted(starters() - PLACES.keys())
    assert not strangers, (
        f"tasks or threads without an owner in {strangers}; start them by supervise, owned or beside of "
        f"parti.telemetry.tasks, so that their end is noticed"
    )


def test_the_list_names_only_places_that_need_it() -> None:
    assert not sorted(PLACES.keys() - starters())


@pytest.mark.parametrize(
    "text",
    [
        "asyncio.create_task(work())",
        "loop.create_task(work())",
        "asyncio.get_running_loop().create_task(work(), name='x')",
        "tasks = [asyncio.ensure_future(each) for each in runs]",
        "threading.Thread(target=work).start()",
        "from threading import Thread\nThread(target=work)",
    ],
)
def test_what_starts_a_task_or_a_thread_is_found(tmp_path: Path, text: str) -> None:
    module = tmp_path / "module.py"
    module.write_text(text)
    assert started_in(module)


def test_what_only_mentions_one_is_not_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""create_task(work())"""\ntask: asyncio.Task[None] | None = None\nasync def run(): await work()\n'
    )
    assert not started_in(module)
