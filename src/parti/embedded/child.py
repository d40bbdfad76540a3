"""Child processes that do not outlive this one."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

_Process = subprocess.Popen[bytes]
_LAUNCHER = Path(__file__).with_name("launcher.py")


class _Spawner:
    """One thread that starts all children and lives as long as the process.

    The kernel's parent-death signal is tied to the THREAD that started the child, not to the process: a child started
    by a short-lived thread (asyncio.to_thread, a test's executor) would be killed when that thread ends. A daemon
    thread, since it must neither hold up the exit nor end before the exit handlers have stopped the servers.
    """

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], _Process], Future[_Process]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="parti-embedded-spawner", daemon=True).start()

    def run(self, job: Callable[[], _Process]) -> _Process:
        future: Future[_Process] = Future()
        self._jobs.put((job, future))
        return future.result()

    def _serve(self) -> None:
        while True:
            job, future = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:  # handed to the caller, whatever it is
                future.set_exception(error)


_spawner: _Spawner | None = None
_spawner_lock = threading.Lock()


def _the_spawner() -> _Spawner:
    global _spawner  # noqa: PLW0603 - one thread per process is the point
    with _spawner_lock:
        # Threads do not survive a fork, so a forked process needs its own.
        if _spawner is None or _spawner.owner_pid != os.getpid():
            _spawner = _Spawner()
        return _spawner


def spawn(command: Sequence[str], log_path: Path) -> _Process:
    """Start a command whose output is appended to a file, and which ends with this process.

    On Linux the kernel kills it even when this process is killed; elsewhere only an orderly exit ends it. It gets its
    own session: Ctrl-C in a terminal reaches this process alone, which then stops the child in order.
    """
    if sys.platform == "linux" and sys.executable:
        # -I -S: no site, no environment; the launcher costs about 30 ms.
        command = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *command]

    def start() -> _Process:
        with log_path.open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    return _the_spawner().run(start)


def end(process: _Process, grace_s: float) -> None:
    """Stop a child: SIGTERM, and SIGKILL once `grace_s` has passed; on return it is gone and reaped.

    A child frozen with SIGSTOP is woken first, else it could not obey.
    """
    if process.poll() is None and grace_s > 0:
        process.terminate()
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
    if process.poll() is None:
        process.kill()
        process.wait()
