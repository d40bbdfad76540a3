"""What a server costs while something is done to it, and whether other processes disturb the measurement."""

from __future__ import annotations

import asyncio
import os
import time

import psutil

_CALM_CORES = 0.25
_CALM_LIMIT_S = 5.0
_QUIET_CORES = 0.25
_QUIET_S = 1.0


class ServerCosts:
    """CPU time and memory of one server process, read from /proc, next to those of processes that belong to us."""

    def __init__(self, server_pid: int, *our_pids: int, patience_s: float) -> None:
        self._server = psutil.Process(server_pid)
        self._ours = [self._server, *(psutil.Process(pid) for pid in (*our_pids, os.getpid()))]
        self._patience_s = patience_s
        self.most_rss_mb = 0.0
        """The largest memory seen so far."""

    def cpu_s(self) -> float:
        """CPU time of the server so far."""
        return _used_s(self._server)

    def others_s(self) -> float:
        """CPU time that processes have used so far which are no part of this."""
        used = psutil.cpu_times()
        busy_s = sum(used) - used.idle - used.iowait - used.guest - used.guest_nice
        return busy_s - sum(map(_used_s, self._ours))

    def rss_mb(self) -> float:
        """Memory of the server now."""
        now_mb = round(self._server.memory_info().rss / 1e6, 1)
        self.most_rss_mb = max(self.most_rss_mb, now_mb)
        return now_mb

    async def watch(self, seconds: float) -> None:
        """Let time pass with an eye on the server's memory."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self.rss_mb()
            await asyncio.sleep(min(left_s, 0.25))

    async def calm(self, for_s: float) -> None:
        """Wait until the server has finished what it still had to do: little CPU time for so long."""
        until_s = time.monotonic() + _CALM_LIMIT_S
        while time.monotonic() < until_s:
            before_s = self.cpu_s()
            await asyncio.sleep(for_s)
            if (self.cpu_s() - before_s) / for_s < _CALM_CORES:
                return

    async def quiet(self) -> None:
        """Wait until other processes leave the machine alone, or patience, which is one for all calls, is used up."""
        while self._patience_s > 0:
            before_s = self.others_s()
            await asyncio.sleep(_QUIET_S)
            self._patience_s -= _QUIET_S
            if (self.others_s() - before_s) / _QUIET_S < _QUIET_CORES:
                return


def _used_s(process: psutil.Process) -> float:
    used = process.cpu_times()  # from /proc/<pid>/stat
    return used.user + used.system
