"""Writes at the moment at which a connection dies, on the event loop that users run: refused, never raised."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from structlog.testing import capture_logs

from parti.app.process import run_on_loop
from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.wire import Wire


@pytest.mark.parametrize("loop", ["auto", "asyncio"])
def test_a_write_to_a_connection_that_is_just_dying_is_refused(loop: str) -> None:
    """Under uvloop it raised RuntimeError, which ended whatever task had just finished a message."""

    async def write_until_refused() -> tuple[int, list[str]]:
        async with Server() as server:
            settings = Settings(nats=(server.url,), reconnect_wait_s=0.05)
            connection = await Connection.open(settings, name="writer")
            wire = Wire(connection.client)
            heard: list[str] = []

            def writes_too(state: ConnectionState, reason: str) -> None:
                wire.write(b"PING\r\n")
                heard.append(state.value)

            connection.on_state(writes_too)
            connection.on_state(lambda state, reason: heard.append(f"second {state.value}"))
            refused = 0
            with capture_logs() as logs:
                for _ in range(3):
                    # A server that dies with unread data resets the connection, and uvloop closes the transport
                    # before nats-py has read of it.
                    assert server.pid
                    os.kill(server.pid, signal.SIGSTOP)
                    wire.write(b"PING\r\n")
                    await asyncio.sleep(0)
                    killing = asyncio.ensure_future(server.kill())
                    async with asyncio.timeout(10):
                        while wire.write(b"PING\r\n"):  # noqa: ASYNC110 - each turn is another write
                            await asyncio.sleep(0)
                    await killing
                    refused += 1
                    await server.restart()
                    await connection.wait_connected(10)
            await connection.close()
            assert not [entry for entry in logs if entry["log_level"] == "error"]
            return refused, heard

    refused, heard = run_on_loop(write_until_refused(), loop)
    assert refused == 3
    assert heard.count("suspended") == heard.count("second suspended") == 3
