"""Attention accumulated over layers (records of `measure/rollout.py`): its numbers by depth, and two claims about it.

The claims are those of Wu, Wang, Jegelka and Jadbabaie 2025 (arXiv:2502.01951), measured on models trained without positions and
with ALiBi. Both compare shares of the first token at two depths or of two methods, paired by seed and by text; like the claims
of Press et al. (`verdicts.py`) they need an interval over seeds. Next: `sections/rollouts.py`.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from alibi_lab.position_methods import LOOKS
from alibi_lab.records import MAX_COUNT, Json, Record
from alibi_lab.report import intervals
from alibi_lab.report.intervals import Interval, Paired, Word
from alibi_lab.report.series import Array, numbers, sequence

THEORY = "theory"
PLAIN, RESIDUAL = "attention", "with residual"
SHARES = {"first_token": "first token", "first_tenth": "first tenth", "last_tenth": "last tenth"}


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of another paper with its verdict.

    Args:
        ours: the ratio; it holds if the ratio is on the right side of 1, as `condition` says.
        bounds: its interval; None if there is none.
    """

    says: str
    condition: str
    ours: float
    bounds: Interval | None
    word: Word


def is_drawn(record: Record) -> bool:
    """Whether the record has all shares at every depth; those of a model both without and with the residual."""
    if record.kind != "rollout":
        return False
    names = sequence(record.curves.get("rollout", {}).get("way"))
    shares = np.array([numbers(record, "rollout", name) for name in SHARES])
    at = numbers(record, "rollout", "depth")
    whole = all(isinstance(name, str) for name in names) and all(1 <= depth <= MAX_COUNT for depth in at)
    if not whole or not ((shares > -0.1) & (shares < 1.1)).all():
        return False
    found = ways(record)
    if record.name == THEORY:
        return bool(found)
    return found == [PLAIN, RESIDUAL] and _shape(record, PLAIN) == _shape(record, RESIDUAL)


def ways(record: Record) -> list[str]:
    """What was accumulated: in a theory record the masks, in a model's the attention without and with the residual."""
    return list(dict.fromkeys(map(str, sequence(record.curves.get("rollout", {}).get("way")))))


def depths(record: Record, way: str) -> Array:
    """The depths of a way, ascending."""
    return np.array(sorted({depth for name, depth, _ in _rows(record, "depth") if name == way}))


def by_text(record: Record, way: str, depth: float, share: str) -> Array:
    """A share at one depth, one value per text."""
    return np.array([value for name, at, value in _rows(record, share) if name == way and at == depth])


def by_depth(record: Record, way: str, share: str) -> Array:
    """A share at every depth of `depths`, averaged over the texts."""
    return np.array([by_text(record, way, depth, share).mean() for depth in depths(record, way)])


def models(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of trained models by name: one per seed, with the depths and texts of the first."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if is_drawn(record) and record.name != THEORY:
            found.setdefault(record.name, {})[str(record.config.get("seed"))] = record
    kept = {name: [seeds[seed] for seed in sorted(seeds)] for name, seeds in found.items()}
    return {name: [one for one in members if _shape(one) == _shape(members[0])] for name, members in kept.items()}


def method_of(record: Record) -> str:
    """The position method of a model of the lab; "alibi" for other models, which have slopes."""
    method = record.config.get("method")
    return method if isinstance(method, str) else "alibi"


def label_of(name: str, record: Record) -> str:
    """The name of a model's method, or the name of a model that is not the lab's."""
    look = LOOKS.get(method_of(record))
    return look.label if look and "method" in record.config else name


def claims(records: Sequence[Record]) -> list[Claim]:
    """Both claims; those for which records are missing are left out."""
    of_method = {method_of(members[0]): members for members in models(records).values()}
    plain, alibi = of_method.get("none", []), of_method.get("alibi", [])
    found = []
    if plain:
        first, last = depths(plain[0], PLAIN)[[0, -1]]
        says = (
            f"under a causal mask alone the first token's share of accumulated attention rises from layer 1 to {last:.0f} "
            "(theorem 4.1)"
        )
        found.append(_judged(says, "above", [(_logs(record, last), _logs(record, first)) for record in plain]))
    pairs = [(one, other) for one in alibi for other in plain if _fits(one, other)]
    if pairs:
        last = depths(alibi[0], PLAIN)[-1]
        says = (
            f"a decay with the distance keeps it lower: after {last:.0f} layers ALiBi's share is below that without "
            "positions (theorem 4.5)"
        )
        found.append(_judged(says, "below", [(_logs(one, last), _logs(other, last)) for one, other in pairs]))
    return found


def _rows(record: Record, share: str) -> Iterator[tuple[Json, float, float]]:
    columns = (numbers(record, "rollout", name) for name in ("depth", share))
    return zip(sequence(record.curves["rollout"]["way"]), *columns, strict=True)


def _shape(record: Record, way: str = PLAIN) -> Mapping[float, int]:
    """The number of texts at every depth."""
    return Counter(depth for name, depth, _ in _rows(record, "depth") if name == way)


def _fits(one: Record, other: Record) -> bool:
    names = ("seed", "length", "texts", "text_sha256", "layers")
    return _shape(one) == _shape(other) and all(one.config.get(name) == other.config.get(name) for name in names)


def _logs(record: Record, depth: float) -> Array:
    """Logarithms of the first token's share, one per text; of the smallest number if it is 0 or below."""
    return np.log(np.maximum(by_text(record, PLAIN, depth, "first_token"), np.finfo(np.float64).tiny))


def _judged(says: str, relation: Literal["below", "above"], pairs: Sequence[tuple[Array, Array]]) -> Claim:
    """The verdict on a claim that a ratio is on this side of 1, from pairs of logarithms, one per seed."""
    differences = np.array([over - under for over, under in pairs])  # [seeds, texts]
    logs, parts = differences.mean(1), differences.mean(0)
    samples = Paired(logs=logs, parts=parts, weights=np.full(len(parts), 1 / len(parts)))
    bounds = intervals.as_ratio(intervals.mean_interval(samples))
    word = intervals.word_of(bounds, relation, 1.0) if bounds and intervals.seed_interval(samples) else "open"
    return Claim(says, f"{relation} 1", intervals.exp(float(logs.mean())), bounds, word)
