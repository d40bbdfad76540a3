"""What is done to workers and servers, when it was done, and what it excuses."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from dataclasses import dataclass

from chaos.checker import EVERYBODY, Interruption
from chaos.workers import WorkerProcess, Workers


@dataclass(slots=True)
class Fault:
    """Something that was done to a process or a server."""

    kind: str
    target: str
    """Name of the process, or of the server."""
    at_ns: int
    until_ns: float = math.inf
    """When it was undone."""
    interrupts: bool = False
    """Whether the target could not store its positions from then on."""
    outage: bool = False
    """Whether nobody could."""
    leases: bool = False
    """Whether leases may have ended by it although their holders were well."""
    sent_ns: int = 0
    """When the signal of a stop was sent: it works between then and `at_ns`, or a little later."""

    def undone(self) -> None:
        """It is over now."""
        self.until_ns = time.time_ns()


class Faults:
    """Does things to workers and remembers them."""

    def __init__(self, workers: Workers) -> None:
        self.all: list[Fault] = []
        self._workers = workers

    def note(self, kind: str, target: str, *, interrupts: bool = False, outage: bool = False) -> Fault:
        """Remember a fault that begins now."""
        fault = Fault(kind, target, time.time_ns(), interrupts=interrupts, outage=outage)
        self.all.append(fault)
        return fault

    def outage(self, kind: str, target: str, *, leases: bool = False) -> Fault:
        """Remember the loss of a server or of a leader, without which nobody can store anything.

        `leases`: it may take longer than a lease lasts, and some workers may be back before others.
        """
        fault = self.note(kind, target, outage=True)
        fault.leases = leases
        return fault

    async def kill(self, worker: WorkerProcess) -> Fault:
        """SIGKILL."""
        fault = self.note("kill", worker.name, interrupts=True)
        await self._workers.end(worker, signal.SIGKILL)
        return fault

    async def terminate(self, worker: WorkerProcess) -> int:
        """SIGTERM; returns the exit code.

        A worker that has to leave while the server is away says by its exit code that something will be repeated.
        """
        fault = self.note("terminate", worker.name)
        code = await self._workers.end(worker, signal.SIGTERM)
        fault.undone()
        # Whoever was away at that time is excused, and nobody else.
        fault.interrupts = code != 0 and any(other.outage for other in self._during(fault))
        if fault.interrupts:
            fault.until_ns = math.inf
        return code

    def stop(self, worker: WorkerProcess) -> Fault:
        """SIGSTOP, until `wake`."""
        sent_ns = time.time_ns()
        worker.signal(signal.SIGSTOP)
        fault = self.note("stop", worker.name, interrupts=True)
        fault.sent_ns = sent_ns
        return fault

    def wake(self, worker: WorkerProcess, stopped: Fault) -> None:
        """SIGCONT; what it does from here on is no longer excused."""
        stopped.undone()
        worker.signal(signal.SIGCONT)

    def counts(self) -> Counter[str]:
        """How often each kind was done."""
        return Counter(fault.kind for fault in self.all)

    def interruptions(self) -> list[Interruption]:
        """What the checker has to know.

        Whoever dies or is cut off during an outage, or soon after, could not store its positions since the outage
        began.
        """
        found = [Interruption(EVERYBODY, f.at_ns, min(f.until_ns, 2**62)) for f in self.all if f.leases]
        for fault in self.all:
            if fault.interrupts:
                found.append(Interruption(fault.target, fault.at_ns, fault.until_ns))
                found += [
                    Interruption(fault.target, other.at_ns, min(other.until_ns, fault.until_ns, 2**62))
                    for other in self._during(fault)
                    if other.outage
                ]
        return found

    def _during(self, fault: Fault, margin_s: float = 2.0) -> list[Fault]:
        margin_ns = margin_s * 1e9
        return [
            other
            for other in self.all
            if other is not fault and other.at_ns <= fault.until_ns and other.until_ns + margin_ns >= fault.at_ns
        ]
