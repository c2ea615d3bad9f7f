"""Damages recorded results at random. Loading must raise an error that names the file, or the page must be drawn."""

import copy
import fnmatch
import functools
import json
import random
from pathlib import Path
from typing import Any

from damaged_json import damage, places_in

from alibi_attn.strict_json import sealed
from alibi_lab import records
from alibi_lab.records import RecordError
from alibi_lab.report.page import report_html

RESULTS = Path(__file__).resolve().parents[3] / "results"
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
        at = [x for x in places_in(data, most=1000) if x and (x[0] == top if top else x[0] not in ("config", "curves"))]
        if at:
            damage(data, rng.choice(at), rng)
    return data


def assert_named_or_drawn(path: Path, others: list[records.Record]) -> bool:
    """Returns whether the page was drawn; otherwise the error must name the file and be printable in a terminal."""
    try:
        record = records.load(path)
    except RecordError as error:
        refusal = str(error)
    else:
        assert report_html([record, *others]).encode().endswith(b"</html>")
        return True
    assert str(path) in refusal
    refusal.encode()
    return False


def draw(seed: int, folder: Path) -> bool:
    """Damages one record, with some related evaluations next to it, and returns whether the page was drawn."""
    rng = random.Random(seed)
    data = copy.deepcopy(lines()[places()[seed % len(places())]])
    evidence = [f"paper#{name.removesuffix('.json')}" for name in data["config"].get("evidence", ())][:6]
    others = [records.load(RESULTS / place.replace("#", ".jsonl#")) for place in evidence if place in lines()]
    bad = folder / "damaged.json"
    bad.write_bytes(sealed(damaged(data, rng)))  # or the checksum would refuse everything
    return assert_named_or_drawn(bad, others)
