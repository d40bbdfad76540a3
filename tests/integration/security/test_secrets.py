"""No secret is in logs, errors, reports or the output of a crash, whatever way it is given."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.integration.certs import Key, credentials
from tests.integration.processes import command, environment
from tests.integration.security.conftest import ORDERS
from tests.integration.security.guarded import make_stream

from parti.cli.main import main
from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection

APP = """
import os
import signal
import parti

app = parti.App(stream="ORDERS", subject="orders.in.{p}", partitions=["a", "b"], backoff_s=[0.01], attempts=2)


@app.handler
async def handle(message):
    if message.data == b"last":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    raise RuntimeError("this handler fails")
"""
CRASH = """
import sys
import parti.cli.status as status
from parti.cli.main import main

def fail(settings):
    connected = settings
    raise KeyError("something that nobody has thought of")

status.open_control = fail
main(["status"])
"""

Way = tuple[str, dict[str, str], list[str]]


def by_password(tmp_path: Path) -> Way:
    secret = f"pw{uuid.uuid4().hex}"
    config = f'accounts {{ A {{ jetstream: enabled, users: [{{ user: "ann", password: "{secret}" }}] }} }}'
    return config, {"USER": "ann", "PASSWORD": secret}, [secret]


def by_address(tmp_path: Path) -> Way:
    config, given, secrets = by_password(tmp_path)
    return config, {"NATS": f"nats://ann:{given['PASSWORD']}@"}, secrets


def by_token(tmp_path: Path) -> Way:
    secret = f"tk{uuid.uuid4().hex}"
    return f'authorization {{ token: "{secret}" }}', {"TOKEN": secret}, [secret]


def by_seed(tmp_path: Path) -> Way:
    key = Key("user")
    path = tmp_path / "user.nk"
    path.write_text(key.seed)
    config = f"accounts {{ A {{ jetstream: enabled, users: [{{ nkey: {key.public} }}] }} }}"
    return config, {"NKEY_SEED_FILE": str(path)}, [key.seed]


@pytest.fixture(params=[by_password, by_address, by_token, by_seed])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    made: Way = request.param(tmp_path)
    return made


def run(directory: Path, variables: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=directory,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def typed(variables: Mapping[str, str], capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """A command in this process; returns its exit code and all that it printed."""
    with patch.dict(os.environ, variables):
        code = main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_a_secret_is_nowhere_to_be_seen(
    way: Way, tmp_path: Path, nats_server_factory: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """Debug logs of a worker whose handler fails, reports, refusals, and a crash inside a command."""
    config, given, secrets = way
    server = nats_server_factory(config=config)
    variables = {f"PARTI_{name}": value for name, value in given.items()}
    variables["PARTI_NATS"] = given.get("NATS", "nats://") + f"127.0.0.1:{server.port}"
    token = f"ot{uuid.uuid4().hex}"
    variables |= {"PARTI_OWNER_TOKEN": token, "PARTI_LOG_LEVEL": "debug", "PARTI_COLD_START_WINDOW_S": "0"}
    asyncio.run(_fill(variables))
    (tmp_path / "orders.py").write_text(APP)
    worked = run(tmp_path, variables, *command("worker", "orders:app"))
    assert worked.returncode == 0, worked.stderr[-3000:]
    assert "this handler fails" in worked.stderr
    texts = [worked.stdout, worked.stderr]
    for arguments in (("status", "--json"), ("doctor", "--json"), ("dlq", "ls", "--json")):
        code, text = typed(variables, capsys, *arguments)
        assert code < 2, text
        texts.append(text)
    code, refused = typed({**variables, "PARTI_BUCKET": "not a bucket"}, capsys, "status")
    assert code == 2
    crashed = run(tmp_path, variables, sys.executable, "-c", CRASH)
    assert "Traceback" in crashed.stderr
    assert "something that nobody has thought of" in crashed.stderr
    texts += [refused, crashed.stdout, crashed.stderr, server.log_path.read_text()]
    for secret in (*secrets, token):
        assert not [text for text in texts if secret in text]


async def _fill(variables: Mapping[str, str]) -> None:
    with patch.dict(os.environ, variables):
        settings = Settings()
    connection = await Connection.open(settings, name="test")
    api = JetStreamApi(connection)
    await make_stream(api, ORDERS)
    await api.publish("orders.in.a", b"bad")
    await api.publish("orders.in.a", b"last")
    await connection.close()


def test_wrong_ones_are_not_shown_either(
    way: Way, tmp_path: Path, nats_server_factory: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    _, given, secrets = way
    server = nats_server_factory(config='authorization { user: "bob", password: "another" }', jetstream=False)
    variables = {f"PARTI_{name}": value for name, value in given.items()}
    variables["PARTI_NATS"] = given.get("NATS", "nats://") + f"127.0.0.1:{server.port}"
    code, text = typed(variables, capsys, "status")
    assert (code, "refused the connection" in text) == (2, True)
    assert not [secret for secret in secrets if secret in text]


def test_a_damaged_credentials_file_is_not_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = Key("user")
    path = tmp_path / "user.creds"
    path.write_text(credentials("eyJ0.damaged.jwt", key.seed[:-3] + "AAA"))
    code, text = typed({"PARTI_CREDENTIALS_FILE": str(path)}, capsys, "status")
    assert (code, "holds no valid user seed" in text) == (2, True)
    assert key.seed[:20] not in text
    assert "damaged.jwt" not in text
