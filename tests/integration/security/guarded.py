"""A server on which each role of a deployment has a user with just the permissions that `parti perms` prints."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from tests.integration.commands import type_command

import parti
from parti.cli.main import main
from parti.config import Settings
from parti.core.permissions import inbox_of, password_variable
from parti.core.role_calls import MEMBERS, ROLES
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection

ROOT = "root"
QUICK: Mapping[str, Any] = {
    "backoff_s": (0.05,),
    "progress_interval_s": 0.05,
    "update_min_interval_s": 0.0,
    "cold_start_window_s": 0.1,
    "scale_window_s": 0.2,
    "min_rebalance_interval_s": 0.1,
    "lease_ttl_s": 2.0,
    "leader_ttl_s": 1.5,
    "drain_timeout_s": 5.0,
    "log_level": "error",
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """One fleet: its names are made of one word."""

    name: str
    account: str = "PARTI"
    apart: bool = False
    """All but members are in accounts of their own, and read by requests."""

    @property
    def stream(self) -> str:
        return self.name.upper()

    @property
    def names(self) -> dict[str, str]:
        """The settings that keep deployments apart."""
        return {
            "prefix": self.name,
            "bucket": self.name,
            "dead_letter_stream": f"{self.name}-dlq",
            "dead_letter_subject": f"{self.name}-dlq",
        }

    @property
    def root(self) -> str:
        """Who may do all in its account."""
        return ROOT if self.account == "PARTI" else f"{ROOT}-{self.name}"

    def user(self, role: str) -> str:
        return f"{self.name}-{role}"

    def login(self, role: str) -> dict[str, str]:
        """The settings of a process that runs as a role's user."""
        user = self.user(role)
        login = {"user": user, "password": f"pw-{user}", "inbox_prefix": inbox_of(user)}
        return {**login, "read_by": "requests"} if self.apart and role not in MEMBERS else login

    def app(self, url: str, role: str, handler: Any, partitions: Any, **settings: Any) -> parti.App:
        """An app whose process runs as a role's user."""
        given = {**QUICK, "nats": url, **self.names, **self.login(role), **settings}
        app = parti.App(stream=self.stream, subject=f"{self.name}.in.{{p}}", partitions=partitions, **given)
        app.handler(handler)
        return app

    def settings(self, url: str, role: str) -> Settings:
        return Settings(nats=(url,), **self.names, **self.login(role))  # type: ignore[arg-type]

    def variables(self, url: str, role: str) -> dict[str, str]:
        """The same as environment variables."""
        values = {"nats": url, **self.names, **self.login(role)}
        return {f"PARTI_{name.upper()}": value for name, value in values.items()}

    def perms(self, *options: str, role: str = "", **settings: str) -> str:
        """What `parti perms` prints for this deployment."""
        arguments = ["perms", "--stream", self.stream, "--subject", f"{self.name}.in.>", "--account", self.account]
        if "--layout" not in options:
            arguments += ["--layout", "single"]
        if role:
            arguments += ["--role", role, "--user", self.user(role)]
        printed = io.StringIO()
        variables = {f"PARTI_{name.upper()}": value for name, value in {**self.names, **settings}.items()}
        with patch.dict(os.environ, variables), contextlib.redirect_stdout(printed):
            assert main([*arguments, *options]) == 0
        return printed.getvalue()


def users_block(text: str) -> str:
    """The users in a configuration that `parti perms` has printed."""
    _, _, rest = text.partition("users: [\n")
    users, _, _ = rest.rpartition("    ]\n  }\n}\n")
    assert "permissions" in users
    return users


def guarded_config(
    deployments: Sequence[Deployment], *, roles: Sequence[str] = ROLES, options: Sequence[str] = (), more: str = ""
) -> str:
    """The configuration of a server with an account that holds these deployments and one user who may do all."""
    users = [users_block(each.perms(*options, role=role)) for each in deployments for role in roles]
    root = f"      {{ user: {ROOT}, password: {ROOT} }}\n"
    every = f"{root}{''.join(users)}"
    return f"accounts {{\n  PARTI {{\n    jetstream: enabled\n    users: [\n{every}    ]\n  }}\n}}\n{more}"


def accounts_config(deployment: Deployment, *options: str, more: str = "") -> str:
    """What `parti perms --layout accounts` prints, and nothing else; its admin is the one who may do all."""
    text = deployment.perms("--layout", "accounts", "--admin", *options)
    for role in ROLES:
        # As printed, a user is called like its role; here several deployments can be on one server.
        text = text.replace(f"        user: {role}\n", f"        user: {deployment.user(role)}\n")
        text = text.replace(f"${password_variable(role)}\n", f"${password_variable(deployment.user(role))}\n")
        text = text.replace(f'"{inbox_of(role)}.>"', f'"{inbox_of(deployment.user(role))}.>"')
    root = f"user: {deployment.root}, password: {deployment.root}"
    return f"{text.replace('user: admin, password: $ADMIN_PASSWORD', root)}{more}"


def joined(*configs: str) -> str:
    """Several configurations with accounts as one: the server takes the last `accounts` block only."""
    inner = [config.partition("\naccounts {\n")[2].rpartition("}\n")[0] for config in configs]
    return f"accounts {{\n{''.join(inner)}}}\n"


def passwords(deployments: Sequence[Deployment]) -> dict[str, str]:
    """Variables of the server's environment."""
    users = [each.user(role) for each in deployments for role in ROLES]
    return {password_variable(user): f"pw-{user}" for user in users}


@contextlib.contextmanager
def guarded_server(deployments: Sequence[Deployment], config: str) -> Iterator[Server]:
    """Start it; passwords reach the server as `parti perms` has them, by its environment."""
    with patch.dict(os.environ, passwords(deployments)):
        server = Server(config=config)
        server.start_sync()
    try:
        yield server
    finally:
        server.stop_sync()


def root_settings(url: str, root: str = ROOT) -> Settings:
    return Settings(nats=(url,), user=root, password=root)  # type: ignore[arg-type]


async def make_stream(api: JetStreamApi, deployment: Deployment, **config: Any) -> None:
    given = {"subjects": [f"{deployment.name}.in.>"], "storage": "memory", "allow_direct": True, **config}
    await api.call(f"STREAM.CREATE.{deployment.stream}", {"name": deployment.stream, **given})


async def open_as(url: str, deployment: Deployment, role: str) -> Connection:
    return await Connection.open(deployment.settings(url, role), name=f"test-{role}")


async def typed_as(
    url: str, deployment: Deployment, role: str, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Type a command as the user of a role; returns exit code, stdout and stderr."""
    with patch.dict(os.environ, deployment.variables(url, role)):
        said = await type_command(capsys, *arguments)
    return said.code, said.out, said.err
