"""Messages for the Spark benchmarks: a stream filled as fast as the server takes them, or at a steady rate."""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target

SIZE = 256
SUBJECTS = 2000
_AT_ONCE = 2000


def subject(number: int, root: str = "dc") -> str:
    """One of the subjects; neighbours in the stream lie far apart."""
    place = number * 7919 % SUBJECTS
    return f"{root}.t{place % 50}.c{place // 50}.completion"


def fill(url: str, stream: str, rows: int, *, subjects: tuple[str, ...] = ("dc.>",)) -> None:
    """Create a file stream and publish so many messages to it; the last of each write is acknowledged."""
    with BlockingClient.open(Target(servers=(url,)), name="filler") as client:
        config = {"name": stream, "subjects": list(subjects), "storage": "file", "allow_direct": True}
        client.api(f"STREAM.CREATE.{stream}", config)
        for begin in range(0, rows, _AT_ONCE):
            publish(client, begin, min(_AT_ONCE, rows - begin))


def publish(client: BlockingClient, begin: int, count: int, root: str = "dc") -> None:
    """Publish messages and wait for the acknowledgement of the last one."""
    payload = bytes(SIZE)
    lines = [
        b"PUB %b %d\r\n%b\r\n" % (subject(number, root).encode(), SIZE, payload)
        for number in range(begin, begin + count - 1)
    ]
    client.send(b"".join(lines))
    client.request(subject(begin + count - 1, root), payload, timeout_s=30)


class Filler:
    """A process that publishes to `live.…` at a steady rate."""

    def __init__(self, url: str, *, rate: int, seconds: int) -> None:
        self._command = [sys.executable, "-m", "benchmarks.spark_traffic", url, str(rate), str(seconds)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Filler:
        self._process = subprocess.Popen(self._command)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def finished(self) -> bool:
        """Whether everything is published."""
        return self._process is not None and self._process.poll() is not None


def main() -> None:
    """Publish at a steady rate: twenty writes a second."""
    url, rate, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    each, sent = rate // 20, 0
    with BlockingClient.open(Target(servers=(url,)), name="filler") as client:
        begin_s = time.monotonic()
        while sent < rate * seconds:
            publish(client, sent, min(each, rate * seconds - sent), root="live")
            sent += each
            time.sleep(max(0.0, begin_s + sent / rate - time.monotonic()))


if __name__ == "__main__":
    main()
