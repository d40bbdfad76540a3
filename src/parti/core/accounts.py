"""The layout of accounts in which only members of the fleet can aim answers of JetStream at its subjects.

nats-server does not check the reply subject of a request, and JetStream writes its answer there. So whoever may send
a single request in the account of the streams can have the server publish to any subject of that account. Here the
streams are in an account with the fleet's own processes, and everybody else is in an account of its own, which
imports the calls of its role as services and nothing else. The server then sends answers back to the account that
asked, where a reply subject is any subject without JetStream behind it: at most one of the imports, so what its user
may call anyway.

Calls whose body names a subject to write to (consumers, streams) are never imported. Pulls are not imported either:
the server takes an empty message without headers for the end of the answer and drops the rest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from parti.core.permissions import (
    CONFIG_HEAD,
    UserPermissions,
    config_word,
    quoted,
    user_commands,
    users_lines,
)
from parti.core.role_calls import MEMBERS, Call

SILENCE_S = 10
"""How long the server waits for the next message of an answer that has several."""
_SEVERAL = "$JS.API.DIRECT.GET."
"""Calls whose answer may be several messages."""
_API = "$JS.API."
_ACCOUNT = "$JS.API.INFO"
_EVERYWHERE = "$SYS."
"""What each account has of its own."""
_SECOND_NS = 1_000_000_000
_UNLIMITED = -1

THREAT_MODEL = (
    "ACCOUNTS: the streams and the fleet's own processes (workers, leaders, migrators) are in one account; all",
    "others are in accounts of their own and reach the streams by the calls below only. They can aim answers nowhere",
    "else. The users of the first account trust each other: each of them can delete streams, overwrite records and",
    "delete consumers of that account by naming such a subject as the place for an answer. Make another such account",
    "for a fleet that is not to be trusted.",
)
"""What the layout with accounts protects and what not."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A call of the streams' account that others may make, or advisories of it that they may hear."""

    subject: str
    purpose: str
    service: bool
    accounts: tuple[str, ...]
    """Who may."""

    @property
    def several(self) -> bool:
        """Whether an answer may be several messages."""
        return self.subject.startswith(_SEVERAL)

    @property
    def name(self) -> str:
        """A name for it that is a word."""
        return re.sub(r"[^A-Za-z0-9_-]+", "-", self.subject.replace("*", "each").replace(">", "all")).strip("-")


@dataclass(frozen=True, slots=True)
class Layout:
    """Who is in which account, and what passes between them."""

    account: str
    """That of the streams and the members."""
    members: tuple[UserPermissions, ...]
    outsiders: tuple[UserPermissions, ...]
    shared: tuple[Shared, ...]

    def account_of(self, user: UserPermissions) -> str:
        """The account that a user is in."""
        return account_name(self.account, user) if user.apart else self.account

    def imports_of(self, account: str) -> tuple[Shared, ...]:
        """What an account takes from that of the streams."""
        return tuple(each for each in self.shared if account in each.accounts)


def is_member(roles: Sequence[str]) -> bool:
    """Whether a user with these roles has to be in the account of the streams."""
    return bool(set(MEMBERS).intersection(roles))


def account_name(account: str, user: UserPermissions) -> str:
    """The account of a user who is apart."""
    return f"{account}-{user.user}"


def layout_of(users: Sequence[UserPermissions], account: str) -> Layout:
    """Spread users over accounts; those who are apart were given their calls with `Names.apart`."""
    outsiders = tuple(user for user in users if user.apart)
    found: dict[tuple[bool, str], Shared] = {}
    for user in outsiders:
        for service, call in _crossing(user):
            before = found.get((service, call.subject))
            importers = (*(before.accounts if before else ()), account_name(account, user))
            found[service, call.subject] = Shared(call.subject, call.purpose, service, importers)
    members = tuple(user for user in users if not user.apart)
    return Layout(account, members, outsiders, tuple(found.values()))


def _crossing(user: UserPermissions) -> Iterator[tuple[bool, Call]]:
    """What a user needs of the other account: calls (True) and what it listens to."""
    inbox = f"{user.inbox_prefix}.>"
    if any(call.subject.startswith(_API) for call in user.publish):
        # Without this import the server gives an account that has no JetStream an API of its own, which answers every
        # call, too: that JetStream is not enabled.
        yield True, Call(_ACCOUNT, "the API of the streams' account in place of an empty one", _ACCOUNT, "ask")
    for service, calls in ((True, user.publish), (False, user.subscribe)):
        for call in calls:
            if call.subject not in {inbox, _ACCOUNT} and not call.subject.startswith(_EVERYWHERE):
                yield service, call


