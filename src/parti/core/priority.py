"""Priority groups of pull consumers (ADR-42 of NATS): what may be configured and asked for.

nats-server 2.15.1 takes some of what its own design forbids: two groups (only the first works), acknowledgement
policies other than explicit, a negative timeout (it becomes 120 s), and an update that switches the policy or the
groups on and off. So all of it is checked here. Guards that nobody pulls under rules that the server does not apply.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from parti.errors import ApiError, ConfigError, PriorityRefused, ServerTooOld

NANOSECONDS = 1_000_000_000
MAX_NAME = 16
HIGHEST, LOWEST = 0, 9
"""Priorities of pulls: who asks with the smaller number is served first."""
DEFAULT_TIMEOUT_S = 120.0
"""What the server uses for a pinned group without a timeout."""

_FIELDS = frozenset({"priority_policy", "priority_groups", "priority_timeout"})
_NAME = re.compile(rf"[A-Za-z0-9/_=-]{{1,{MAX_NAME}}}")


class Policy(enum.StrEnum):
    """How the server chooses among the pulls of a group; the values are those of the wire."""

    OVERFLOW = "overflow"
    """A pull may ask to be served only while much is pending."""
    PINNED = "pinned_client"
    """One client gets everything until it stops pulling."""
    PRIORITIZED = "prioritized"
    """Pulls with a smaller number go first."""


NEEDS: Mapping[Policy, tuple[int, int, int]] = MappingProxyType(
    {Policy.OVERFLOW: (2, 11, 0), Policy.PINNED: (2, 11, 0), Policy.PRIORITIZED: (2, 12, 0)}
)
"""The first nats-server that knows a policy."""

SERVER_ERRORS: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        10025: ("unknown-policy", f"the server knows no such priority policy; expected one of {', '.join(Policy)}"),
        10159: ("policy-without-group", "a priority policy needs a priority group; name one"),
        10160: ("no-such-group", "the consumer has no such priority group; see 'parti priority status'"),
        10161: ("empty-group-name", "the name of a priority group may not be empty"),
        10162: ("bad-group-name", "a priority group is named with A-Z a-z 0-9 - _ / =, at most 16 characters"),
        10178: ("push-consumer", "priority groups are for pull consumers; leave out deliver_subject"),
        10196: ("group-without-policy", "a priority group needs a priority policy; name one"),
        10197: ("timeout-without-policy", "a priority timeout needs the policy pinned_client"),
    }
)
"""What the server's own refusals mean: a name, and what to do."""


@dataclass(frozen=True, slots=True)
class PriorityGroup:
    """A consumer's group and its policy; valid once it exists.

    Raises ConfigError for a bad name, for a timeout that is not positive, and for one with another policy than
    `pinned_client`.

    >>> PriorityGroup("jobs", Policy.PINNED, timeout_s=5.0).fields()["priority_timeout"]
    5000000000
    """

    name: str
    policy: Policy
    timeout_s: float | None = None
    """A pinned client that has not pulled for so long loses its pin; None: the server's 120 s."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.timeout_s is not None:
            _check_timeout(self.policy, self.timeout_s)

    def fields(self) -> dict[str, Any]:
        """What stands in the configuration of the consumer."""
        found: dict[str, Any] = {"priority_groups": [self.name], "priority_policy": self.policy.value}
        if self.timeout_s is not None:
            found["priority_timeout"] = round(self.timeout_s * NANOSECONDS)
        return found


def check_name(name: object) -> None:
    """Raise ConfigError unless this can be the name of a group."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"priority group {name!r} has no valid name; expected 1 to {MAX_NAME} characters of A-Z a-z 0-9 - _ / ="
        )


def _check_timeout(policy: Policy | None, timeout_s: float) -> None:
    if policy is not Policy.PINNED:
        said = f"the policy is {policy.value}" if policy else "there is no policy"
        raise ConfigError(f"a priority timeout is for the policy pinned_client, but {said}; leave the timeout out")
    if not timeout_s > 0:
        raise ConfigError(f"a priority timeout of {timeout_s:g} s is not positive; expected seconds above 0")


