"""`parti perms`: what users of each role have to be allowed, for the server's configuration or for JWTs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import typer

from parti.app.worker import SOLO_ID
from parti.cli.options import BucketOption
from parti.config import Settings, load_settings
from parti.core.accounts import THREAT_MODEL, account_claims, is_member, layout_commands, layout_config, layout_of
from parti.core.hot_mirror import mirror_name
from parti.core.permissions import (
    ADMIN,
    ONE_ACCOUNT,
    UserPermissions,
    claims_of,
    config_style,
    inbox_of,
    jwt_style,
    password_variable,
    permissions_of,
)
from parti.core.role_calls import ROLES, Names, Role
from parti.errors import ConfigError
from parti.model.job import BUCKET_SUFFIX
from parti.model.ledger import ledger_stream
from parti.model.safe_text import is_plain
from parti.model.subjects import tokens_of
from parti.setting_types import is_stream_name

STYLES = ("config", "jwt", "json")
LAYOUTS = ("accounts", "single")
RETENTIONS = ("limits", "interest", "workqueue")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]*")
"""What stands in commands, comments and names of accounts as it is."""


def perms(
    stream: Annotated[str, typer.Option(metavar="NAME", help="The stream whose partitions the fleet shares.")],
    role: Annotated[
        list[str] | None, typer.Option(metavar="ROLE", help=f"{', '.join(ROLES)}; may be repeated; all if left out.")
    ] = None,
    style: Annotated[
        str, typer.Option(metavar="STYLE", help="config: for nats-server; jwt: commands of nsc; json: claims.")
    ] = "config",
    layout: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="accounts: all but the fleet's own processes in accounts of their own; single: one account, for "
            "users who trust each other.",
        ),
    ] = "accounts",
    subject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SUBJECT", help="What the stream takes: publishers, and operators who send letters back."
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="One user with all these roles; default: one each.")
    ] = None,
    account: Annotated[
        str, typer.Option(metavar="NAME", help="The account of the streams; with one account, of all users.")
    ] = "PARTI",
    retention: Annotated[
        str, typer.Option(metavar="NAME", help=f"Of the stream: {', '.join(RETENTIONS)}.")
    ] = "limits",
    stateful: Annotated[bool, typer.Option("--stateful", help="Handlers have a state that moves along.")] = False,
    jobs: Annotated[str | None, typer.Option(metavar="STREAM", help="Workers also run jobs of this stream.")] = None,
    jobs_subject: Annotated[list[str] | None, typer.Option(metavar="SUBJECT", help="What that stream takes.")] = None,
    create: Annotated[
        bool, typer.Option("--create/--no-create", help="Whether leaders may make what is missing.")
    ] = True,
    admin: Annotated[
        bool, typer.Option("--admin", help="With style config: also a user who may do all, for setting up.")
    ] = False,
    bucket: BucketOption = None,
) -> None:
    """Print the permissions that users of each role need on the server, and no others.

    They follow from the settings (prefix, bucket, streams, worker_id) and the options; nothing is asked of a server.
    Exit codes: 0 printed, 2 refused.
    """
    settings = load_settings({"bucket": bucket})
    named = dict.fromkeys(role or _all_roles(subject, jobs_subject))
    roles = cast("list[Role]", [_choice("--role", each, ROLES) for each in named])
    _choice("--style", style, STYLES)
    _choice("--layout", layout, LAYOUTS)
    _choice("--retention", retention, RETENTIONS)
    for option, name in (("--stream", stream), ("--jobs", jobs)):
        if name is not None and not is_stream_name(name):
            raise ConfigError(f"{option} {name!r}: expected a stream name: no spaces and none of . * > / \\")
    for option, name in (("--user", user), ("--account", account)):
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(
                f"{option} {name!r}: expected letters, digits and - _ . @ +, beginning with one of the first"
            )
    if admin and user is not None and password_variable(user) == password_variable(ADMIN):
        raise ConfigError(
            f"--user {user!r}: --admin makes the user {ADMIN!r}, whose password is also "
            f"${password_variable(ADMIN)}; choose another name, or leave out --admin"
        )
    for each in (*(subject or ()), *(jobs_subject or ())):
        _check_subject(each)
    names = names_of(
        settings,
        stream,
        subjects=subject or (),
        retention=retention,
        stateful=stateful,
        jobs_stream=jobs or "",
        jobs_subjects=jobs_subject or (),
        creates=create,
    )
    if roles == ["publisher"] and not (names.subjects or names.jobs_subjects):
        raise ConfigError("--role publisher: expected what it publishes to; add --subject, such as 'orders.>'")
    users = _users(roles, names, settings, user, apart=layout == "accounts")
    _check_printable(users, style)
    typer.echo((_one_account if layout == "single" else _accounts)(users, account, style, admin=admin), nl=False)
    if "operator" in roles and not names.subjects:
        typer.echo(
            "parti: without --subject (what the stream takes) an operator cannot send dead letters back, and there "
            "is no publisher",
            err=True,
        )


def _all_roles(subjects: Sequence[str] | None, jobs_subjects: Sequence[str] | None) -> list[Role]:
    """Every role, but for a publisher of nothing."""
    return [role for role in ROLES if role != "publisher" or subjects or jobs_subjects]


def _one_account(users: Sequence[UserPermissions], account: str, style: str, *, admin: bool) -> str:
    if style == "json":
        told = {"account": account, "layout": "single", "unprotected": " ".join(ONE_ACCOUNT)}
        return _document({**told, "users": [_json(each, account) for each in users]})
    return jwt_style(users, account) if style == "jwt" else config_style(users, account, admin=admin)


def _accounts(users: Sequence[UserPermissions], account: str, style: str, *, admin: bool) -> str:
    layout = layout_of(users, account)
    if style == "json":
        told = {"account": account, "layout": "accounts", "unprotected": " ".join(THREAT_MODEL)}
        each_user = [_json(each, layout.account_of(each)) for each in users]
        return _document({**told, "users": each_user, "accounts": account_claims(layout)})
    return layout_commands(layout) if style == "jwt" else layout_config(layout, admin=admin)


def names_of(
    settings: Settings,
    stream: str,
    *,
    subjects: Sequence[str] = (),
    retention: str = "limits",
    stateful: bool = False,
    jobs_stream: str = "",
    jobs_subjects: Sequence[str] = (),
    creates: bool = True,
) -> Names:
    """What a deployment with these settings calls its things."""
    s = settings
    alone = "" if s.fleet else s.worker_id or SOLO_ID
    return Names(
        stream,
        s.bucket,
        s.prefix,
        s.dead_letter_stream,
        s.dead_letter_subject,
        s.history,
        subjects=tuple(subjects),
        mirror=mirror_name(s.prefix, stream, alone) if s.hot_mirror != "off" and retention == "limits" else "",
        ledger_stream="" if s.ledger == "off" else s.ledger_stream or ledger_stream(stream),
        stateful=stateful,
        worker_id=s.worker_id or "",
        shards=s.consumer_shards,
        holds=retention == "interest",
        keeps=retention == "limits",
        jobs_stream=jobs_stream,
        jobs_durable=f"{s.prefix}{BUCKET_SUFFIX}",
        jobs_subjects=tuple(jobs_subjects),
        creates=creates,
        apart=s.read_by == "requests",
    )


def _choice(option: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise ConfigError(f"{option} {given!r}: expected one of {', '.join(known)}")
    return given


def _check_subject(subject: str) -> None:
    """Refuse what would grant more than messages of the app."""
    first = tokens_of(subject)[0]
    if first in {"*", ">"} or first.startswith(("$", "_INBOX")):
        raise ConfigError(
            f"--subject {subject!r}: whoever publishes to it could call the server's own API or answer in its place; "
            f"expected a first token of the app's own, such as 'orders.>'"
        )


def _check_printable(users: Sequence[UserPermissions], style: str) -> None:
    """Refuse what would be something else where it is printed."""
    for subject in (each for user in users for each in (*user.publish_subjects, *user.subscribe_subjects)):
        if not is_plain(subject):
            raise ConfigError(f"subject {subject!r} has characters that cannot be seen; expected a name without them")
        if style == "jwt" and {",", '"'} & set(subject):
            raise ConfigError(
                f"subject {subject!r}: nsc reads a comma or a quote as the end of one; use --style json"
            )


def _users(
    roles: Sequence[Role], names: Names, settings: Settings, user: str | None, *, apart: bool
) -> list[UserPermissions]:
    own = settings.inbox_prefix if "inbox_prefix" in settings.model_fields_set else None
    groups = [(user, roles)] if user else [(role, [role]) for role in roles]
    if own and len(groups) > 1:
        raise ConfigError(
            f"inbox_prefix={own} is one user's, but permissions of {len(groups)} users are asked for; name one "
            f"--role, or leave it out and each gets its own"
        )
    return [
        permissions_of(
            some, replace(names, apart=apart and not is_member(some)), user=name, inbox_prefix=own or inbox_of(name)
        )
        for name, some in groups
    ]


def _json(user: UserPermissions, account: str) -> dict[str, Any]:
    return {
        "user": user.user,
        "account": account,
        "roles": list(user.roles),
        "inbox_prefix": user.inbox_prefix,
        "publish": {call.subject: call.purpose for call in user.publish},
        "subscribe": {call.subject: call.purpose for call in user.subscribe},
        "claims": claims_of(user),
    }


def _document(answer: Mapping[str, Any]) -> str:
    return f"{json.dumps(answer, indent=2)}\n"
