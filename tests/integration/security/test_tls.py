"""TLS on every path: worker, command line and the reader of Spark's tasks, and what each says when it fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.integration.certs import Authority, Pair
from tests.integration.conftest import QUICK, Record
from tests.pace import unhindered_s

import parti
from parti.cli.main import main
from parti.embedded import Server
from parti.errors import PartiError
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.chunks import Wanted
from parti.jetstream.ranges import RangeReader
from parti.jetstream.target import Target


@dataclass(frozen=True, slots=True)
class Mutual:
    """A server that shows a certificate and wants one, and a client's."""

    authority: Authority
    server: Server
    client: Pair

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "nats": f"tls://127.0.0.1:{self.server.port}",
            "tls_ca": str(self.authority.path),
            "tls_cert": str(self.client.cert),
            "tls_key": str(self.client.key),
        }

    @property
    def target(self) -> Target:
        given = {**self.settings, "connect_timeout_s": 1.0}
        return Target(servers=(given.pop("nats"),), **given)


def mutual(directory: Path, *hosts: str, expired: bool = False) -> tuple[Authority, str]:
    authority = Authority(directory)
    pair = authority.issue("server", *(hosts or ("127.0.0.1",)), expired=expired)
    files = f'cert_file: "{pair.cert}", key_file: "{pair.key}", ca_file: "{authority.path}"'
    return authority, f"tls {{ {files}, verify: true }}"


Start = Callable[..., Server]


@pytest.fixture
def secured(tmp_path: Path, nats_server_factory: Start) -> Mutual:
    authority, config = mutual(tmp_path / "pki")
    return Mutual(authority, nats_server_factory(config=config), authority.issue("client"))


# ── what works ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_worker_command_line_and_spark_reader_work_with_client_certificates(secured: Mutual) -> None:
    with BlockingClient.open(secured.target, name="test") as client:
        made = client.api("STREAM.CREATE.S", {"name": "S", "subjects": ["s.*"], "allow_direct": True})
        for number in range(20):
            client.request(f"s.p{number % 2}", b"x")
    seen = Record()
    app = parti.App(stream="S", subject="s.{p}", partitions=["p0", "p1"], **{**QUICK, **secured.settings})
    app.handler(seen.handle)
    async with app.running():
        await seen.reaches(20)
        assert await asyncio.to_thread(run, secured.settings, "status", "--json") == 0
    wanted = Wanted(stream="S", created=made["created"], start=1, end=21)
    assert sum(len(chunk) for chunk in RangeReader(secured.target, wanted).chunks()) == 20


# ── what does not ─────────────────────────────────────────────────────────────────────────────────────────────────


def run(settings: Mapping[str, Any], *arguments: str) -> int:
    """A command as somebody types it; returns its exit code."""
    variables = {f"PARTI_{name.upper()}": str(value) for name, value in settings.items()}
    with patch.dict(os.environ, {**variables, "PARTI_CONNECT_TIMEOUT_S": "1"}):
        return main(list(arguments))


CASES = ("another authority", "expired", "another host", "no client certificate", "expired client certificate")
SAID = {
    "another authority": ("certificate", "set tls_ca to the authority"),
    "expired": ("expired", "renew the server's certificate"),
    "another host": ("mismatch", "set tls_hostname"),
    "no client certificate": ("client certificate", "set tls_cert and tls_key"),
    "expired client certificate": ("client certificate", "tls_cert and tls_key"),
}
"""What the line of the worker and of the command line has in it: the trouble, and what to do."""
SAID_TO_SPARK = {
    "another authority": "certificate",
    "expired": "expired",
    "another host": "host name",
    "no client certificate": "the server wants a client certificate",
    "expired client certificate": "the server checks client certificates",
}


@pytest.fixture
def failing(request: pytest.FixtureRequest, tmp_path: Path, nats_server_factory: Start) -> tuple[str, Mutual, Target]:
    """One of the cases: its name, what was set up, and the target that fails."""
    case = request.param
    hosts = ("nats.example",) if case == "another host" else ()
    authority, config = mutual(tmp_path / "pki", *hosts, expired=case == "expired")
    client = authority.issue("client", expired=case == "expired client certificate")
    made = Mutual(authority, nats_server_factory(config=config), client)
    target = made.target
    if case == "another authority":
        target = replace(target, tls_ca=str(Authority(tmp_path / "other", "another authority").path))
    elif case == "no client certificate":
        target = replace(target, tls_cert=None, tls_key=None)
    return case, made, target


@pytest.mark.parametrize("failing", CASES, indirect=True)
def test_each_trouble_is_one_line_with_what_to_do(
    failing: tuple[str, Mutual, Target], capsys: pytest.CaptureFixture[str]
) -> None:
    case, _, target = failing
    settings = {"nats": target.servers[0], "tls_ca": target.tls_ca}
    if target.tls_cert:
        settings |= {"tls_cert": target.tls_cert, "tls_key": target.tls_key}
    began_s = unhindered_s()
    assert run(settings, "status") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1, printed.err
    for text in SAID[case]:
        assert text in printed.err, printed.err
    with pytest.raises(PartiError) as refused:
        BlockingClient.open(target, name="test")
    assert SAID_TO_SPARK[case] in str(refused.value)
    assert "\n" not in str(refused.value)
    assert unhindered_s() - began_s < 20
