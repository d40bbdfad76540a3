"""A publisher as a process of its own: so many messages a second to each partition, noted once acknowledged.

Plain nats-py, nothing of parti. It is told what to do by lines of JSON on its standard input: `{"rates": {"p0": 20}}`
sets messages a second, `{"stop": true}` ends it when all that was sent is acknowledged; so does the end of the input.
Its file gets a line for each acknowledged message: sequence, partition, when it was first sent and when it was
acknowledged (wall clock, nanoseconds). What is not acknowledged is sent again under the same id.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.audit import MSG_ID
from benchmarks.traffic import connect
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

_WINDOW = 1000
"""Most messages on their way: an outage must not end in a flood."""
_RETRY_S = 1.0
_LOOK_S = 0.1
"""How often is looked for what has to be sent again."""
_TICK_S = 0.001


@dataclass(slots=True)
class Sending:
    """A message on its way."""

    partition: str
    first_ns: int
    tried_s: float


class RatedPublisher:
    """Publishes to each partition at a rate that can be changed at any time."""

    def __init__(self, name: str, subject: str, path: Path) -> None:
        self.stopping = False
        self._name = name
        self._subject = subject
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._rates: dict[str, float] = {}
        self._due: list[tuple[float, int, str]] = []
        self._turn = 0
        """Number of the last command: what was scheduled before it is out of date."""
        self._count = 0
        self._sending: dict[int, Sending] = {}
        self._inbox = ""
        self._looked_s = 0.0

    def obey(self, line: bytes) -> None:
        """Take in one command; an empty line is the end of the input."""
        command: dict[str, Any] = json.loads(line) if line.strip() else {"stop": True}
        self.stopping = self.stopping or bool(command.get("stop"))
        if "rates" in command:
            self._rates = {p: float(rate) for p, rate in command["rates"].items() if rate > 0}
            self._turn += 1
            now_s = time.monotonic()
            # Spread over the first interval, or all partitions would come at once.
            self._due = [
                (now_s + (n + 1) / len(self._rates) / rate, self._turn, p)
                for n, (p, rate) in enumerate(self._rates.items())
            ]
            heapq.heapify(self._due)

    async def run(self, servers: list[str], commands: asyncio.StreamReader) -> None:
        """Publish until told to stop; returns when everything is acknowledged."""
        client = await connect(servers)
        listening = asyncio.create_task(self._listen(commands))
        try:
            self._inbox = client.new_inbox()
            await client.subscribe(f"{self._inbox}.*", cb=self._on_answer)
            while not self.stopping or self._sending:
                if client.is_connected:
                    await self._send_due(client)
                    await self._send_again(client)
                await asyncio.sleep(_TICK_S)
        finally:
            listening.cancel()
            await client.close()

    async def _listen(self, commands: asyncio.StreamReader) -> None:
        while not self.stopping:
            self.obey(await commands.readline())

    async def _send_due(self, client: Client) -> None:
        now_s = time.monotonic()
        while not self.stopping and self._due and self._due[0][0] <= now_s:
            due_s, turn, partition = heapq.heappop(self._due)
            pause_s = 1 / self._rates[partition]
            # Whoever is late leaves out instead of catching up.
            heapq.heappush(self._due, (max(due_s + pause_s, now_s - 0.1), turn, partition))
            if len(self._sending) < _WINDOW:
                self._sending[self._count] = Sending(partition, time.time_ns(), now_s)
                self._count += 1
                await self._send(client, self._count - 1)

    async def _send_again(self, client: Client) -> None:
        now_s = time.monotonic()
        if now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        for number, sending in list(self._sending.items()):
            if sending.tried_s + _RETRY_S <= now_s:
                sending.tried_s = now_s
                await self._send(client, number)

    async def _send(self, client: Client, number: int) -> None:
        try:
            await client.publish(
                self._subject.format(self._sending[number].partition),
                b"%064d" % number,
                reply=f"{self._inbox}.{number}",
                headers={MSG_ID: f"{self._name}-{number}"},
            )
        except (NatsError, OSError):
            pass  # Sent again when it is overdue.

    async def _on_answer(self, msg: Msg) -> None:
        answer = json.loads(msg.data) if msg.data else {"error": "nobody was there"}
        if "error" in answer:
            return
        if sent := self._sending.pop(int(msg.subject.rpartition(".")[2]), None):
            line = f"{answer['seq']} {sent.partition} {sent.first_ns} {time.time_ns()}\n"
            os.write(self._file, line.encode())


async def publish(options: argparse.Namespace) -> None:
    """Publish as standard input says."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await RatedPublisher(options.name, options.subject, options.file).run(options.servers.split(","), reader)


def main() -> None:
    """Parse and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", required=True, help="with commas between")
    parser.add_argument("--subject", required=True, help="with {} in place of the partition")
    parser.add_argument("--name", default="pub", help="first part of message ids")
    parser.add_argument("--file", type=Path, required=True, help="where acknowledged messages are noted")
    asyncio.run(publish(parser.parse_args()))


if __name__ == "__main__":
    main()