# ── styles ────────────────────────────────────────────────────────────────────────────────────────────────────────


def layout_config(layout: Layout, *, admin: bool = False) -> str:
    """An `accounts` block of nats-server's configuration.

    `admin`: with a user who may do all in the account of the streams.
    """
    lines = [*CONFIG_HEAD, "#", *(f"# {line}" for line in THREAT_MODEL), "accounts {"]
    lines += [f"  {config_word(layout.account)} {{", "    jetstream: enabled", "    users: ["]
    lines += [*users_lines(layout.members, admin=admin), "    ]", "    exports: ["]
    lines += [f"      {_export_line(each)}" for each in layout.shared]
    lines += ["    ]", "  }"]
    for user in layout.outsiders:
        name = account_name(layout.account, user)
        lines += [f"  {config_word(name)} {{", "    users: [", *users_lines([user]), "    ]", "    imports: ["]
        for each in layout.imports_of(name):
            source = f"{{ account: {config_word(layout.account)}, subject: {quoted(each.subject)} }}"
            lines.append(f"      {{ {_kind(each)}: {source} }}")
        lines += ["    ]", "  }"]
    return "\n".join([*lines, "}", ""])


def _export_line(shared: Shared) -> str:
    accounts = ", ".join(config_word(each) for each in shared.accounts)
    several = f', response_type: stream, threshold: "{SILENCE_S}s"' if shared.several else ""
    return f"{{ {_kind(shared)}: {quoted(shared.subject)}{several}, accounts: [{accounts}] }}  # {shared.purpose}"


def _kind(shared: Shared) -> str:
    return "service" if shared.service else "stream"


def layout_commands(layout: Layout) -> str:
    """Commands of `nsc`, which makes accounts and users with these exports, imports and permissions in their JWT."""
    own = layout.account
    lines = [
        "# Accounts and users, as nsc makes them. Exports are public to accounts that your operator has signed: sign",
        "# no account with imports from this one that are not printed here.",
        *(f"# {line}" for line in THREAT_MODEL),
        shlex.join(["nsc", "add", "account", "--name", own]),
        shlex.join(["nsc", "edit", "account", "--name", own, "--js-mem-storage", "-1", "--js-disk-storage", "-1"]),
    ]
    for each in layout.shared:
        command = ["nsc", "add", "export", "--account", own, "--name", each.name, "--subject", each.subject]
        command += ["--service"] if each.service else []
        command += ["--response-type", "Stream", "--response-threshold", f"{SILENCE_S}s"] if each.several else []
        lines.append(shlex.join(command))
    for user in layout.members:
        lines += user_commands(user, own)
    lines.append(f"STREAMS=$(nsc describe account {shlex.quote(own)} --field sub | tr -d '\"')")
    for user in layout.outsiders:
        name = account_name(own, user)
        lines.append(shlex.join(["nsc", "add", "account", "--name", name]))
        for each in layout.imports_of(name):
            command = ["nsc", "add", "import", "--account", name, "--name", each.name]
            command += ["--remote-subject", each.subject, "--local-subject", each.subject]
            command += ["--service"] if each.service else []
            lines.append(f'{shlex.join(command)} --src-account "$STREAMS"')
        lines += user_commands(user, name)
    return "\n".join([*lines, ""])


def account_claims(layout: Layout) -> dict[str, Any]:
    """The parts of account JWTs that make this layout, by account; imports name their source, not its public key."""
    every = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), _UNLIMITED)
    storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), _UNLIMITED)
    limits = {**every, "wildcards": True}
    exports = [_export_claim(each) for each in layout.shared]
    claims: dict[str, Any] = {layout.account: {"limits": {**limits, **storage}, "exports": exports}}
    for user in layout.outsiders:
        name = account_name(layout.account, user)
        imports = [
            {"name": each.name, "subject": each.subject, "account": layout.account, "type": _kind(each)}
            for each in layout.imports_of(name)
        ]
        claims[name] = {"limits": limits, "imports": imports}
    return claims


def _export_claim(shared: Shared) -> dict[str, Any]:
    claim: dict[str, Any] = {"name": shared.name, "subject": shared.subject, "type": _kind(shared)}
    if shared.several:
        claim |= {"response_type": "Stream", "response_threshold": SILENCE_S * _SECOND_NS}
    return claim
