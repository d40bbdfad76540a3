"""An operator at the terminal, for the commands that look after a running fleet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.integration.commands import type_command
from tests.integration.conftest import Kit, eventually

from parti.coordination.control_plane import read_keys
from parti.coordination.records import KEYS, Records

FLEET: Mapping[str, Any] = {
    "worker_id": None,
    "fleet": True,
    "cold_start_window_s": 0.1,
    "scale_window_s": 0.2,
    "min_rebalance_interval_s": 0.1,
    "lease_ttl_s": 2.0,
    "leader_ttl_s": 1.5,
}


class Operator:
    """Types commands about the fleet of a kit."""

    def __init__(self, kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
        self.kit = kit
        self.place = ("--nats", kit.url, "--bucket", f"b{kit.root}")
        self._capsys = capsys

    async def type(self, *arguments: str) -> tuple[int, str]:
        """Run a command in this process; returns its exit code and what it printed (code 2: on stderr)."""
        said = await type_command(self._capsys, *arguments)
        if said.code == 2:
            assert said.out == ""
            assert len(said.err.splitlines()) == 1, said.err
            return said.code, said.err
        return said.code, said.out

    async def ask(self, *arguments: str) -> dict[str, Any]:
        """Run a command with --json, whatever its exit code."""
        _, text = await self.type(*arguments, "--json")
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def explain(self, partition: str) -> dict[str, Any]:
        return await self.ask("explain", partition, *self.place)

    async def all_is_well(self, workers: int) -> None:
        """Wait until so many workers are there and nothing is left to do."""

        async def settled() -> bool:
            code, text = await self.type("status", "--json", *self.place)
            if code:
                return False
            status = json.loads(text)
            return [row["state"] for row in status["workers"]] == ["stable"] * workers

        await eventually(settled, 20)

    async def records(self) -> Records:
        return Records.of(await read_keys(self.kit.connection, self.kit.api, f"b{self.kit.root}", KEYS))

    async def owned_by(self, partition: str, worker: str) -> None:
        """Wait until a worker owns a partition."""

        async def is_owner() -> bool:
            claim = (await self.records()).claims.get(partition)
            return claim is not None and (claim.owner, claim.state) == (worker, "owned")

        await eventually(is_owner, 20)
