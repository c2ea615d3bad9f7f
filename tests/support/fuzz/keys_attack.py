"""Attacks the gradients of keys: measures in float64 the weight that each key lost because queries left it out.

    python tests/support/fuzz/keys_attack.py --draws 20000 --backend native
    python tests/support/fuzz/keys_attack.py --draws 5000 --backend banded --first 20000 --out results
    python tests/support/fuzz/keys_attack.py --draws 5000 --backend jax-loop
    TRITON_INTERPRET=1 python tests/support/fuzz/keys_attack.py --draws 300 --backend fused
    python tests/support/fuzz/keys_attack.py --draws 1 --first 4711 --backend native     # one draw, printed

Key j has the weight W_j = Σ_i p_ij·‖do_i‖ over all queries of its head, which is the norm of its dv where nothing cancels. It
lost Σ p_ij·‖do_i‖ over the queries that left it out: by the certificate (forward did not visit it) or by measured reach (backward
did not). The key rule says that the share p_ij of a key, or of its whole tile, that a query leaves out at distance d is at most

    tolerance / (2·(d + 64)) ,  d = the smallest distance between the block of queries and the tile of keys.

Summed over the pairs that were left out this limits what a key lost, and it is all that this attack allows. Blocks of 64 queries
are at d ≥ 64·(n − 1) + 1 for n = 1, 2, … on either side, so Σ_i 64 / (2·(d + 64)) ≤ (1 + ln(T / 64)) / 2 on each side, and a key
loses at most tolerance·(1 + ln(T / 64)) of the largest ‖do‖ per query head of its key head (docs/maths.md). What was lost is
also reported as a share of W_j or of the mean key's, whichever is larger.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import numpy as np
import torch
from certificate_attack import BIASES, WHERE, Attack, distances_of, seen_keys, shares_of
from compiled_calls import Compiled, compiled
from measured_attack import banded_keys, fused_keys, native_keys, rounding, sections_at_every_length

from alibi_attn import alibi_attention
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import TILE
from alibi_lab import records

KINDS = ("uniform", "noise", "light key", "light tile", "light and long", "growing queries", "light bias", "biased")
MASKS = (
    "none",
    "none",
    "few queries",
    "left padding",
    "right padding",
    "texts",
    "texts and mask",
    "random mask",
    "window",
    "offset after",
)
DTYPES = ("float64", "float32", "bfloat16", "float16")
ROWS = 512  # queries whose weights are in memory at a time
CERTIFIED, MEASURED = "certificate", "measured reach"


@dataclasses.dataclass(frozen=True)
class KeyAttack(Attack):
    """One adversarial call. `length` counts keys; `kind` says which keys are light, and `share` how light."""

    kind: str = "uniform"
    share: float = 1.0  # of a light key in a row of average length, in units of the tolerance
    few: int | None = None  # how many "few queries" are; None = by the seed

    def inputs(self) -> tuple[list[torch.Tensor], dict]:
        plain = {"left padding": "none", "texts": "none", "texts and mask": "random mask", "few queries": "none"}
        of_mask = plain.get(self.mask, self.mask) if self.mask != "right padding" else "none"
        base = Attack(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Attack)} | {"mask": of_mask})
        (q, k, v, slopes), kwargs = base.inputs()
        q, k, v = (x.double() for x in (q, k, v))
        rng = np.random.default_rng([self.seed, 3])
        if self.mask == "few queries":
            drawn = int(rng.choice([1, 16, 64, 65]))
            q = q[:, :, -(self.few or drawn) :]
        border = min(self.length - 1, int(rng.choice([63, 64, 65, self.length // 2])))
        at = torch.arange(self.length)
        if self.mask in ("left padding", "right padding"):
            seen = (at >= border) if self.mask == "left padding" else (at < self.length - border)
            kwargs["key_mask"] = seen[None]
        if "texts" in self.mask:
            borders = torch.tensor(np.sort(rng.integers(0, self.length + 1, 3)) // 64 * 64 + int(rng.integers(-1, 2)))
            kwargs["segment_ids"] = torch.bucketize(at, borders, right=True)[None]
        self._lighten(rng, q, k, v, kwargs)
        dtype = getattr(torch, self.dtype)
        return [*(x.to(dtype) for x in (q, k, v)), slopes], kwargs

    def _lighten(
        self, rng: np.random.Generator, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kwargs: dict
    ) -> None:
        """Makes some keys light, in place: their scores are lower by the logarithm of the share that is wanted."""
        n, scale = self.length, self.head_dim**-0.5
        low = min(-0.1, math.log(self.share * self.tolerance * n / 2))
        first = int(rng.choice([0, n - 1, n // 64 * 64, rng.integers(0, n)]))
        some = slice(min(first, n - 1), None) if rng.random() < 0.5 else slice(first, first + 1)
        if self.kind == "light tile":
            some = slice(first // 64 * 64, first // 64 * 64 + 64 * int(rng.integers(1, 4)))
        if self.kind in ("light key", "light tile", "light and long"):
            away = float(rng.choice([0.1, 1.0])) if self.kind != "light and long" else float(rng.uniform(10, 50))
            q[..., 0] = abs(low) / (scale * away)  # q·k is `low` for these keys
            k[..., 0] = 0.0
            k[:, :, some] *= 0.1
            k[:, :, some, 0] = -away
            if self.kind == "light and long":
                v[:, :, some] *= float(rng.uniform(1, 50))
        if self.kind == "growing queries":  # the score of key 0 is the same for all queries, after its bias
            positions = torch.arange(n - q.shape[2], n, dtype=torch.float64)
            q[..., 0] = (self.slope * positions + low * float(rng.uniform(0.3, 1.2))) / scale
            k[..., 0] = 0.0
            k[:, :, 0] = 0.0
            k[:, :, 0, 0] = 1.0
        if self.kind == "light bias":
            biases = torch.zeros(1, self.group, n, dtype=torch.float64)
            biases[..., some] = low * float(rng.uniform(0.3, 1.2))
            kwargs["key_bias"] = biases if kwargs["key_bias"] is None else kwargs["key_bias"] + biases


@dataclasses.dataclass(frozen=True)
class Backend:
    """One backend under attack.

    Args:
        keys: returns the keys [B, H, T, S] that forward and backward visit.
        gradient: computes the attack's gradient of the values, as `gradient_of_values`.
        block, tile: queries and keys that are left out together.
        compiled: the calls that it is compiled for, one after the other; any, if empty.
        biased: whether it computes biases of keys.
    """

    keys: Callable[..., list[torch.Tensor]]
    gradient: Callable[["KeyAttack"], torch.Tensor] | None = None
    block: int = TILE
    tile: int = TILE
    dtypes: tuple[str, ...] = DTYPES
    compiled: tuple[Compiled, ...] = ()
    biased: bool = True


@dataclasses.dataclass(frozen=True)
class Losses:
    """What the keys of a call lost, [K, S] each, in units of ‖do‖ of a query."""

    lost: dict[str, torch.Tensor]
    allowed: dict[str, torch.Tensor]
    weight: torch.Tensor
    off: float  # nats that a computed score may be off by

    def of_weight(self, by: str) -> float:
        """The largest share of its own weight, or of the mean key's, that a key lost."""
        weighed = self.weight > 0
        mean = self.weight.sum(-1, keepdim=True) / weighed.sum(-1, keepdim=True).clamp(min=1)
        share = self.lost[by] / torch.maximum(self.weight, mean).clamp(min=1e-300)
        return float(share.max()) if share.numel() else 0.0

    def of_limit(self, by: str) -> float:
        """The largest share of what the key rule lets a key lose; inf where it may lose nothing."""
        limit = self.allowed[by] * math.exp(2 * self.off)
        share = torch.where(self.lost[by] > 0, self.lost[by] / limit, 0.0)
        return float(share.max()) if share.numel() else 0.0


