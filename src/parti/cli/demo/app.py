"""The worker's side of the demo: an app whose handler writes down every message it gets.

`python -m parti.cli.demo.app DIRECTORY URL` is `parti worker` on this app, in a directory of its own.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import parti
from parti.cli.demo.check import Note, digest

STREAM = "DC"
SUBJECT = "dc.{tool}.{chamber}.completion"
WORKER_ID = "demo"
NOTES = "handled.bin"

app = parti.App(stream=STREAM, subject=SUBJECT)


@app.handler
async def note_down(message: parti.Message) -> None:
    """Append what was handled, and when, to the notes."""
    now = time.time()
    note = Note(message.seq, digest(message.subject, message.data), message.published_at.timestamp(), now)
    os.write(_notes(), note.pack())


@functools.cache
def _notes() -> int:
    return os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def main(directory: str, url: str) -> int:
    """Run the worker in `directory`, untouched by the settings of whoever runs the demo."""
    from parti.cli.main import main as run  # noqa: PLC0415 - the command imports the demo

    for name in [name for name in os.environ if name.upper().startswith("PARTI_")]:
        del os.environ[name]
    os.chdir(Path(directory))
    return run(["worker", "parti.cli.demo.app:app", "--nats", url, "--worker-id", WORKER_ID, "--solo"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
