"""The second witness: `parti audit`'s code, in a process of its own, on the ledger and the stream of the demo.

`python -m parti.cli.demo.proof DIRECTORY URL` reads the `Tale` from a file in the directory, writes report and
`Proof` beside it, and says what it does in lines that begin with `SIGN`. A process, so that Ctrl-C ends Spark too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from parti.cli.demo.report import SKEW_S, UNSTORED_S, Tale, finish, pauses_by_reason
from parti.cli.demo.traffic import STREAM, SUBJECT
from parti.config import Settings
from parti.embedded import child
from parti.errors import ConfigError, PartiError
from parti.jetstream.target import Target
from parti.model.ledger import ledger_stream
from parti.spark.java import find_java
from parti.spark.promises import Check
from parti.spark.report_page import Move, Picture

SIGN = "demo: "
LOG = "audit.log"
_TALE, _PROOF, _REPORT = "tale.json", "proof.json", "report.html"
_POLL_S = 0.1
_STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class Proof:
    """What the audit found."""

    checks: Sequence[Check]
    seen: Mapping[str, int]
    pauses_s: Mapping[str, Sequence[float]]
    """Of the moves, by reason."""


def missing() -> str:
    """What an audit lacks on this machine, and how to get it; empty when it can run."""
    try:
        find_java()
    except ConfigError as error:
        return str(error)
    return "" if find_spec("pyspark") else "pyspark is not installed; install the extra parti[spark]"


async def prove(directory: Path, url: str, tale: Tale, say: Callable[[str], None]) -> tuple[Proof, str]:
    """Run the audit; returns what it found and the report. When cancelled, Spark is ended first.

    Raises `PartiError` when it did not come to a result.
    """
    (directory / _TALE).write_bytes(msgspec.json.encode(tale))
    log = directory / LOG
    process = child.spawn([sys.executable, "-P", "-m", __name__, str(directory), url], log)
    told = 0
    try:
        while process.poll() is None:
            await asyncio.sleep(_POLL_S)
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(SIGN)]
            for line in lines[told:]:
                say(line.removeprefix(SIGN))
            told = len(lines)
    finally:
        await asyncio.shield(asyncio.to_thread(child.end, process, _STOP_S))
    if process.returncode:
        words = next(reversed(log.read_text(errors="replace").splitlines()), "it said nothing")
        raise PartiError(f"the audit ended with code {process.returncode}: {words}")
    proof = msgspec.json.decode((directory / _PROOF).read_bytes(), type=Proof)
    page = (directory / _REPORT).read_text()
    for name in (_TALE, _PROOF, _REPORT):
        (directory / name).unlink()
    return proof, page


def main(directory: str, url: str) -> None:
    """Audit, in this process."""
    from parti.spark.audit_run import Wishes, run  # noqa: PLC0415 - need pyspark
    from parti.spark.audit_sources import Question, prepare  # noqa: PLC0415
    from parti.spark.session import open_session  # noqa: PLC0415

    # Spark's files are removed and its JVM is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A session of seconds: Java's second compiler and its parallel collector would take longer than they save.
    os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    place = Path(directory)
    tale = msgspec.json.decode((place / _TALE).read_bytes(), type=Tale)
    moves: list[Move] = []

    def add(picture: Picture) -> Picture:
        whole = finish(picture, tale, audited=True)
        moves.extend(whole.moves)
        return whole

    def say(text: str) -> None:
        # Where the report lies for now is of no interest.
        print(f"{SIGN}{'writing the report' if text.startswith('writing') else text}", flush=True)

    question = Question(
        # Constructed without the usual sources: the user's own settings are for another server.
        target=Target.of(Settings.model_construct(nats=(url,))),
        stream=STREAM,
        ledger_stream=ledger_stream(STREAM),
        bucket=None,
        template=SUBJECT,
        unstored_s=UNSTORED_S,
    )
    say("starting Spark")
    with open_session("parti-demo") as spark:
        result = run(spark, prepare(question), Wishes(skew_s=SKEW_S, report=place / _REPORT, finish=add), say)
    (place / _PROOF).write_bytes(
        msgspec.json.encode(Proof(result.checks, dict(result.seen), pauses_by_reason(moves)))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
