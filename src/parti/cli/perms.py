"""`parti perms`: what users of each role have to be allowed, for the server's configuration or for JWTs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from parti.app.worker import SOLO_ID
from parti.cli.control import print_json
from parti.cli.options import BucketOption
from parti.config import Settings, load_settings
from parti.core.hot_mirror import mirror_name
from parti.core.permissions import (
    UserPermissions,
    claims_of,
    config_style,
    inbox_of,
    jwt_style,
    permissions_of,
)
from parti.core.role_calls import ROLES, Names, Role
from parti.errors import ConfigError
from parti.model.job import BUCKET_SUFFIX
from parti.model.ledger import ledger_stream
from parti.model.subjects import tokens_of
from parti.setting_types import is_stream_name

STYLES = ("config", "jwt", "json")
RETENTIONS = ("limits", "interest", "workqueue")


def perms(
    stream: Annotated[str, typer.Option(metavar="NAME", help="The stream whose partitions the fleet shares.")],
    role: Annotated[
        list[str] | None, typer.Option(metavar="ROLE", help=f"{', '.join(ROLES)}; may be repeated; all if left out.")
    ] = None,
    style: Annotated[
        str, typer.Option(metavar="STYLE", help="config: for nats-server; jwt: commands of nsc; json: claims.")
    ] = "config",
    subject: Annotated[
        list[str] | None,
        typer.Option(metavar="SUBJECT", help="What the stream takes, so that operators can send letters back."),
    ] = None,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="One user with all these roles; default: one each.")
    ] = None,
    account: Annotated[str, typer.Option(metavar="NAME", help="The account that the users are in.")] = "PARTI",
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
    roles = [_choice("--role", each, ROLES) for each in role or ROLES]
    _choice("--style", style, STYLES)
    _choice("--retention", retention, RETENTIONS)
    for option, name in (("--stream", stream), ("--jobs", jobs)):
        if name is not None and not is_stream_name(name):
            raise ConfigError(f"{option} {name!r}: expected a stream name: no spaces and none of . * > / \\")
    for each in (*(subject or ()), *(jobs_subject or ())):
        tokens_of(each)
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
    users = _users(cast("list[Role]", roles), names, settings, user)
    if style == "json":
        print_json({"account": account, "users": [_json(each) for each in users]})
    elif style == "jwt":
        typer.echo(jwt_style(users, account), nl=False)
    else:
        typer.echo(config_style(users, account, admin=admin), nl=False)
    if "operator" in roles and not names.subjects:
        typer.echo(
            "parti: without --subject (what the stream takes) an operator cannot send dead letters back", err=True
        )


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
    )


def _choice(option: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise ConfigError(f"{option} {given!r}: expected one of {', '.join(known)}")
    return given


def _users(roles: Sequence[Role], names: Names, settings: Settings, user: str | None) -> list[UserPermissions]:
    own = settings.inbox_prefix if "inbox_prefix" in settings.model_fields_set else None
    groups = [(user, roles)] if user else [(role, [role]) for role in roles]
    if own and len(groups) > 1:
        raise ConfigError(
            f"inbox_prefix={own} is one user's, but permissions of {len(groups)} users are asked for; name one "
            f"--role, or leave it out and each gets its own"
        )
    return [permissions_of(some, names, user=name, inbox_prefix=own or inbox_of(name)) for name, some in groups]


def _json(user: UserPermissions) -> dict[str, Any]:
    return {
        "user": user.user,
        "roles": list(user.roles),
        "inbox_prefix": user.inbox_prefix,
        "publish": {call.subject: call.purpose for call in user.publish},
        "subscribe": {call.subject: call.purpose for call in user.subscribe},
        "claims": claims_of(user),
    }