def policy_of(config: Mapping[str, Any]) -> Policy | None:
    """The policy of a consumer's configuration, None for none; ConfigError for one that nobody knows."""
    named = config.get("priority_policy") or "none"
    if named == "none":
        return None
    try:
        return Policy(named)
    except ValueError:
        raise ConfigError(f"priority policy {named!r} is unknown; expected one of {', '.join(Policy)}") from None


def group_of(config: Mapping[str, Any]) -> PriorityGroup | None:
    """The group of a consumer as the server has it; None when it has none.

    Of several groups the first: the server knows no state of the others. A timeout without a pin means nothing.
    """
    policy, groups, timeout = policy_of(config), config.get("priority_groups") or (), config.get("priority_timeout")
    if policy is None or not groups:
        return None
    return PriorityGroup(groups[0], policy, timeout / NANOSECONDS if timeout and policy is Policy.PINNED else None)


def check_config(config: Mapping[str, Any]) -> PriorityGroup | None:
    """Check a configuration as the design demands, and return its group; ConfigError says what is wrong."""
    policy, groups, timeout = policy_of(config), config.get("priority_groups") or (), config.get("priority_timeout")
    if timeout:
        _check_timeout(policy, timeout / NANOSECONDS)
    if policy is None:
        if groups:
            raise ConfigError(
                f"priority group {groups[0]!r} has no policy; expected priority_policy, one of {', '.join(Policy)}"
            )
        return None
    if not groups:
        raise ConfigError(f"priority policy {policy.value} has no group; expected priority_groups with one name")
    for name in groups:
        check_name(name)
    if len(groups) > 1:
        raise ConfigError(
            f"priority groups {', '.join(groups)}: a consumer may have one today, the server ignores the others; "
            f"make a consumer for each"
        )
    if config.get("deliver_subject"):
        raise ConfigError(
            f"priority group {groups[0]!r} is on a push consumer; groups are for pull consumers, leave out "
            f"deliver_subject"
        )
    if config.get("ack_policy") != "explicit":
        raise ConfigError(
            f"priority group {groups[0]!r} has ack_policy {config.get('ack_policy') or 'none'!r}; expected 'explicit'"
        )
    return group_of(config)


def with_group(config: Mapping[str, Any], group: PriorityGroup | None) -> dict[str, Any]:
    """The configuration with this group in place of its own; without a timeout of its own it keeps that one."""
    kept = {field: value for field, value in config.items() if field not in _FIELDS}
    if group is None:
        return kept
    keeps = group.policy is Policy.PINNED and config.get("priority_timeout")
    timeout = {"priority_timeout": config["priority_timeout"]} if keeps else {}
    return {**kept, **timeout, **group.fields()}


