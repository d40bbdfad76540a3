"""The private parts of nats-py that parti leans on are there, in the shape that it expects.

When this fails after an upgrade of nats-py, read `parti.jetstream.wire` and `parti.jetstream.client` again before
anything else: each use there says what it needs.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from nats.aio import client as nats_client
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol import parser as nats_parser

import parti.jetstream
from parti.jetstream.client import MendedClient
from parti.jetstream.wire import LeanParser, Wire

HERE = Path(inspect.getfile(parti.jetstream)).parent

# Attribute of a client and what it holds before it connects.
ATTRIBUTES: dict[str, type | tuple[type, ...]] = {
    "_auth_configured": bool,
    "_err": (Exception, type(None)),
    "_flush_queue": (asyncio.Queue, type(None)),
    "_flusher_task": (asyncio.Task, type(None)),
    "_inbox_prefix": bytearray,
    "_pending": list,
    "_pending_data_size": int,
    "_ping_interval_task": (asyncio.Task, type(None)),
    "_pings_outstanding": int,
    "_pongs": list,
    "_pongs_received": int,
    "_ps": nats_parser.Parser,
    "_public_nkey": (str, type(None)),
    "_reading_task": (asyncio.Task, type(None)),
    "_server_info": dict,
    "_server_pool": list,
    "_sid": int,
    "_status": int,
    "_subs": dict,
    "_transport": type(None),
}

# Coroutine method and its parameters after self.
METHODS = {
    "_attempt_reconnect": [],
    "_close": ["status", "do_cbs"],
    "_connect_to_server": ["s"],
    "_flush_pending": ["force_flush"],
    "_process_connect_init": [],
    "_process_err": ["err_msg"],
    "_process_info": ["info", "initial_connection"],
    "_process_headers": ["headers"],
    "_process_msg": ["sid", "subject", "reply", "data", "headers"],
    "_process_op_err": ["e"],
    "_process_ping": [],
    "_process_pong": [],
    "_read_loop": [],
    "_send_command": ["cmd", "priority"],
    "_send_ping": ["future"],
}

# The same for plain methods.
PLAIN_METHODS = {"_build_message": ["sid", "subject", "reply", "data", "headers"]}


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
async def test_attributes(name: str) -> None:
    assert isinstance(getattr(Client(), name), ATTRIBUTES[name])


@pytest.mark.parametrize("name", sorted(METHODS | PLAIN_METHODS))
def test_methods(name: str) -> None:
    method = getattr(Client, name)
    assert inspect.iscoroutinefunction(method) == (name in METHODS)
    assert list(inspect.signature(method).parameters)[1:] == (METHODS | PLAIN_METHODS)[name]


def test_every_private_name_that_the_code_touches_is_listed_here() -> None:
    own = set(vars(MendedClient)) | {"_dial", "_on_down", "_on_denied", "_parser", "_server_said"}
    text = (HERE / "client.py").read_text()
    session = text[text.index("class MendedClient(Client)") :]
    used = set(re.findall(r"(?:self|super\(\))\.(_[a-z]\w*)", session))
    used |= set(re.findall(r"client\.(_[a-z]\w*)", (HERE / "wire.py").read_text()))
    known = ATTRIBUTES.keys() | METHODS.keys() | PLAIN_METHODS.keys() | {"_error_cb"}
    assert used - own - known == set()


def test_the_overrides_of_the_session_override_something() -> None:
    overridden = {name for name in vars(MendedClient) if name.startswith("_") and not name.startswith("__")}
    methods = METHODS.keys() | PLAIN_METHODS.keys()
    assert overridden - {"_sign", "_stop_loops", "_forget_pending"} <= methods
    for name in overridden & methods:
        ours, theirs = inspect.signature(getattr(MendedClient, name)), inspect.signature(getattr(Client, name))
        assert list(ours.parameters) == list(theirs.parameters), name


async def test_the_error_callback_is_set_before_anything_can_fail() -> None:
    source = inspect.getsource(Client.connect)
    assert "self._error_cb = " in source
    assert isinstance(Client.CONNECTED, int)
    assert Client.CONNECTED != Client.RECONNECTING


def test_the_transport_keeps_its_stream_writer_where_it_can_be_aborted() -> None:
    make: Any = TcpTransport
    transport = make()
    assert transport._io_writer is None
    assert {"write", "read", "at_eof", "close"} <= set(dir(TcpTransport))
    assert not inspect.iscoroutinefunction(TcpTransport.write)
    assert inspect.iscoroutinefunction(TcpTransport.read)


def test_constants() -> None:
    assert nats_client.PING_PROTO == b"PING\r\n"
    assert nats_client.DEFAULT_BUFFER_SIZE >= 4096
    match = nats_parser.ERR_RE.match(b"-ERR 'Permissions Violation for Publish to \"A.b\"'\r\n")
    assert match
    assert match[1].startswith(b"'Permissions")


async def test_the_parser_keeps_an_error_line_in_its_buffer_while_it_is_reported() -> None:
    seen = []

    class Reporter:
        async def _process_err(self, text: str) -> None:
            seen.append((text, bytes(parser.buf)))

    parser: Any = nats_parser.Parser(Reporter())
    await parser.parse(b"-ERR 'Some Thing'\r\n")
    assert seen == [("'some thing'", b"-ERR 'Some Thing'\r\n")]
    assert inspect.iscoroutinefunction(parser.parse)


async def test_a_message_for_nobody_is_dropped_by_the_client() -> None:
    client: Any = Client()
    await client._process_msg(99, b"a", b"", b"payload", None)
    assert client.stats["in_msgs"] == 1


async def test_the_wire_takes_the_place_of_the_parser_and_shares_the_subscription_ids() -> None:
    client: Any = Client()
    original = client._ps
    client._sid = 7
    wire = Wire(client)
    assert isinstance(client._ps, LeanParser)
    assert client._ps is not original
    assert int(wire.subscribe("a", lambda *_: None)) == 8
    assert client._sid == 8
    assert wire.write(b"PING\r\n") is False
    assert wire.new_inbox() != wire.new_inbox()


async def test_a_subscription_is_written_in_the_protocol_and_serves_its_sink_until_it_ends() -> None:
    client: Any = Client()
    written: list[bytes] = []

    class Transport:
        def write(self, data: bytes) -> None:
            written.append(data)

    client._transport, client._status = Transport(), Client.CONNECTED
    wire, got, chunks = Wire(client), list[bytes](), list[int]()
    remove = wire.on_chunk(lambda: chunks.append(1))
    sid = wire.subscribe("_INBOX.x", lambda subject, reply, header, payload: got.append(payload))
    number = int(sid)
    assert written == [b"SUB _INBOX.x  %d\r\n" % number]
    await client._ps.parse(b"MSG _INBOX.x %d 2\r\nhi\r\n" % number)
    remove()
    wire.unsubscribe(sid)
    wire.unsubscribe(sid)
    assert written[1:] == [b"UNSUB %d\r\n" % number]
    await client._ps.parse(b"MSG _INBOX.x %d 2\r\nno\r\n" % number)
    assert (got, chunks) == ([b"hi"], [1])
