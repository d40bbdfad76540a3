"""Mutation: new inputs from known ones, as bytes and as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from fuzz.hostile import BIG, BYTES, DEEP, MANY_DIGITS, NESTED, VALUES

MOST_BYTES = 1 << 16


def mutate(data: bytes, chance: random.Random, known: Sequence[bytes]) -> bytes:
    """A new input, from one and perhaps another one of those that are known."""
    for _ in range(1 + int(chance.expovariate(0.7))):
        data = _once(data, chance, known)
    return data[:MOST_BYTES]


def _once(data: bytes, chance: random.Random, known: Sequence[bytes]) -> bytes:
    kind = chance.random()
    if kind < 0.4 and (document := _as_json(data, chance)) is not None:
        return document
    place = chance.randrange(len(data) + 1)
    if kind < 0.55:
        return data[:place] + chance.choice(BYTES) + data[place:]
    if kind < 0.65:
        return data[:place] + data[place + chance.randrange(1, 9) :]
    if kind < 0.75 and known:
        other = chance.choice(known)
        return data[:place] + other[chance.randrange(len(other) + 1) :]
    if kind < 0.85 and data:
        end = min(len(data), place + chance.randrange(1, 33))
        return data[:end] + data[place:end] * chance.randrange(1, 4) + data[end:]
    changed = bytearray(data or b"\0")
    for _ in range(chance.randrange(1, 5)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _as_json(data: bytes, chance: random.Random) -> bytes | None:
    """Change one value of one JSON document in the bytes; None when there is none."""
    begins = [place for place in range(len(data)) if data[place] == 0x7B][:64]
    if not begins:
        return None
    begin = chance.choice(begins)
    try:
        found, length = json.JSONDecoder().raw_decode(data[begin:].decode("latin-1"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    _change(found, chance)
    try:
        text = json.dumps(found, ensure_ascii=chance.random() < 0.5)
    except (ValueError, RecursionError):
        return None
    text = text.replace(f'"{BIG}"', MANY_DIGITS).replace(f'"{NESTED}"', "[" * DEEP + "]" * DEEP)
    return data[:begin] + text.encode("utf-8", "surrogatepass") + data[begin + length :]


def _change(found: dict[str, Any] | list[Any], chance: random.Random) -> None:
    places: list[tuple[Any, Any]] = []
    _collect(found, places)
    if not places or chance.random() < 0.1:
        if isinstance(found, dict):
            found[str(chance.choice(VALUES))[:100]] = chance.choice(VALUES)
        return
    parent, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.1:
        del parent[key]
    elif kind < 0.2 and isinstance(parent, dict):
        parent[str(chance.choice(VALUES))[:100]] = parent.pop(key)
    else:
        parent[key] = chance.choice(VALUES)


def _collect(found: Any, places: list[tuple[Any, Any]]) -> None:
    members = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, value in members:
        places.append((found, key))
        _collect(value, places)
