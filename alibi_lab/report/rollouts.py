"""Attention accumulated over layers (records of `measure/rollout.py`): its numbers by depth, and two claims about it.

The claims are those of Wu, Wang, Jegelka and Jadbabaie 2025 (arXiv:2502.01951), measured on models trained without positions and
with ALiBi. Both compare shares of the first token at two depths or of two methods, paired by seed and by text; like the claims
of Press et al. (`verdicts.py`) they need an interval over seeds. Next: `sections/heads.py`.
"""

from collections.abc import Sequence

import numpy as np

from alibi_lab.position_methods import LOOKS
from alibi_lab.records import MAX_COUNT, Record
from alibi_lab.report import intervals
from alibi_lab.report.intervals import Paired
from alibi_lab.report.published import Claim, Number, Relation
from alibi_lab.report.series import Array, grouped, numbers, sequence
from alibi_lab.report.verdicts import Verdict, decided

THEORY = "theory"
PLAIN, RESIDUAL = "attention", "with residual"
SHARES = {"first_token": "first token", "first_tenth": "first tenth", "last_tenth": "last tenth"}


def is_drawn(record: Record) -> bool:
    """Whether the record has all shares at every depth; those of a model both without and with the residual."""
    ways = sequence(record.curves.get("rollout", {}).get("way"))
    if record.kind != "rollout" or not ways or not all(isinstance(way, str) for way in ways):
        return False
    values = np.array([numbers(record, "rollout", name) for name in SHARES])
    whole = all(1 <= depth <= MAX_COUNT for depth in numbers(record, "rollout", "depth"))
    if not whole or not ((values > -0.1) & (values < 1.1)).all():
        return False
    both = list(shares(record)) == [PLAIN, RESIDUAL] and _shape(record) == _shape(record, RESIDUAL)
    return both or record.name == THEORY


def shares(record: Record) -> dict[str, dict[float, Array]]:
    """[texts, SHARES] at every depth, ascending, of what was accumulated: in a theory record by mask, in a model's the attention
    without and with the residual."""
    columns = (numbers(record, "rollout", name) for name in ("depth", *SHARES))
    found: dict[str, dict[float, list[list[float]]]] = {}
    for way, depth, *values in zip(sequence(record.curves["rollout"]["way"]), *columns, strict=True):
        found.setdefault(str(way), {}).setdefault(depth, []).append(values)
    return {way: {depth: np.array(at[depth]) for depth in sorted(at)} for way, at in found.items()}


def by_depth(record: Record, way: str, share: str) -> dict[float, float]:
    """A share at every depth, averaged over the texts."""
    place = list(SHARES).index(share)
    return {depth: float(values[:, place].mean()) for depth, values in shares(record)[way].items()}


def models(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of trained models by name: one per seed, with the depths and texts of the first."""
    drawn = grouped((one for one in records if is_drawn(one) and one.name != THEORY), lambda one: one.name)
    seeds = {name: {str(one.config.get("seed")): one for one in members} for name, members in drawn.items()}
    kept = {name: [of_seed[seed] for seed in sorted(of_seed)] for name, of_seed in seeds.items()}
    return {name: [one for one in members if _shape(one) == _shape(members[0])] for name, members in kept.items()}


def method_of(record: Record) -> str:
    """The position method of a model of the lab; "alibi" for other models, which have slopes."""
    method = record.config.get("method")
    return method if isinstance(method, str) else "alibi"


def label_of(name: str, record: Record) -> str:
    """The name of a model's method, or the name of a model that is not the lab's."""
    look = LOOKS.get(method_of(record))
    return look.label if look and "method" in record.config else name


def claims(records: Sequence[Record]) -> list[Verdict]:
    """The verdicts on both claims; those for which records are missing are left out."""
    of_method = {method_of(members[0]): members for members in models(records).values()}
    plain, alibi = of_method.get("none", []), of_method.get("alibi", [])
    found = []
    if plain:
        first, last = min(shares(plain[0])[PLAIN]), max(shares(plain[0])[PLAIN])
        says = (
            f"under a causal mask alone the first token's share of accumulated attention rises from layer 1 to {last:.0f} "
            "(theorem 4.1)"
        )
        found.append(_judged(says, "above", [(_logs(record, last), _logs(record, first)) for record in plain]))
    pairs = [(one, other) for one in alibi for other in plain if _fits(one, other)]
    if pairs:
        last = max(shares(alibi[0])[PLAIN])
        says = (
            f"a decay with the distance keeps it lower: after {last:.0f} layers ALiBi's share is below that without "
            "positions (theorem 4.5)"
        )
        found.append(_judged(says, "below", [(_logs(one, last), _logs(other, last)) for one, other in pairs]))
    return found


def _shape(record: Record, way: str = PLAIN) -> dict[float, int]:
    """The number of texts at every depth."""
    return {depth: len(values) for depth, values in shares(record)[way].items()}


def _fits(one: Record, other: Record) -> bool:
    names = ("seed", "length", "texts", "text_sha256", "layers")
    return _shape(one) == _shape(other) and all(one.config.get(name) == other.config.get(name) for name in names)


def _logs(record: Record, depth: float) -> Array:
    """Logarithms of the first token's share, one per text; of the smallest number if it is 0 or below."""
    return np.log(np.maximum(shares(record)[PLAIN][depth][:, 0], np.finfo(np.float64).tiny))


def _judged(says: str, relation: Relation, pairs: Sequence[tuple[Array, Array]]) -> Verdict:
    """The verdict on a claim that a ratio is on this side of 1, from pairs of logarithms, one per seed."""
    differences = np.array([over - under for over, under in pairs])  # [seeds, texts]
    logs, parts = differences.mean(1), differences.mean(0)
    samples = Paired(logs=logs, parts=parts, weights=np.full(len(parts), 1 / len(parts)))
    share = (Number("first token", column="share"),)  # of trained models, so the claim needs seeds
    claim = Claim(item="rollout", says=says, over=share, under=share, relation=relation)
    return decided(claim, intervals.exp(float(logs.mean())), samples)