def losses(attack: KeyAttack, backend: Backend, tolerance: float | None = None) -> Losses:
    """What the keys of a call lose in a backend, which computes with another tolerance if one is passed."""
    (query, key, value, slopes), kwargs = attack.inputs()
    spec = make_spec(query, key, value, slopes, **kwargs)
    with torch.no_grad():
        computed = dataclasses.replace(spec, tolerance=tolerance or spec.tolerance)
        forward, backward = backend.keys(computed, query, key, value)
    distance, seen = distances_of(spec), seen_keys(spec)
    shape = (spec.num_kv_heads, spec.key_len)
    lost, allowed = ({by: torch.zeros(shape, dtype=torch.float64) for by in (CERTIFIED, MEASURED)} for _ in range(2))
    weight = torch.zeros(shape, dtype=torch.float64)
    norms = grad_norms(attack, spec.num_heads, spec.query_len)
    for rows in torch.arange(spec.query_len).split(ROWS):
        limit = spec.tolerance / (2 * (nearest_distances(distance[0], rows, backend) + 64))
        for h in range(spec.num_heads):
            near, of, grad = seen[0, h, rows], h // spec.group, norms[h, rows, None]
            weights = grad * shares_of(spec, h, (query[0, h, rows], key[0, of]), (distance[0, rows], near))
            weight[of] += weights.sum(0)
            for by, left_out in (
                (CERTIFIED, near & ~forward[0, h, rows]),
                (MEASURED, near & forward[0, h, rows] & ~backward[0, h, rows]),
            ):
                if left_out.any():
                    lost[by][of] += (weights * left_out).sum(0)
                    allowed[by][of] += (grad * limit * left_out).sum(0)
    return Losses(lost, allowed, weight, rounding(spec, query, key))


