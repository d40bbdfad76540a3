"""A replay as a process of its own, to be killed; its rounds run without Spark."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.integration.fleet import PARTITIONS
from tests.spark.replays import LocalRounds, noting, replayed

import parti


def main() -> None:
    given = json.loads(sys.argv[1])
    app = parti.App(stream=given["stream"], subject=given["subject"], partitions=PARTITIONS, **given["settings"])
    app.handler(noting(Path(given["journal"]), guest_s=0.02))
    outcome = asyncio.run(replayed(app, given["partitions"], LocalRounds(), messages_per_round=150))
    sys.exit(0 if outcome.complete else 1)


if __name__ == "__main__":
    main()
