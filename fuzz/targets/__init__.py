"""Targets: one module for each kind of outside input, with the valid inputs that mutations begin with."""

from __future__ import annotations

from importlib import import_module

from fuzz.target import Target

NAMES = (
    "wire",
    "subjects",
    "headers",
    "texts",
    "records",
    "leader",
    "letters",
    "jobs",
    "views",
    "console",
    "spark",
    "commands",
)
FLEET = "fleet"
"""Not a function of bytes, but a whole fleet on a server: `fuzz.fleet`."""


def load(name: str) -> Target:
    """Import one target, and with it what it tries."""
    target: Target = import_module(f"fuzz.targets.{name}").TARGET
    return target
