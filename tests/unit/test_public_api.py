"""What users may lean on: the names that `parti` exports, and that each of them explains itself."""

from __future__ import annotations

import inspect

import parti

# A promise to users: removing a line here is a breaking change.
PUBLIC = [
    "App",
    "Callback",
    "Discovered",
    "FleetState",
    "FromKey",
    "HandlerTimeout",
    "Manager",
    "Message",
    "MessageContext",
    "PartiError",
    "Partition",
    "Reject",
    "Retry",
    "Settings",
    "Slot",
    "Static",
    "Strategy",
    "SubjectMapping",
    "Template",
    "Worker",
    "WorkerConsumerUpdater",
    "__version__",
    "current_worker_id",
]


def test_the_public_names_are_locked() -> None:
    assert sorted(parti.__all__) == PUBLIC
    assert all(hasattr(parti, name) for name in PUBLIC)


def test_every_public_name_has_a_docstring_and_so_has_everything_public_on_it() -> None:
    bare = []
    for name in PUBLIC:
        thing = getattr(parti, name)
        if not inspect.isclass(thing):
            continue
        own = {attribute: value for attribute, value in vars(thing).items() if not attribute.startswith("_")}
        members = {a: v for a, v in own.items() if inspect.isroutine(v) or isinstance(v, property | classmethod)}
        bare += [name] * (not (thing.__doc__ or "").strip())
        bare += [f"{name}.{attribute}" for attribute, value in members.items() if not inspect.getdoc(value)]
    # Fields of slotted dataclasses are named and typed in the class itself.
    assert bare == []
    assert (parti.__doc__ or "").strip()


def test_the_version_is_a_version() -> None:
    assert parti.__version__.split(".")[0].isdigit()
