"""What a stream's retention allows, and so how partitions move on it.

| retention  | may two consumers carry one subject | a message that is let go             | older messages come from |
|------------|-------------------------------------|--------------------------------------|--------------------------|
| limits     | yes                                 | stays in the stream                  | the stream itself        |
| interest   | yes                                 | is deleted with the last interest    | the consumer, set back   |
| work-queue | no                                  | is deleted with its acknowledgement  | the consumer, set back   |

On interest and work-queue streams a message below a consumer's ack floor counts as acknowledged by it, whether it was
ever delivered or not. So before such a consumer carries a subject, it is RESET to that partition's position.
"""

from __future__ import annotations

from dataclasses import dataclass

from parti.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules of one kind of stream."""

    name: str
    overlap: bool
    """Two consumers may carry one subject: the next owner gets ready while the last one still handles."""
    keeps: bool
    """Finished messages stay: a partition's older messages can be read from the stream, and acknowledging a message
    that somebody else is going to handle does no harm."""


LIMITS = Retention("limits", overlap=True, keeps=True)
INTEREST = Retention("interest", overlap=True, keeps=False)
WORK_QUEUE = Retention("workqueue", overlap=False, keeps=False)

_KINDS = {kind.name: kind for kind in (LIMITS, INTEREST, WORK_QUEUE)}


def retention_named(name: str) -> Retention:
    """The rules for a stream's `retention`; raises `ConfigError` for one that this version does not know."""
    try:
        return _KINDS[name]
    except KeyError:
        raise ConfigError(
            f"the stream has the retention {name!r}, which this version of parti does not know: expected one of "
            f"{', '.join(_KINDS)}; use a newer version of parti, or a stream of another kind"
        ) from None
