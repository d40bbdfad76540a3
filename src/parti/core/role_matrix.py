"""What each role can do and cannot, as tables: the documentation shows them, and a test tries each cell on a server.

Of the single calls, who may make them follows from the permissions. Of whole commands it is said here, because what a
command sends is known only by running it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from parti.core.accounts import layout_of
from parti.core.permissions import MEANINGS, UserPermissions, inbox_of, permissions_of
from parti.core.role_calls import MEMBERS, ROLES, Names, Role
from parti.model.history import history_stream
from parti.model.subjects import covers

EXAMPLE = Names(
    "ORDERS",
    "orders",
    "orders",
    "orders-dlq",
    "orders-dlq",
    subjects=("orders.in.>",),
    mirror="orders-hot-ORDERS",
)
"""The deployment of the tables."""
_READERS: tuple[Role, ...] = ("worker", "leader", "operator", "observer", "migrator")
_ORDERS: tuple[Role, ...] = ("operator", "migrator")
"""All orders are one key, and a migration is partly orders."""
_LETTERS: tuple[Role, ...] = ("operator",)
_LISTERS: tuple[Role, ...] = ("operator", "observer", "migrator")
"""Who may list all consumers of the stream."""
COMMANDS: Mapping[str, tuple[Role, ...]] = {
    "parti worker, with may_lead=false beside a leader": ("worker", "leader"),
    "parti worker, the first of its fleet": ("leader",),
    "parti status": _READERS,
    "parti top --once": _READERS,
    "parti partitions": _READERS,
    "parti explain p0": _READERS,
    "parti migrate status": _READERS,
    "parti dlq ls": ("operator", "observer"),
    "parti doctor": ROLES,
    "parti move p0 --to worker-0": _ORDERS,
    "parti drain worker-1": _ORDERS,
    "parti pause": _ORDERS,
    "parti resume": _ORDERS,
    "parti priority status": _LISTERS,
    "parti priority status ORDERS shared": _LISTERS,
    "parti priority unpin ORDERS shared": ("operator",),
    "parti dlq replay --all --yes": _LETTERS,
    "parti dlq purge --all --yes": _LETTERS,
    "parti migrate, planned and run, there and back": ("migrator",),
    "reading a range for Spark": ("worker", "leader", "spark-reader", "migrator"),
}
"""Who can run which command to its end, with one account."""
APART_COMMANDS: Mapping[str, tuple[Role, ...]] = {
    **COMMANDS,
    # By requests, which whoever counts what waits is allowed, too.
    "reading a range for Spark": ("worker", "leader", "operator", "observer", "spark-reader", "migrator"),
}
"""The same with accounts."""


@dataclass(frozen=True, slots=True)
class Action:
    """One publish or subscription that somebody might try."""

    what: str
    subject: str
    listens: bool = False


def actions(names: Names) -> tuple[Action, ...]:
    """What is tried: what roles are for, and what none of them is for."""
    stream, bucket, kv = names.stream, f"KV_{names.bucket}", f"$KV.{names.bucket}"
    api = "$JS.API"
    subject = names.subjects[0] if names.subjects else f"{stream.lower()}.>"
    return (
        Action("publish messages of the app", subject.replace(">", "x").replace("*", "x")),
        Action("read single messages", f"{api}.STREAM.MSG.GET.{stream}"),
        Action("make or change a consumer", f"{api}.CONSUMER.CREATE.{stream}.x"),
        Action("pull from a consumer", f"{api}.CONSUMER.MSG.NEXT.{stream}.x"),
        Action("acknowledge messages", f"$JS.ACK.{stream}.x.1.1.1.1.0"),
        Action("delete a consumer", f"{api}.CONSUMER.DELETE.{stream}.x"),
        Action("stop a consumer for a while", f"{api}.CONSUMER.PAUSE.{stream}.x"),
        Action("put a consumer to a position", f"{api}.CONSUMER.RESET.{stream}.x"),
        Action("list all consumers", f"{api}.CONSUMER.LIST.{stream}"),
        Action("hold a worker id", f"{kv}.ids.worker-0"),
        Action("write positions", f"{kv}.progress.worker-0"),
        Action("say where old consumers stopped", f"{kv}.progress.old.consumers"),
        Action("write records of a migration", f"{kv}.migration.p0"),
        Action("be elected", f"{kv}.leader.rebalancer"),
        Action("give partitions to workers", f"{kv}.claims.p0"),
        Action("say what the fleet works on", f"{kv}.fleet"),
        Action("give orders", f"{kv}.orders"),
        Action("write the history", f"{history_stream(names.bucket)}.p0"),
        Action("store dead letters", f"{names.dead_letter_subject}.{stream}.x"),
        Action("store dead letters of another stream", f"{names.dead_letter_subject}.OTHER.x"),
        Action("read dead letters", f"{api}.STREAM.MSG.GET.{names.dead_letter_stream}"),
        Action("remove dead letters", f"{api}.STREAM.MSG.DELETE.{names.dead_letter_stream}"),
        Action("make the bucket", f"{api}.STREAM.CREATE.{bucket}"),
        Action("make the hot mirror", f"{api}.STREAM.CREATE.{names.mirror or 'mirror'}"),
        Action("make any other stream", f"{api}.STREAM.CREATE.x"),
        Action("change the stream", f"{api}.STREAM.UPDATE.{stream}"),
        Action("purge the stream", f"{api}.STREAM.PURGE.{stream}"),
        Action("delete the stream", f"{api}.STREAM.DELETE.{stream}"),
        Action("delete messages of the stream", f"{api}.STREAM.MSG.DELETE.{stream}"),
        Action("change the bucket", f"{api}.STREAM.UPDATE.{bucket}"),
        Action("purge the bucket", f"{api}.STREAM.PURGE.{bucket}"),
        Action("delete the bucket", f"{api}.STREAM.DELETE.{bucket}"),
        Action("copy the bucket", f"{api}.STREAM.SNAPSHOT.{bucket}"),
        Action("pull from other streams", f"{api}.CONSUMER.MSG.NEXT.OTHER.x"),
        Action("write to other buckets", "$KV.other.x"),
        Action("listen to messages of the app", subject, listens=True),
        Action("listen to writes of the bucket", f"{kv}.>", listens=True),
        Action("listen to calls of the API", "$JS.API.>", listens=True),
        Action("listen to the inboxes of those without a prefix", "_INBOX.>", listens=True),
        Action("listen to the inbox of another user", f"{inbox_of('somebody')}.>", listens=True),
        Action("listen to everything", ">", listens=True),
        Action("answer 'nats micro'", "$SRV.PING", listens=True),
    )


def may(user: UserPermissions, action: Action) -> bool:
    """Whether the permissions of a user allow this."""
    granted = user.subscribe_subjects if action.listens else user.publish_subjects
    return any(covers(each, action.subject) for each in granted)


def permissions_reference(names: Names = EXAMPLE) -> str:
    """Return the reference page of the roles as Markdown."""
    users = {role: permissions_of([role], names, user=role, inbox_prefix=inbox_of(role)) for role in ROLES}
    lines = [
        "# Permissions of the roles",
        "",
        "Generated by `docs/generate.py` from `parti.core.role_calls`, `permissions` and `role_matrix`; do not edit.",
        "Every cell of the two tables is tried on a real server by `tests/integration/security/test_roles.py`.",
        "[Security](../security.md) is the guide; `parti perms --stream NAME` prints the lists with your own names.",
        "",
        "The tables say what a user is allowed directly, with one account (`--layout single`). That keeps mistakes",
        "small and stops no attack: [answers go where the asker says]"
        "(../../SECURITY.md#answers-go-where-the-asker-says). With",
        "`--layout accounts` the roles that are no members of the fleet have accounts of their own, see the end.",
        "",
        *(f"- **{role}**: {MEANINGS[role]}." for role in ROLES),
        "",
        "## Commands",
        "",
        *_table(
            "command",
            ((text if "," in text or " a " in text else f"`{text}`", roles) for text, roles in COMMANDS.items()),
        ),
        "",
        "`parti doctor` runs for everybody: what it may not look at, it says so.",
        "",
        "## Single calls",
        "",
        *_table(
            "call",
            (
                (f"{each.what}<br>`{each.subject}`", [role for role in ROLES if may(users[role], each)])
                for each in actions(names)
            ),
        ),
        "",
        "## What is granted",
    ]
    for role, user in users.items():
        lines += ["", f"### {role}", "", "| publish to | for |", "|---|---|"]
        lines += [f"| `{call.subject}` | {call.purpose} |" for call in user.publish]
        lines += ["", "| subscribe to | for |", "|---|---|"]
        lines += [f"| `{call.subject}` | {call.purpose} |" for call in user.subscribe]
    return "\n".join([*lines, *_accounts_section(names), ""])


def _accounts_section(names: Names) -> list[str]:
    """What passes between accounts, and who may have it."""
    apart = replace(names, apart=True)
    outsiders = [role for role in ROLES if role not in MEMBERS]
    users = [permissions_of([role], apart, user=role, inbox_prefix=inbox_of(role)) for role in outsiders]
    layout = layout_of(users, "PARTI")
    lines = [
        "",
        "## With accounts",
        "",
        f"{', '.join(MEMBERS)} are in the account of the streams, with the lists above. Each of the others is in an",
        "account of its own and has nothing of the streams but these imports. No call among them makes a consumer or",
        "a stream. Those who read a stream for Spark do so by direct gets, which operators and observers can, too.",
        "",
        f"| import | for | {' | '.join(outsiders)} |",
        f"|---|---|{'---|' * len(outsiders)}",
    ]
    for each in layout.shared:
        importers = ["yes" if f"PARTI-{role}" in each.accounts else "" for role in outsiders]
        kind = "several answers" if each.several else "" if each.service else "stream"
        what = f"`{each.subject}`{f' ({kind})' if kind else ''}"
        lines.append(f"| {what} | {each.purpose} | {' | '.join(importers)} |")
    return lines


def _table(title: str, rows: Iterable[tuple[str, Sequence[Role]]]) -> list[str]:
    head = [f"| {title} | {' | '.join(ROLES)} |", f"|---|{'---|' * len(ROLES)}"]
    return head + [
        f"| {text} | {' | '.join('yes' if role in roles else '' for role in ROLES)} |" for text, roles in rows
    ]
