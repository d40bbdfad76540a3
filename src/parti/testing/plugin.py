"""The pytest fixtures `nats_server`, `nats_server_factory`, `nats_cluster` and `stream_name`; `parti_run` and
`parti_every_await` for whole apps.

Servers are started by synchronous code: the fixtures belong to no event loop and serve plain and async tests alike.
Imports are inside the fixtures, because this module is loaded by every pytest run wherever parti is installed.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from parti.embedded import Cluster, Server
    from parti.testing.exploration import EveryAwait, Runner


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Server]:
    """A running JetStream server that all tests of the session share.

    Do not kill, restart or fill it: use `nats_server_factory` for that. Keep tests apart with `stream_name`.
    """
    from parti.embedded import Server  # noqa: PLC0415

    with Server() as server:
        yield server


@pytest.fixture
def nats_server_factory() -> Iterator[Callable[..., Server]]:
    """A function that starts a server of the test's own, with the arguments of `parti.embedded.Server`.

    The test may kill and restart what it gets; all are stopped and their temporary stores removed when the test ends.
    A start takes about 50 ms and blocks.
    """
    from parti.embedded import Server  # noqa: PLC0415

    with ExitStack() as started:

        def start(**options: Any) -> Server:
            return started.enter_context(Server(**options))

        yield start


@pytest.fixture
def nats_cluster() -> Iterator[Cluster]:
    """A running cluster of three nodes for one test, which may kill and restart nodes; up in about 0.5 s."""
    from parti.embedded import Cluster  # noqa: PLC0415

    with Cluster(size=3) as cluster:
        yield cluster


@pytest.fixture
def stream_name(request: pytest.FixtureRequest) -> str:
    """A stream name that no other test uses: letters, digits, `_`, at most 40 characters, good as a subject token."""
    readable = re.sub(r"\W+", "_", request.node.name, flags=re.ASCII).strip("_")[:31]
    return f"{readable}_{uuid.uuid4().hex[:8]}"


@pytest.fixture
def parti_run() -> Iterator[Runner]:
    """Runs an app inside the test, on a server of its own: `async with parti_run(app) as run:`.

    See `parti.testing.Runner` for its arguments and `parti.testing.Run` for what a test can do with `run`. Needs a
    plugin for async tests that runs them on asyncio.
    """
    from parti.testing.exploration import Runner, quiet  # noqa: PLC0415

    runner = Runner([])
    with quiet():
        yield runner
    runner.close()


@pytest.fixture
def parti_every_await(parti_run: Runner) -> EveryAwait:
    """Runs a scenario again and again, moving, pausing or killing its worker at each await of the handler.

    `await parti_every_await(scenario)`, where `scenario` is an async function that takes what `parti_run` is and does
    what a test does. See `parti.testing.EveryAwait`.
    """
    return parti_run.every_await()