def grad_norms(attack: Attack, heads: int, queries: int) -> torch.Tensor:
    """[H, T] float64: ‖do_i‖, all 1 in half of the draws."""
    rng = np.random.default_rng([attack.seed, 4])
    spread = float(rng.choice([0.0, 1.0]))
    return torch.tensor(np.exp2(np.round(spread * rng.standard_normal((heads, queries)))))  # exact in every dtype


def nearest_distances(distance: torch.Tensor, rows: torch.Tensor, backend: Backend) -> torch.Tensor:
    """[rows, S] float64: the smallest distance between the queries of a pair's block and the keys of its tile."""
    queries, keys = distance.shape
    first = int(distance[0, 0])  # the position of query 0
    start, tile = rows[:, None] // backend.block * backend.block, torch.arange(keys) // backend.tile
    top, last = first + start, first + (start + backend.block).clamp(max=queries) - 1
    low, high = tile * backend.tile, ((tile + 1) * backend.tile).clamp(max=keys) - 1
    return torch.maximum(top - high, low - last).clamp(min=0).double()


def random_attack(seed: int, backend: Backend) -> KeyAttack:
    """A draw that the backend can compute.

    Half of the tolerances are those at which a key of an average share is about as light as the rule allows.
    """
    rng = np.random.default_rng([seed, 5])
    pick = lambda options: options[int(rng.integers(len(options)))]  # noqa: E731
    of = backend.compiled[seed % len(backend.compiled)] if backend.compiled else None
    kinds = KINDS if backend.biased else KINDS[:-2]
    if of is not None:
        kinds = KINDS[-2:] if of.biased else KINDS[:-2]
    kind, dtype = pick(kinds), pick(backend.dtypes)
    length = 64 * int(rng.integers(1, 24 if seed % 10 == 0 else 8)) + pick((1, 15, 0, int(rng.integers(0, 64))))
    if of is not None:
        length, dtype = of.length, of.dtype
    elif seed % 250 == 0:  # so long that limits per query add up to a key, in bf16
        length, dtype = (
            64 * int(rng.integers(64, 70)) + pick((1, 15)),
            "bfloat16" if "bfloat16" in backend.dtypes else dtype,
        )
    wanted = float(10.0 ** (rng.uniform(-1, 0.7) if rng.random() < 0.5 else rng.uniform(-6, 1)) / length)
    tolerance = default_tolerance(dtype) if rng.random() < 0.2 or length > 4000 else min(wanted, 0.1)
    small = kind == "uniform" or rng.random() < 0.5
    drawn = KeyAttack(
        seed=seed,
        length=length,
        head_dim=int(rng.integers(1, 9)),
        slope=float(pick((0.0, 0.0, 2.0**-11, 2.0 ** rng.uniform(-10, -3), 2.0 ** rng.uniform(-4, 0)))),
        tolerance=tolerance,
        where="nothing" if kind != "noise" else pick(WHERE),
        mask=pick(MASKS if of is None else of.masks),
        causal=bool(rng.random() < 0.5),
        group=int(rng.integers(1, 4)),
        log_query=-1.7 if small else float(rng.uniform(-1, 0.5)),
        log_key=-1.7 if small else float(rng.uniform(-1, 0.5)),
        log_giant=float(rng.uniform(0, 2)),
        dtype=dtype,
        bias=pick(BIASES) if kind == "biased" else None,
        kind=kind,
        share=float(10.0 ** rng.uniform(-2, 0.3)),
    )
    return drawn if of is None else dataclasses.replace(drawn, causal=of.causal, few=of.few, head_dim=4, group=2)


