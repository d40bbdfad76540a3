"""News from the servers themselves: which client has connected, which is gone.

A server that loses a client says so on its system account: 4 to 21 ms after a SIGKILL of the process, where a lease
needs seconds to end. The events are core NATS messages: what is sent while this connection is away is lost, a server
that dies says nothing about its clients, and a client whose machine or network vanished is missed only when the
server has pinged it in vain (minutes, by default). So they are an early hint and never the only source.

What an event does not say: whether a process died or closed its connection in good order, the reason is `Client
Closed` in both cases; and whether a client will be back: a reconnect is a new client id.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
from nats import errors as nats_errors

from parti.errors import ConfigError, ConnectionFailed, NoResponders, PartiError
from parti.jetstream.connection import Connection, ConnectionState

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from parti.config import Settings

_log = structlog.get_logger("parti.system_events")

_PROBE = "$SYS.REQ.SERVER.PING"


def client_ref(connection: Connection) -> str:
    """`<server id>/<client id>` of the current (or last) connection, by which events name it; new at each reconnect.

    Empty when the server did not tell.
    """
    info = connection.server_info
    return _ref(info.get("server_id"), info.get("client_id"))


class SystemEvents:
    """Listens with a connection of its own from `start` to `stop`.

    `settings` hold the address and the credentials of a user of the system account, who needs to subscribe to
    `$SYS.ACCOUNT.*.CONNECT`, `$SYS.ACCOUNT.*.DISCONNECT` and `<inbox_prefix>.>`, and to publish to
    `$SYS.REQ.SERVER.PING`.
    `on_connect(ref)` and `on_disconnect(ref, reason)` are called on the event loop for every client of `account` (all
    accounts by default); they must not block, and what they raise is logged.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_connect: Callable[[str], None],
        on_disconnect: Callable[[str, str], None],
        account: str = "*",
        name: str = "parti-system-events",
    ) -> None:
        self._settings = settings
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._account = account
        self._name = name
        self._connection: Connection | None = None

    @property
    def healthy(self) -> bool:
        """Whether events would arrive now."""
        return self._connection is not None and self._connection.state is ConnectionState.CONNECTED

    async def start(self) -> None:
        """Connect and subscribe; every client that comes or goes after the return is reported.

        Raises what `Connection.open` raises, ConfigError when the user does not belong to the system account, and
        PermissionDenied when it may not subscribe.
        """
        connection = self._connection = await Connection.open(self._settings, name=self._name)
        try:
            await connection.request(_PROBE)
            await connection.client.subscribe(f"$SYS.ACCOUNT.{self._account}.CONNECT", cb=self._connected)
            await connection.client.subscribe(f"$SYS.ACCOUNT.{self._account}.DISCONNECT", cb=self._disconnected)
            await connection.flush()
            if connection.permission_errors:
                raise connection.permission_errors[-1]
        except NoResponders:
            # In any other account the subscriptions succeed and stay silent.
            await self.stop()
            raise ConfigError(
                "the credentials for system events do not belong to the system account; expected a user of the "
                "account that the server's system_account names; use other ones, or none to do without these events"
            ) from None
        except nats_errors.Error as error:
            await self.stop()
            raise ConnectionFailed(f"could not subscribe to system events: {error}; try again") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close the connection; never raises."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(PartiError):
                await connection.close()

    async def _connected(self, msg: Msg) -> None:
        if event := _event(msg):
            _call(self._on_connect, event[0])

    async def _disconnected(self, msg: Msg) -> None:
        if event := _event(msg):
            _call(self._on_disconnect, *event)


def _event(msg: Msg) -> tuple[str, str] | None:
    """Which client, and the reason if it is gone."""
    try:
        event = json.loads(msg.data)
        return _ref(event["server"]["id"], event["client"]["id"]), str(event.get("reason", ""))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("a system event could not be read", subject=msg.subject, error=repr(error))
        return None


def _ref(server_id: Any, client_id: Any) -> str:
    return f"{server_id}/{client_id}" if server_id and client_id is not None else ""


def _call(callback: Callable[..., None], *arguments: object) -> None:
    try:
        callback(*arguments)
    except Exception:
        _log.exception("a callback of the system events failed", callback=repr(callback))
