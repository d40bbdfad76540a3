"""Questions to a server's monitoring port on loopback; no credentials needed."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
_ANSWER_TIMEOUT_S = 1.0
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that Linux gives to clients, and to servers that ask for any."""
_LOWEST_PORT = 10_000
_PORT_TRIES = 20
_chance = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that are free now; another process may take one before it is used.

    They lie below those that the system gives to whoever asks for any port: such a port could be gone before it is
    used, or while a server that is to keep it restarts.

    The server's own `port: -1` has no such race, but tells its ports through a file that it gives up writing after
    5 s, and routes need their ports beforehand.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bound()) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _bound() -> socket.socket:
    """A socket on a free port that nobody gets by chance; where that cannot be told, on any free one."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        lowest_given = int(_GIVEN.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_given = 0
    for _ in range(_PORT_TRIES if lowest_given > 2 * _LOWEST_PORT else 0):
        try:
            made.bind((LOOPBACK, _chance.randrange(_LOWEST_PORT, lowest_given)))
        except OSError:
            continue  # in use
        return made
    made.bind((LOOPBACK, 0))
    return made


def ask(port: int, path: str) -> dict[str, Any] | None:
    """The JSON object that a monitoring path answers with status 200, or None for anything else or no answer."""
    # Not urllib: it would send even loopback requests to the proxy that http_proxy names.
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = json.loads(response.read()) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return body if isinstance(body, dict) else None


def is_ready(port: int, name: str, *, jetstream: bool) -> bool:
    """Whether the server of this name takes clients and, if wanted, JetStream answers with its streams recovered.

    /healthz turns good only after the client listener is open, which the server opens after JetStream has recovered
    its streams. But it is also good where JetStream is not configured at all, even with js-enabled-only, so /varz
    must show JetStream too; and the name, lest a foreign server on a port lost in a race is taken for ours.
    """
    if ask(port, "/healthz?js-enabled-only=true") is None:
        return False
    state = ask(port, "/varz")
    if state is None or state.get("server_name") != name:
        return False
    return not jetstream or bool(state.get("jetstream", {}).get("config"))


def meta_leader(port: int) -> str | None:
    """The name of the JetStream meta leader as this node sees it, or None while it sees none."""
    state = ask(port, "/jsz") or {}
    leader = state.get("meta_cluster", {}).get("leader")
    return leader if isinstance(leader, str) and leader else None


def knows_meta(port: int) -> bool:
    """Whether this node follows the meta group and has caught up with it."""
    return ask(port, "/healthz?js-meta-only=true") is not None


def current_peers(port: int) -> set[str]:
    """Names of the peers that the meta leader on this port sees as current; empty when asked of another node."""
    state = ask(port, "/jsz") or {}
    replicas = state.get("meta_cluster", {}).get("replicas") or []
    return {peer["name"] for peer in replicas if peer.get("current") and not peer.get("offline")}
