"""Damages a JSON document at random: one value is replaced, deleted, renamed, cut or repeated."""

import random
from collections.abc import Iterator
from typing import Any

VALUES = [
    *(None, True, 0, -1, 1, 3, 0.5, 1e300, 1e16, 1e-320, -1e-9, 2**31, 2**53, 10**11, 10**30),
    *("", "text", "figure-1", "\ud800", "\x00", "x" * 3000, "../x"),
    *([], {}, [1], {"a": 1}, [[1]], [None]),
]
NAMES = ["", "x", "length", "\ud800", "ours", "heads", "by_length"]
Place = tuple[str | int, ...]


def places_in(value: Any, *, most: int, place: Place = ()) -> Iterator[Place]:
    """The document's own place, (), and those of the first `most` entries of each object, and six of each list."""
    yield place
    if isinstance(value, dict | list):
        for name in list(value)[:most] if isinstance(value, dict) else range(min(len(value), 6)):
            yield from places_in(value[name], most=most, place=(*place, name))


def damage(data: Any, place: Place, rng: random.Random) -> None:
    """Damages the value at a place, in place."""
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    last, value = place[-1], rng.choice(VALUES)
    held = inner[last]
    match rng.choice(["set", "set", "set", "delete", "fill", "rename", "cut", "repeat"]):
        case "set":
            inner[last] = value
        case "delete":
            del inner[last]
        case "rename" if isinstance(inner, dict):
            inner[rng.choice([*NAMES, f"{last}2"])] = inner.pop(last)
        case "fill" if isinstance(held, list):
            inner[last] = [value] * len(held)
        case "cut" if isinstance(held, dict):
            inner[last] = {name: column[:1] if isinstance(column, list) else column for name, column in held.items()}
        case "repeat" if isinstance(held, dict):
            inner[last] = {name: column * 2 if isinstance(column, list) else column for name, column in held.items()}
        case "repeat" if isinstance(held, list):
            inner[last] = held[:1] * len(held)