def default_tolerance(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps / 32


def gradient_of_values(backend: str, attack: KeyAttack) -> torch.Tensor:
    """[K, S] float64: Σ_i p_ij·‖do_i‖ as backward computes it: dv where all do are ‖do_i‖ times the same unit vector."""
    (query, key, value, slopes), kwargs = attack.inputs()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = alibi_attention(*leaves, slopes, **kwargs, backend=backend)
    grad = torch.zeros_like(output)
    grad[0, :, :, 0] = grad_norms(attack, *output.shape[1:3]).to(grad.dtype)
    return torch.autograd.grad(output, leaves, grad)[2][0, :, :, 0].double()


def gradient_of_banded(attack: KeyAttack) -> torch.Tensor:
    with sections_at_every_length():
        return gradient_of_values("banded", attack)


def keys_of_jax(backend: str, *call: Any) -> list[torch.Tensor]:
    import jax_keys

    return jax_keys.visited(backend, *call)


def gradient_of_jax(backend: str, attack: KeyAttack) -> torch.Tensor:
    import jax_keys

    (*tensors, slopes), kwargs = attack.inputs()
    spec = make_spec(*tensors, slopes, **kwargs)
    return jax_keys.gradient_of_values(backend, spec, tensors, grad_norms(attack, spec.num_heads, spec.query_len))


def untrue(attack: KeyAttack, found: Losses, gradient: torch.Tensor) -> float:
    """How much more the gradient of the values lacks than the keys that were left out weigh, as a share of what may be rounded.

    Above 1, backward did not visit what it is said to have visited.
    """
    lacking = found.weight - gradient - sum(found.lost.values())
    mean = found.weight.mean(-1, keepdim=True)
    unit = max(torch.finfo(getattr(torch, attack.dtype)).eps, 2.0**-30)
    rounded = 4 * unit + math.expm1(2 * found.off) + 2 * attack.tolerance
    return float((lacking.abs() / (rounded * torch.maximum(found.weight, mean)).clamp(min=1e-300)).max())


BACKENDS = {
    "native": Backend(native_keys, functools.partial(gradient_of_values, "native")),
    "banded": Backend(banded_keys, gradient_of_banded, biased=False),
    "jax-native": Backend(
        functools.partial(keys_of_jax, "native"),
        functools.partial(gradient_of_jax, "native"),
        compiled=compiled(DTYPES, MASKS, (65, 129, 143, 321, 335, 705, 1217)),
    ),
    "jax-loop": Backend(
        functools.partial(keys_of_jax, "loop"),
        functools.partial(gradient_of_jax, "loop"),
        block=32,
        tile=32,
        compiled=compiled(("float64", "float32", "bfloat16"), MASKS, (193, 271)),
    ),
    "fused": Backend(fused_keys, functools.partial(gradient_of_values, "fused"), dtypes=("float32", "float16")),
}


@dataclasses.dataclass
class Tally:
    """The outcome of the draws of one dtype."""

    numbers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    worst: dict[str, float] = dataclasses.field(default_factory=dict)
    broken: list[int] = dataclasses.field(default_factory=list)

    def add(self, attack: KeyAttack, found: Losses, untrue_by: float) -> None:
        self.numbers["draws"] += 1
        if found.off >= 0.5:
            self.numbers["rounded scores"] += 1
            return
        of_draw = {"untrue": untrue_by}
        for by in (CERTIFIED, MEASURED):
            self.numbers[f"lose by {by}"] += bool((found.lost[by] > 0).any())
            of_draw[f"share of the limit, {by}"] = found.of_limit(by)
            if attack.tolerance == default_tolerance(attack.dtype):
                of_draw[f"share of a key at the default tolerance, {by}"] = found.of_weight(by)
        self.worst |= {name: max(share, self.worst.get(name, 0.0)) for name, share in of_draw.items()}
        if not max(share for name, share in of_draw.items() if "default" not in name) <= 1:
            self.broken.append(attack.seed)


def run(backend: str, seeds: Sequence[int]) -> dict[str, Tally]:
    """Attacks a backend with these draws; the tallies are by dtype."""
    one, tallies = BACKENDS[backend], collections.defaultdict(Tally)
    for number, seed in enumerate(seeds):
        attack = random_attack(seed, one)
        found = losses(attack, one)
        tallies[attack.dtype].add(
            attack, found, 0.0 if one.gradient is None else untrue(attack, found, one.gradient(attack))
        )
        if len(seeds) == 1:
            print(f"{attack}\n{dataclasses.asdict(tallies[attack.dtype])}")
        elif number % 1000 == 999:
            print(f"{number + 1} draws, broken: {[x for tally in tallies.values() for x in tally.broken][:20]}")
    return dict(sorted(tallies.items()))


def main(arguments: list[str]) -> int:
    """Runs the attacks, prints what was lost by dtype, and saves a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--backend", choices=BACKENDS, default="native")
    parser.add_argument("--out", type=Path, help="folder for a record")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if asked.backend == "fused":
        import quick_interpreter

        quick_interpreter.prepare()
    started = datetime.datetime.now(datetime.UTC)
    tallies = run(asked.backend, range(asked.first, asked.first + asked.draws))
    for dtype, tally in tallies.items():
        worst = ", ".join(f"{name} {share:.3g}" for name, share in sorted(tally.worst.items()))
        print(
            f"{asked.backend} {dtype}: {dict(tally.numbers)}, {len(tally.broken)} broken {tally.broken[:10]}; worst {worst}"
        )
    if asked.out is not None:
        metrics = {f"{dtype}: {name}": x for dtype, tally in tallies.items() for name, x in tally.worst.items()}
        counts = {f"{dtype}: {name}": x for dtype, tally in tallies.items() for name, x in tally.numbers.items()}
        broken = sum(len(tally.broken) for tally in tallies.values())
        record = records.make(
            "certificate",
            f"keys/{asked.backend}",
            config={"draws": asked.draws, "first_seed": asked.first},
            metrics={"broken": broken} | counts | metrics,
            started=started,
        )
        print(records.save(record, asked.out))
    return 1 if any(tally.broken for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
