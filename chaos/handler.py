"""The apps of the workers: their handlers note the start and the end of each message in a file of their process.

One line for each start (`S`) and end (`E`, or `R` if it raised): wall clock in nanoseconds, partition, sequence,
fence, worker and process id. A line is a single write to a file opened for appending, so that whatever ends the
process leaves whole lines.

    parti worker chaos.handler:app      an async handler
    parti worker chaos.handler:plain    a plain function, in a thread
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from pathlib import Path

import msgspec

import parti
from chaos.handler_options import ENV_OPTIONS, ENV_PROCESS, LOOP, HandlerOptions
from chaos.odd_messages import refuse

options = msgspec.json.decode(os.environ[ENV_OPTIONS], type=HandlerOptions)
_file = os.open(
    Path(options.notes) / f"{os.environ[ENV_PROCESS]}.notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
)
_pid = os.getpid()


def note(what: str, message: parti.Message) -> None:
    """Write one line; the time is taken first."""
    now_ns = time.time_ns()
    owner = message.ownership
    line = f"{what} {now_ns} {owner.partition.keys['p']} {message.seq} {owner.fence} {owner.worker_id} {_pid}\n"
    os.write(_file, line.encode())


def takes_s(message: parti.Message) -> float:
    """How long this message takes."""
    least, most = options.takes_ms
    chance = zlib.crc32(b"%d %d %s" % (options.seed, message.seq, message.partition.id.encode())) / 2**32
    return (least + (most - least) * chance) / 1000


def end(message: parti.Message) -> None:
    """Note the end; odd messages are refused, and become dead letters."""
    try:
        refuse(message.subject, message.headers, message.data)
    except Exception:
        note("R", message)
        raise
    note("E", message)


def note_loop(_old: object, _new: object) -> None:
    """Write down whose event loop this worker runs on."""
    path = Path(options.notes) / f"{os.environ[ENV_PROCESS]}{LOOP}"
    path.write_text(type(asyncio.get_running_loop()).__module__)


async def handle(message: parti.Message) -> None:
    """Take a while on the event loop."""
    note("S", message)
    await asyncio.sleep(takes_s(message))
    end(message)


def handle_plainly(message: parti.Message) -> None:
    """Take a while in a thread."""
    note("S", message)
    time.sleep(takes_s(message))
    end(message)


app = parti.App(stream=options.stream, subject=options.template, partitions=options.partitions)
app.handler(handle)
plain = parti.App(stream=options.stream, subject=options.template, partitions=options.partitions)
plain.handler(handle_plainly)
for each in (app, plain):
    each.on_state_changed(note_loop)
