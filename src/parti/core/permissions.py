"""The permissions of roles, as a server's configuration, as commands of `nsc` and as claims of a user's JWT.

What a role needs is said in `parti.core.role_calls`; here it becomes text, for users of one account. How users are
spread over accounts is in `parti.core.accounts`. No password or key is ever made up: the
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
ADMIN = "admin"
"""The user who may do all, where one is asked for."""
_SECOND_NS = 1_000_000_000
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "include"})
"""Words of nats-server's configuration that are no names."""

MEANINGS: dict[Role, str] = {
    "worker": "owns partitions, with may_lead=false; what it needs is there already",
    "leader": "a worker that may also be elected, and makes what is missing",
    "operator": "gives orders, sends dead letters back; all that an observer does",
    "observer": "looks at the fleet, and changes nothing of it",
    "spark-reader": "reads the stream from Spark",
    "publisher": "publishes messages of the app, and gets their acknowledgements",
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
    apart: bool = False
    """It is in an account of its own."""

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
        name = f"KV_{names.bucket}"
        reads = f"$JS.API.DIRECT.GET.{name}" if names.apart else f"$JS.API.CONSUMER.MSG.NEXT.{name}.*"
        publish.append(Call(reads, "'parti audit' reads the fleet", reads, "none"))
    subscribe = tuple(call for (listens, _), call in found.items() if listens)
    return UserPermissions(user, tuple(roles), inbox_prefix, tuple(publish), subscribe, works, names.apart)


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


ONE_ACCOUNT = (
    "ONE ACCOUNT, for people and processes that trust each other. The server does not check where the answer to a",
    "request goes, and JetStream writes it there: each of these users, an observer too, can delete streams,",
    "overwrite records and delete consumers of this account by naming such a subject as the place for an answer.",
    "These lists keep mistakes small and other accounts out. '--layout accounts' keeps all but the fleet's own",
    "processes out, too.",
)
"""What the layout with one account does not protect."""


def config_style(users: Sequence[UserPermissions], account: str, *, admin: bool = False) -> str:
    """An `accounts` block of nats-server's configuration with one account, each line with its reason.

    `admin`: with a user who may do all in the account.
    """
    lines = [
        *CONFIG_HEAD,
        "#",
        *(f"# {line}" for line in ONE_ACCOUNT),
        "accounts {",
        f"  {config_word(account)} {{",
        "    jetstream: enabled",
        "    users: [",
    ]
    return "\n".join([*lines, *users_lines(users, admin=admin), "    ]", "  }", "}", ""])


CONFIG_HEAD = (
    "# For the configuration of nats-server, printed by 'parti perms'. Passwords come from the environment of",
    "# the server, and begin with a letter, because it parses them. Each user's processes need the settings",
    "# that are named with it.",
)


def users_lines(users: Sequence[UserPermissions], *, admin: bool = False) -> list[str]:
    """The users of an account in nats-server's configuration."""
    lines = []
    if admin:
        lines += ["      # makes streams and buckets; for people", _admin_line()]
    for user in users:
        lines += [f"      # {line}" for line in about(user)]
        lines += [
            "      {",
            f"        user: {config_word(user.user)}",
            f"        password: ${password_variable(user.user)}",
        ]
        # The server takes an empty list for "everything".
        nothing = ['          publish { deny: ">" }']
        allowed = ["          publish { allow: [", *_lines(user.publish), "          ] }"]
        lines += ["        permissions {", *(allowed if user.publish else nothing), "          subscribe { allow: ["]
        lines += _lines(user.subscribe)
        lines += ["          ] }"]
        if user.responds:
            lines.append(f'          allow_responses {{ max: {RESPONSES}, ttl: "{RESPONSE_TTL_S}s" }}')
        lines += ["        }", "      }"]
    return lines


def _admin_line() -> str:
    return f"      {{ user: {ADMIN}, password: ${password_variable(ADMIN)} }}"


def about(user: UserPermissions) -> list[str]:
    """What a user is for, and what its processes have to be told."""
    says = [f"{role}: {MEANINGS[role]}" for role in user.roles]
    given = f"PARTI_USER={user.user} PARTI_INBOX_PREFIX={user.inbox_prefix}"
    return [*says, f"its processes: {given}{' PARTI_READ_BY=requests' if user.apart else ''}"]


def _lines(calls: Iterable[Call]) -> list[str]:
    shown = [(quoted(call.subject), call.purpose) for call in calls]
    width = min(70, max((len(subject) for subject, _ in shown), default=0))
    return [f"            {subject:<{width}}  # {purpose}" for subject, purpose in shown]


def config_word(text: str) -> str:
    """A name in nats-server's configuration."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", text) and text.lower() not in _RESERVED
    return text if plain else quoted(text)


def quoted(text: str) -> str:
    """Any text without control characters in nats-server's configuration, which knows no `\\u0041`."""
    return json.dumps(text, ensure_ascii=False)


def password_variable(user: str) -> str:
    """The environment variable of the server that holds a user's password.

    >>> password_variable("spark-reader")
    'SPARK_READER_PASSWORD'
    """
    return f"{re.sub(r'[^A-Za-z0-9]', '_', user).upper()}_PASSWORD"


def jwt_style(users: Sequence[UserPermissions], account: str) -> str:
    """Commands of `nsc`, which makes users with these permissions in their JWT."""
    lines = [
        f"# Users of the account {account}, as nsc makes them. The account needs JetStream: nsc edit account.",
        *(f"# {line}" for line in ONE_ACCOUNT),
    ]
    for user in users:
        lines += user_commands(user, account)
    return "\n".join([*lines, ""])


def user_commands(user: UserPermissions, account: str) -> list[str]:
    """The command of `nsc` that makes one user, below what it is for."""
    command = ["nsc", "add", "user", "--account", account, "--name", user.user]
    publish = ("--allow-pub", user.publish_subjects) if user.publish else ("--deny-pub", [">"])
    for option, subjects in (publish, ("--allow-sub", user.subscribe_subjects)):
        command += [option, ",".join(subjects)]
    if user.responds:
        command += ["--allow-pub-response", str(RESPONSES), "--response-ttl", f"{RESPONSE_TTL_S}s"]
    return [*(f"# {line}" for line in about(user)), shlex.join(command)]


def claims_of(user: UserPermissions) -> dict[str, Any]:
    """The part of a user JWT that grants this."""
    claims: dict[str, Any] = {
        "pub": {"allow": user.publish_subjects} if user.publish else {"deny": [">"]},
        "sub": {"allow": user.subscribe_subjects},
    }
    if user.responds:
        claims["resp"] = {"max": RESPONSES, "ttl": RESPONSE_TTL_S * _SECOND_NS}
    return claims
