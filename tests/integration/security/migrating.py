"""An app whose partitions have old consumers of their own, for whoever may migrate them and whoever may not."""

from __future__ import annotations

from pathlib import Path

from tests.integration.security.conftest import ORDERS

from parti.jetstream.api import JetStreamApi

PARTITIONS = ("p0", "p1")
WHAT = ("migrating:app", "--consumers", "old-{partition}", "--workers", "1")


def write_app(directory: Path) -> None:
    (directory / "migrating.py").write_text(
        f"import parti\n"
        f"app = parti.App(stream={ORDERS.stream!r}, subject='orders.in.{{p}}', partitions={list(PARTITIONS)!r})\n"
        f"app.handler(print)\n"
    )


async def make_old_consumers(root: JetStreamApi) -> None:
    for name in PARTITIONS:
        config = {"ack_policy": "explicit", "filter_subject": f"orders.in.{name}"}
        await root.put_consumer(
            ORDERS.stream, {"name": f"old-{name}", "durable_name": f"old-{name}", **config}, action="create"
        )
