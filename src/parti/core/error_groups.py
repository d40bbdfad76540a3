"""Errors inside of exception groups, such as a TaskGroup raises; bounded, whatever a subclass says about itself."""

from __future__ import annotations

_MOST_LEVELS = 10


def errors_of(error: BaseException) -> tuple[BaseException, ...]:
    """The errors of a group; none of an error that is no group."""
    if not issubclass(type(error), BaseExceptionGroup):
        return ()
    # As Python keeps them: a subclass may have an attribute of its own under this name.
    found: tuple[BaseException, ...] = BaseExceptionGroup.exceptions.__get__(error)
    return found


def first_of(error: BaseException) -> BaseException | None:
    """The first error of a group that is no group itself; None of an error that is no group.

    Of a group that is too deep, the group at which the search ended.
    """
    found = error
    for _ in range(_MOST_LEVELS):
        inner = errors_of(found)
        if not inner:
            break
        found = inner[0]
    return None if found is error else found
