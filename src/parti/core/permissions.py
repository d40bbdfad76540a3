"""The permissions of roles, as a server's configuration, as commands of `nsc` and as claims of a user's JWT.

What a role needs is said in `parti.core.role_calls`; here it becomes text. No password or key is ever made up: the
texts name environment variables of the server, and `nsc` makes its own keys.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parti.core.role_calls import Call, Names, Role, calls_of
from parti.model.subjects import covers

RESPONSES = 1
"""Answers to one request that a worker may publish."""
RESPONSE_TTL_S = 60
_SECOND_NS = 1_000_000_000

MEANINGS: dict[Role, str] = {
    "worker": "owns partitions, with may_lead=false; what it needs is there already",
    "leader": "a worker that may also be elected, and makes what is missing",
    "operator": "gives orders, sends dead letters back; all that an observer does",
    "observer": "looks at the fleet, and changes nothing of it",
    "spark-reader": "reads the stream from Spark",
    "migrator": "moves partitions from consumers of their own to the fleet and back, with 'parti migrate'",
}


@dataclass(frozen=True, slots=True)
class UserPermissions:
    """What one user may publish and subscribe to."""

    user: str
    roles: tuple[Role, ...]
    inbox_prefix: str
    publish: tuple[Call, ...]
    subscribe: tuple[Call, ...]
    responds: bool
    """It may answer what reaches it."""

    @property
    def publish_subjects(self) -> list[str]:
        """What it may publish to."""
        return [call.subject for call in self.publish]

    @property
    def subscribe_subjects(self) -> list[str]:
        """What it may subscribe to."""
        return [call.subject for call in self.subscribe]


def permissions_of(roles: Sequence[Role], names: Names, *, user: str, inbox_prefix: str) -> UserPermissions:
    """What a user needs who has these roles, and the answers to whose requests come to a place of its own."""
    inbox = f"{inbox_prefix}.>"
    found: dict[tuple[bool, str], Call] = {(True, inbox): Call(inbox, "answers to its requests", inbox, "listen")}
    for call in (call for role in roles for call in calls_of(role, names)):
        found.setdefault((call.kind == "listen", call.subject), call)
    publish = _widest(call for (listens, _), call in found.items() if not listens)
    works = bool({"worker", "leader"}.intersection(roles))
    if works and "operator" in roles:
        # A replay: its tasks, which are the same user, ask their driver.
        publish.append(Call(inbox, "tasks of a replay ask their driver", inbox, "none"))
    if "spark-reader" in roles and {"observer", "operator"}.intersection(roles):
        # An audit reads the fleet's records as it reads the stream.
        pulls = f"$JS.API.CONSUMER.MSG.NEXT.KV_{names.bucket}.*"
        publish.append(Call(pulls, "'parti audit' reads the fleet", pulls, "none"))
    subscribe = tuple(call for (listens, _), call in found.items() if listens)
    return UserPermissions(user, tuple(roles), inbox_prefix, tuple(publish), subscribe, works)


def inbox_of(user: str) -> str:
    """The inbox prefix of a user's own; what is no token of a subject becomes `_`.

    >>> inbox_of("worker"), inbox_of("ann.b")
    ('_INBOX_worker', '_INBOX_ann_b')
    """
    return f"_INBOX_{re.sub(r'[^A-Za-z0-9_-]', '_', user)}"


def _widest(calls: Iterable[Call]) -> list[Call]:
    """Calls without those that another one with a wildcard covers."""
    every = list(calls)
    return [c for c in every if not any(o is not c and covers(o.subject, c.subject) for o in every)]


# ── styles ────────────────────────────────────────────────────────────────────────────────────────────────────────


def config_style(users: Sequence[UserPermissions], account: str, *, admin: bool = False) -> str:
    """An `accounts` block of nats-server's configuration, each line with its reason.

    `admin`: with a user who may do all in the account.
    """
    lines = [
        "# For the configuration of nats-server, printed by 'parti perms'. Passwords come from the environment of",
        "# the server, and begin with a letter, because it parses them. Each user's processes need the inbox_prefix",
        "# that is named with it.",
        "accounts {",
        f"  {_word(account)} {{",
        "    jetstream: enabled",
        "    users: [",
    ]
    if admin:
        lines += ["      # makes streams and buckets; for people", "      { user: admin, password: $ADMIN_PASSWORD }"]
    for user in users:
        lines += [f"      # {line}" for line in _about(user)]
        lines += [
            "      {",
            f"        user: {_word(user.user)}",
            f"        password: ${password_variable(user.user)}",
        ]
        lines += ["        permissions {", "          publish { allow: ["]
        lines += _lines(user.publish)
        lines += ["          ] }", "          subscribe { allow: ["]
        lines += _lines(user.subscribe)
        lines += ["          ] }"]
        if user.responds:
            lines.append(f'          allow_responses {{ max: {RESPONSES}, ttl: "{RESPONSE_TTL_S}s" }}')
        lines += ["        }", "      }"]
    return "\n".join([*lines, "    ]", "  }", "}", ""])


def _about(user: UserPermissions) -> list[str]:
    says = [f"{role}: {MEANINGS[role]}" for role in user.roles]
    return [*says, f"its processes: PARTI_USER={user.user} PARTI_INBOX_PREFIX={user.inbox_prefix}"]


def _lines(calls: Iterable[Call]) -> list[str]:
    shown = [(json.dumps(call.subject), call.purpose) for call in calls]
    width = min(70, max((len(subject) for subject, _ in shown), default=0))
    return [f"            {subject:<{width}}  # {purpose}" for subject, purpose in shown]


def _word(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", text) else json.dumps(text)


def password_variable(user: str) -> str:
    """The environment variable of the server that holds a user's password.

    >>> password_variable("spark-reader")
    'SPARK_READER_PASSWORD'
    """
    return f"{re.sub(r'[^A-Za-z0-9]', '_', user).upper()}_PASSWORD"


def jwt_style(users: Sequence[UserPermissions], account: str) -> str:
    """Commands of `nsc`, which makes users with these permissions in their JWT."""
    lines = [f"# Users of the account {account}, as nsc makes them. The account needs JetStream: nsc edit account."]
    for user in users:
        lines += [f"# {line}" for line in _about(user)]
        command = ["nsc", "add", "user", "--account", account, "--name", user.user]
        for option, subjects in (
            ("--allow-pub", user.publish_subjects),
            ("--allow-sub", user.subscribe_subjects),
        ):
            command += [option, ",".join(subjects)]
        if user.responds:
            command += ["--allow-pub-response", str(RESPONSES), "--response-ttl", f"{RESPONSE_TTL_S}s"]
        lines.append(shlex.join(command))
    return "\n".join([*lines, ""])


def claims_of(user: UserPermissions) -> dict[str, Any]:
    """The part of a user JWT that grants this."""
    claims: dict[str, Any] = {
        "pub": {"allow": user.publish_subjects},
        "sub": {"allow": user.subscribe_subjects},
    }
    if user.responds:
        claims["resp"] = {"max": RESPONSES, "ttl": RESPONSE_TTL_S * _SECOND_NS}
    return claims
