"""Workers without any logic: overlapping pulls and batched acknowledgements on parti's protocol reader.

What is measured through them is the server. Each worker has its own connection; all of them share one process.
"""

from __future__ import annotations

import json
import struct
import time
from array import array
from collections import Counter

import nats
from nats.aio.client import Client

from parti.jetstream.wire import Wire, pub

STAMP = struct.Struct("<QQ")
"""At the head of each payload: when it was sent (ns since 1970), and its number."""
BATCH, SLOTS = 200, 2
_BODY = json.dumps({"batch": BATCH, "expires": 30_000_000_000, "idle_heartbeat": 5_000_000_000}).encode()


async def connected(url: str) -> Client:
    """A connection that ends with its server, without a word."""

    async def ignore(_error: Exception) -> None:
        pass

    return await nats.connect(url, allow_reconnect=False, error_cb=ignore)


Pulled = tuple[str, str, int]
"""Stream, consumer and worker."""


class Tally:
    """Which messages have come, when, and how old they were."""

    def __init__(self) -> None:
        self.base = 0
        """Messages with a lower number do not count: they belong to an earlier phase."""
        self.seen = bytearray(1 << 20)
        self.at_ns = array("q")
        self.age_ns = array("q")
        self.repeats = 0
        self.statuses: Counter[str] = Counter()

    def note(self, payload: bytes) -> None:
        """A message has come."""
        stamp, number = STAMP.unpack_from(payload)
        if number < self.base:
            return
        if number >= len(self.seen):
            self.seen.extend(bytes(number))
        if self.seen[number]:
            self.repeats += 1
            return
        self.seen[number] = 1
        now = time.time_ns()
        self.at_ns.append(now)
        self.age_ns.append(now - stamp)

    def mark(self, base: int) -> None:
        """Begin a new phase with the message of this number."""
        self.base = base
        self.at_ns, self.age_ns = array("q"), array("q")


class Worker:
    """One connection and its pulls."""

    def __init__(self, client: Client, tally: Tally) -> None:
        self.client = client
        self._wire = Wire(client)
        self._tally = tally
        self._out: list[bytes] = []
        self._open: set[bytes] = set()
        self._wire.on_chunk(self._flush)

    def _flush(self) -> None:
        self._wire.write(b"".join(self._out))
        self._out.clear()

    def pull(self, stream: str, consumer: str) -> None:
        """Keep `SLOTS` pulls standing on a consumer."""
        for _ in range(SLOTS):
            self._slot(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}".encode())

    def _slot(self, subject: bytes) -> None:
        inbox, left = self._wire.new_inbox(), BATCH
        request = pub(subject, _BODY, inbox.encode())
        out, note, still = self._out, self._tally.note, self._open

        def sink(_subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
            nonlocal left
            if reply:
                out.append(b"PUB %b 4\r\n+ACK\r\n" % reply)
                left -= 1
                note(payload)
            elif self._over(header or b""):
                left = 0
            if not left and sid in still:
                left = BATCH
                out.append(request)

        sid = self._wire.subscribe(inbox, sink)
        still.add(sid)
        self._wire.write(request)

    def _over(self, header: bytes) -> bool:
        """Whether a status ends a pull that has to be followed by another."""
        status = header[9:].split(b"\r\n", 1)[0].decode()
        if status.startswith("100"):
            return False
        self._tally.statuses[status] += 1
        return status.startswith("408")

    def drop(self) -> None:
        """End all pulls. What the server has sent already is still taken and acknowledged."""
        # Not `unsubscribe`: it would drop what is on its way, which then came back after AckWait only.
        self._wire.write(b"".join(b"UNSUB %b\r\n" % sid for sid in self._open))
        self._open.clear()


class Readers:
    """All workers; lives in a process of its own."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._tally = Tally()

    async def connect(self, url: str, workers: int) -> None:
        """Begin anew on another server."""
        await self.close()
        self._tally = Tally()
        self._workers = [Worker(await connected(url), self._tally) for _ in range(workers)]

    def pull(self, consumers: list[Pulled]) -> None:
        """Pull from these, besides what is pulled from already."""
        for stream, consumer, worker in consumers:
            self._workers[worker].pull(stream, consumer)

    def drop(self) -> None:
        """End all pulls, without waiting for a server that may be slow to answer."""
        for worker in self._workers:
            worker.drop()

    async def leave(self, worker: int) -> None:
        """End the pulls of one worker; when this returns, the server knows."""
        self._workers[worker].drop()
        await self._workers[worker].client.flush(timeout=30)

    def mark(self, base: int) -> None:
        """Begin a new phase: see `Tally.mark`."""
        self._tally.mark(base)

    def count(self) -> int:
        """Messages of this phase that have come."""
        return len(self._tally.at_ns)

    def take(self) -> tuple[bytes, bytes]:
        """When each message of this phase came, and how old it was: arrays of nanoseconds, in the order of coming."""
        return self._tally.at_ns.tobytes(), self._tally.age_ns.tobytes()

    def oddities(self) -> dict[str, int]:
        """Repeated messages and unusual statuses since `connect`."""
        return {**self._tally.statuses, **({"repeated": self._tally.repeats} if self._tally.repeats else {})}

    async def close(self) -> None:
        """Close all connections."""
        for worker in self._workers:
            await worker.client.close()
        self._workers = []
