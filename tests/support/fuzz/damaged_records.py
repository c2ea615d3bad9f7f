"""Damages recorded results at random. Loading must raise an error that names the file, or the page must be drawn."""

import copy
import fnmatch
import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alibi_attn.strict_json import sealed
from alibi_lab import records
from alibi_lab.records import RecordError
from alibi_lab.report.page import report_html

RESULTS = Path(__file__).resolve().parents[3] / "results"
VALUES = [
    None,
    0,
    -1,
    1,
    3,
    0.5,
    1e99,
    1e16,
    1e-320,
    -1e-9,
    2**53,
    10**30,
    "",
    "text",
    "figure-1",
    "\ud800",
    "\x00",
    "x" * 3000,
    [],
    {},
    True,
    [1],
    {"a": 1},
    [[1]],
    [None],
]
NAMES = ["", "x", "length", "\ud800", "ours", "heads", "by_length"]
# There are hundreds of training and test results; one of each kind and layout is enough.
PATTERNS = {
    "*#benchmark-*": 1,
    "c*#c*": 1,
    "models#int8-*": 1,
    "texts#search-*": 1,
    "methods#*": 12,
    "recall#*": 12,
    "referee#e*": 60,
    "paper#e*": 60,
    "rollout#*": 4,
    "paper#t*": 60,
    "paper#s*": 20,
    "paper#p*": 1,
}


@functools.cache
def lines() -> dict[str, dict[str, Any]]:
    """Every record of results/ as JSON without its checksum, by FILE#KEY."""
    found = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            data = json.loads(line)
            del data["sha256"]
            found[f"{path.stem}#{data.pop('key')}"] = data
    return found


@functools.cache
def places() -> list[str]:
    """The results to damage, as FILE#KEY."""
    return [place for pattern, step in PATTERNS.items() for place in fnmatch.filter(lines(), pattern)[::step]]


def damaged(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns the record with one to four values set, deleted, renamed, cut or repeated, mostly in its curves."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        top = rng.choice(["config", "metrics", *["curves"] * 4, None])
        places = [
            place
            for place in _places(data)
            if place and (place[0] == top if top else place[0] not in ("config", "curves"))
        ]
        if places:
            _damage(data, rng.choice(places), rng)
    return data


def assert_named_or_drawn(path: Path, others: list[records.Record]) -> bool:
    """Returns whether the page was drawn; otherwise the error must name the file and be printable in a terminal."""
    record, refusal = _loaded(path)
    if record is None:
        assert str(path) in refusal
        refusal.encode()
        return False
    page = report_html([record, *others])
    assert page.encode().endswith(b"</html>")
    return True


def draw(seed: int, folder: Path) -> bool:
    """Damages one record, with some related evaluations next to it, and returns whether the page was drawn."""
    rng = random.Random(seed)
    data = copy.deepcopy(lines()[places()[seed % len(places())]])
    evidence = [f"paper#{name.removesuffix('.json')}" for name in data["config"].get("evidence", ())][:6]
    others = [records.load(RESULTS / place.replace("#", ".jsonl#")) for place in evidence if place in lines()]
    bad = folder / "damaged.json"
    bad.write_bytes(sealed(damaged(data, rng)))  # or the checksum would refuse everything
    return assert_named_or_drawn(bad, others)


def _loaded(path: Path) -> tuple[records.Record | None, str]:
    try:
        return records.load(path), ""
    except RecordError as error:
        return None, str(error)


def _damage(data: dict[str, Any], place: tuple[str | int, ...], rng: random.Random) -> None:
    inner: Any = data
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


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield place
    if isinstance(value, dict):
        for name in value:
            yield from _places(value[name], (*place, name))
    elif isinstance(value, list):
        for index in range(min(len(value), 6)):
            yield from _places(value[index], (*place, index))