def check_update(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise ConfigError for an update that changes more of the group than its timeout."""
    for field in ("priority_policy", "priority_groups"):
        old, new = _said(before, field), _said(after, field)
        if old != new:
            raise ConfigError(
                f"{field} of consumer {after.get('name') or before.get('name')!r} cannot be changed from {old} to "
                f"{new}: clients of the one do not get on with the other; make another consumer, or delete this one "
                f"first"
            )
    check_config(after)


def _said(config: Mapping[str, Any], field: str) -> str:
    value = config.get(field) or "none"
    return value if isinstance(value, str) else ", ".join(map(str, value))


# ── pulls ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PullOptions:
    """What a pull says beyond how much it wants; `check_pull` says whether a consumer's policy allows it."""

    group: str = ""
    """The group that it belongs to; needed on a consumer that has one."""
    min_pending: int = 0
    """Overflow: be served while at least so many messages wait; 0: no such condition."""
    min_ack_pending: int = 0
    """Overflow: or while at least so many are unacknowledged; either of the two is enough."""
    priority: int | None = None
    """Prioritized: 0 (served first, and what is meant when nothing is said) to 9."""

    def fields(self, pin_id: str = "") -> dict[str, Any]:
        """What stands in the request; `pin_id` is the server's name for a pinned client."""
        found: dict[str, Any] = {}
        if self.group:
            found["group"] = self.group
        if self.min_pending:
            found["min_pending"] = self.min_pending
        if self.min_ack_pending:
            found["min_ack_pending"] = self.min_ack_pending
        if self.priority:
            found["priority"] = self.priority
        if pin_id:
            found["id"] = pin_id
        return found


def check_pull(options: PullOptions, group: PriorityGroup | None) -> None:
    """Raise ConfigError unless pulls with these options are served by a consumer with this group (None: without)."""
    check_numbers(options)
    if group is None:
        if options != PullOptions():
            raise ConfigError(
                f"the consumer has no priority group, but pulls ask for {_asked(options)}; leave that out, or make "
                f"the consumer with a group"
            )
        return
    if options.group != group.name:
        said = f"for group {options.group!r}" if options.group else "without a group"
        raise ConfigError(f"pulls {said} are refused by this consumer; expected its priority group {group.name!r}")
    allowed = {
        Policy.OVERFLOW: PullOptions(options.group, options.min_pending, options.min_ack_pending),
        Policy.PINNED: PullOptions(options.group),
        Policy.PRIORITIZED: PullOptions(options.group, priority=options.priority),
    }[group.policy]
    if options != allowed:
        raise ConfigError(
            f"pulls ask for {_asked(options)}, but the consumer's policy is {group.policy.value}; min_pending and "
            f"min_ack_pending are for overflow, priority is for prioritized"
        )


def check_numbers(options: PullOptions) -> None:
    """Raise ConfigError for numbers that no policy allows."""
    for name in ("min_pending", "min_ack_pending"):
        if getattr(options, name) < 0:
            raise ConfigError(f"{name}={getattr(options, name)} is negative; expected 0 (no condition) or more")
    if options.priority is not None and not HIGHEST <= options.priority <= LOWEST:
        raise ConfigError(f"priority={options.priority} is outside {HIGHEST} (served first) to {LOWEST}")


def _asked(options: PullOptions) -> str:
    named = {**options.fields(), **({} if options.priority is None else {"priority": options.priority})}
    return ", ".join(f"{name}={value}" for name, value in named.items())


# ── what the server says ──────────────────────────────────────────────────────────────────────────────────────────


def check_server(version: tuple[int, int, int], policy: Policy) -> None:
    """Raise ServerTooOld for a server that would take such a group for nothing."""
    if version < NEEDS[policy]:
        found, need = (".".join(map(str, each)) for each in (version, NEEDS[policy]))
        raise ServerTooOld(
            f"the server is nats-server {found}, but priority policy {policy.value} needs {need} or newer; upgrade "
            f"it, or do without the group"
        )


def check_taken(asked: PriorityGroup, answered: Mapping[str, Any]) -> None:
    """Raise ServerTooOld when the configuration that the server answered lacks the group: old ones ignore it.

    The server that one is connected to and the one that leads the consumer may be of different versions.
    """
    if policy_of(answered) is not asked.policy or answered.get("priority_groups") != [asked.name]:
        need = ".".join(map(str, NEEDS[asked.policy]))
        raise ServerTooOld(
            f"the server made the consumer without priority group {asked.name!r}; policy {asked.policy.value} needs "
            f"nats-server {need} or newer everywhere; delete the consumer, upgrade, and try again"
        )


def named(error: ApiError) -> ApiError:
    """The same refusal by its name, when it is about priority groups; any other error is returned as it is."""
    name, meaning = SERVER_ERRORS.get(error.code, ("", ""))
    # 10025 is every kind of bad JSON; only the text tells that the policy was meant.
    if not name or (error.code == 10025 and "priority policy" not in error.description):
        return error
    return PriorityRefused(name, meaning, error)
