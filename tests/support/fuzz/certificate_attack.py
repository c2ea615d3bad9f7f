"""Attacks the certificate with inputs chosen to break the bound, and measures the dropped mass in float64.

python tests/support/fuzz/certificate_attack.py 100000 results            # many draws, saved as a record
python tests/support/fuzz/certificate_attack.py 100000 results native     # the CPU kernels, with some longer inputs
python tests/support/fuzz/certificate_attack.py 100000 results native biased   # and with a bias for every key
python tests/support/fuzz/certificate_attack.py 100000 results native parts   # prefixes, positions, windows per head, sinks
python tests/support/fuzz/certificate_attack.py 100000 results native bf16   # in bf16, which some processors multiply natively
"""

import dataclasses
import datetime
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from alibi_attn.attention.backends.banded import pieces as banded_pieces
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.native.visited import Visited
from alibi_attn.attention.call.options import DEFAULTS
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible
from alibi_attn.attention.certificate import biased
from alibi_attn.attention.certificate.bounds import Bounds, bounds
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.tiles import key_tiles
from alibi_attn.attention.run.merging import parts
from alibi_attn.attention.run.splitting import SPLITS
from alibi_lab import records

WHERE = (
    "nothing",
    "far key",
    "sink",
    "near key",
    "every 50th",
    "equal keys",
    "zero queries",
    "aligned",
    "opposed",
    "far value",
)
BIASES = (
    "noise",
    "gates",
    "steep gates",
    "shut gates",
    "rising",
    "spikes",
    "hidden",
    "wide",
    "constant",
    "of segments",
)
MASKS = (
    "none",
    "window",
    "random mask",
    "left padding",
    "segments",
    "segments and mask",
    "offset after",
    "offset before",
)
PARTS = ("prefix", "positions", "far positions", "windows", "sinks", "prefix and sinks", "positions and sinks")


@dataclasses.dataclass(frozen=True)
class Attack:
    """One adversarial call; `log_*` are powers of ten. Each field's default is its simplest value."""

    seed: int = 0
    length: int = 1
    head_dim: int = 1
    slope: float = 0.0
    tolerance: float = 1e-3
    where: str = "nothing"  # one of WHERE
    mask: str = "none"  # one of MASKS
    causal: bool = True
    group: int = 1
    log_query: float = 0.0
    log_key: float = 0.0
    log_giant: float = 0.0
    dtype: str = "float32"
    refine: bool = False  # the refinement that long inputs use
    bias: str | None = None  # one of BIASES
    part: str | None = None  # one of PARTS

    def inputs(self) -> tuple[list[torch.Tensor], dict]:
        rng = np.random.default_rng(self.seed)
        n, d = self.length, self.head_dim
        queries = n if "offset" not in self.mask else max(1, n // 2)
        q = rng.standard_normal((1, self.group, queries, d)) * 10.0**self.log_query
        k = rng.standard_normal((1, 1, n, d)) * 10.0**self.log_key
        v = rng.standard_normal((1, 1, n, d))
        giant = 10.0**self.log_giant
        place = int(rng.integers(0, n))
        if self.where == "far key":
            k[:, :, place] *= giant
        elif self.where == "sink":
            k[:, :, 0] *= giant
        elif self.where == "near key":
            k[:, :, -1 - place % 40] *= giant
        elif self.where == "every 50th":
            k[:, :, ::50] *= giant
        elif self.where == "equal keys":
            k[:] = k[:, :, :1]
        elif self.where == "zero queries":
            q[rng.random(q.shape) < 0.7] = 0.0
        elif self.where in ("aligned", "opposed"):  # one-hot queries on a far key, the others orthogonal or opposite
            q[:], k[:] = 0.0, 0.0
            q[..., 0] = 10.0**self.log_query
            k[..., 0] = -(10.0**self.log_key) if self.where == "opposed" else 0.0
            k[:, :, place, 0] = 10.0**self.log_key * giant
        elif self.where == "far value":
            v[:, :, place] *= giant
        slopes = [self.slope * 2.0**-h for h in range(self.group)]
        kwargs = {**DEFAULTS, "causal": self.causal, "tolerance": self.tolerance}
        if not self.causal and rng.random() < 0.5:
            kwargs["right_slopes"] = [self.slope * 2.0 ** rng.uniform(-3, 3) for _ in slopes]
        if self.mask == "window":
            kwargs["window"] = int(rng.integers(1, n + 1))
        if "mask" in self.mask:
            kwargs["key_mask"] = torch.tensor(rng.random((1, n)) < rng.uniform(0.05, 0.9))
        if self.mask == "left padding":
            kwargs["key_mask"] = torch.arange(n)[None] >= place
        if "segments" in self.mask:
            kwargs["segment_ids"] = torch.tensor(
                rng.integers(0, 3, (1, n)) if place % 2 else np.sort(rng.integers(0, 4, (1, n)))
            )
        if "offset" in self.mask and "segments" not in self.mask:
            kwargs["query_offset"] = n - queries // 2 + place if self.mask == "offset after" else -place
        if self.bias is not None:
            kwargs["key_bias"] = torch.tensor(
                self._key_bias(np.random.default_rng([self.seed, 1]), kwargs["segment_ids"])
            )
        if self.part is not None:
            kwargs.update(self._parts(np.random.default_rng([self.seed, 2]), kwargs))
        dtype = getattr(torch, self.dtype)
        most = 6e4 if self.dtype == "float16" else 1e37
        tensors = [torch.tensor(np.clip(x, -most, most)).to(dtype) for x in (q, k, v)]
        return [*tensors, torch.tensor(slopes, dtype=torch.float32)], kwargs

    def _parts(self, rng: np.random.Generator, kwargs: dict) -> dict:
        """Keyword arguments that split the call, in place of those that they exclude."""
        n, added = self.length, {}
        if "prefix" in self.part:
            added |= {"prefix_len": torch.tensor([int(rng.integers(0, n + 1))]), "causal": True, "right_slopes": None}
        if "positions" in self.part:
            steps = rng.exponential(1.0, (1, n)) * (rng.random((1, n)) < rng.uniform(0.2, 1)) ** 2
            steps *= np.where(rng.random((1, n)) < 0.05, 10.0 ** rng.uniform(0, 5), 1.0)
            start = 1e9 if self.part == "far positions" else 0.0
            added |= {"positions": torch.tensor(start + np.cumsum(steps, -1)), "query_offset": None}
        if "windows" in self.part:
            added["window"] = [int(x) for x in rng.integers(1, n + 1, self.group)]
        if "sinks" in self.part:
            added |= {"sinks": int(rng.integers(1, 40)), "window": kwargs["window"] or int(rng.integers(1, n + 1))}
        return added

    def _key_bias(self, rng: np.random.Generator, segment_ids: torch.Tensor | None) -> np.ndarray:
        """[1, H, S] float64: gates from ln f = −60 to f = 1, spikes of +80, hidden keys (−inf), and |b| up to 10⁶."""
        shape = (1, self.group, self.length)
        noise = rng.standard_normal(shape) * 10.0 ** rng.uniform(-1, 1.5)
        if "gates" in self.bias:
            gates = -np.log1p(np.exp(-rng.normal(rng.uniform(-2, 6), 1, shape)))
            if self.bias == "steep gates":
                gates *= 60 * rng.random()
            if self.bias == "shut gates":
                gates = np.where(rng.random(shape) < 0.05, -60.0, 0.0)
            return -np.cumsum(gates, -1)
        if self.bias == "rising":  # every key weighs less than the previous one
            return -np.cumsum(np.abs(noise), -1)
        if self.bias == "spikes":
            return noise + 80.0 * (rng.random(shape) < 4 / self.length)
        if self.bias == "hidden":
            return np.where(rng.random(shape) < rng.uniform(0.05, 0.95), -np.inf, noise)
        if self.bias == "wide":
            return noise + 1e6 * rng.choice([-1.0, 1.0]) + rng.choice([0.0, 1e6]) * (rng.random(shape) < 0.02)
        if self.bias == "of segments" and segment_ids is not None:
            return noise + rng.choice([300.0, 1e6]) * (segment_ids.numpy()[:, None] == 1)
        return np.full(shape, rng.normal() * 1e6)


def dropped(attack: Attack, certify: Callable[..., Bounds | torch.Tensor] | None = None) -> tuple[float, float]:
    """Returns (largest share of softmax mass dropped in any query, share of visible keys skipped).

    `certify` returns bounds, or the kept keys [1, H, T, S]; it defaults to `bounds`.
    """
    (query, key, value, slopes), kwargs = attack.inputs()
    spec = make_spec(query, key, value, slopes, **kwargs)
    # The key rule, which is stricter, is for gradients: `test_key_rule.py`.
    certified = functools.partial(bounds, refine=attack.refine, for_gradients=False)
    found = (certify or certified)(spec, query, key, value)
    read = certified_keys(spec, found, distances_of(spec)) if isinstance(found, Bounds) else found
    return lost_shares(spec, query, key, seen_keys(spec), read)


def distances_of(spec) -> torch.Tensor:
    """[1, T, S]: i − j."""
    return distances(spec.query_len, spec.key_len, spec.query_offset, None)


def seen_keys(spec) -> torch.Tensor:
    """[1, H, T, S]: the keys that the masks let each query see."""
    return visible(spec, distances_of(spec)).expand(1, spec.num_heads, -1, -1)


def lost_shares(
    spec, query: torch.Tensor, key: torch.Tensor, seen: torch.Tensor, read: torch.Tensor
) -> tuple[float, float]:
    """(The largest share of softmax mass that a query has on keys that it sees and does not read, the share of these keys)."""
    skipped, lost = seen & ~read, torch.zeros(spec.num_heads, dtype=torch.float64)
    for h in range(spec.num_heads):
        some = skipped[0, h].any(-1)  # other queries lose nothing
        if some.any():
            position = None if spec.positions is None else spec.query_positions[0, some]
            keys = distances_of(spec)[0, some], seen[0, h, some]
            shares = shares_of(spec, h, (query[0, h, some], key[0, h // spec.group]), keys, position)
            lost[h] = (shares * skipped[0, h, some]).sum(-1).max()
    return float(lost.max()), float(skipped.sum() / seen.sum().clamp(min=1))


def shares_of(
    spec,
    h: int,
    pair: tuple[torch.Tensor, ...],
    keys: tuple[torch.Tensor, ...],
    query_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, S] float64: the softmax of head h over the keys that are seen; `pair`: query, key; `keys`: i − j, seen."""
    distance, seen = keys
    scores = spec.scale * (pair[0].double() @ pair[1].double().mT)
    slopes = spec.slopes[h].double()
    if spec.right_slopes is not None:
        slopes = torch.where(distance < 0, spec.right_slopes[h].double(), slopes)
    if query_positions is not None:
        distance = query_positions[:, None] - spec.positions[0]
    scores -= slopes * distance.abs()
    if spec.key_bias is not None:
        scores += spec.key_bias[0, h] - spec.key_bias[0, h].amax().clamp(min=-1e300)
    scores.masked_fill_(~seen, -math.inf)
    weight = scores.sub_(scores.amax(-1, keepdim=True).clamp(min=-1e300)).exp_()
    return weight.div_(weight.sum(-1, keepdim=True).clamp(min=1e-300))


def certified_keys(spec, found: Bounds, distance: torch.Tensor) -> torch.Tensor:
    """[1, H, T, S]: the keys that must be read, within the reach of the query's block or in an outlier tile."""
    block = torch.arange(spec.query_len) // TILE
    left, right = found.left[:, :, block, None], found.right[:, :, block, None]
    right = 1 if spec.causal else right
    tile = torch.arange(spec.key_len) // TILE
    outlier = (found.outlier_tiles[..., None] == tile).any(2)
    return ((distance[:, None] < left) & (-distance[:, None] < right)) | outlier[:, :, None]


def keys_in_tiles(spec, tiles) -> torch.Tensor:
    """[B, H, T, S]: the keys in the tiles that each block of queries visits."""
    tile = torch.arange(-(-spec.key_len // TILE))
    inside = (tile >= tiles.bands[..., :1]) & (tile < tiles.bands[..., 1:2])
    return spread(spec, inside | (tiles.beside[..., None] == tile).any(-2), tiles.rows)


def keys_of_tiles(spec, *tensors: torch.Tensor, for_gradients: bool = False) -> torch.Tensor:
    """[B, H, T, S]: the keys in the tiles that each query's block visits by the certificate of biased keys."""
    found = biased.biased_bounds(spec, *tensors, for_gradients=for_gradients)
    return keys_in_tiles(spec, key_tiles(spec, found, rows=TILE))


def spread(spec, of_tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """[B, H, T, S] of blocks of this many queries and tiles of keys."""
    of_rows = of_tiles.repeat_interleave(rows, 2)[:, :, : spec.query_len]
    return of_rows.repeat_interleave(TILE, 3)[..., : spec.key_len]


def native_keys(spec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, H, T, S]: the keys that the CPU kernels visited for each query, without those that only gradients need."""
    with torch.no_grad():
        return keys_of(native.visited(spec, query, key, value, for_backward=False), spec)


def keys_of(visited: Visited, spec) -> torch.Tensor:
    """[B, H, T, S]: the keys that were visited for each query."""
    low, high = (torch.from_numpy(x)[..., None] for x in visited.intervals)
    at = torch.arange(spec.key_len)
    of_blocks = ((at >= low) & (at < high)).any(-2)  # [B, H, N, S]
    return of_blocks.repeat_interleave(TILE, 2)[:, :, : spec.query_len]


def native_keys_of_parts(spec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, H, T, S]: the keys that the CPU kernels visited for each query of a call that `merging.py` splits."""
    numbers = torch.arange(spec.key_len, dtype=torch.float64)[:, None].expand(key.shape)
    return _keys_of_parts(spec, query, key, value, numbers, spec.key_len)


def _keys_of_parts(spec, query, key, value, numbers: torch.Tensor, key_len: int) -> torch.Tensor:
    """`numbers` holds the number of each key in the whole call, in place of its value."""
    kept = torch.zeros(spec.batch, spec.num_heads, spec.query_len, key_len, dtype=torch.bool)
    if spec.key_len == 0 or spec.query_len == 0:
        return kept
    if not spec.used() & SPLITS.keys():
        kept[..., numbers[0, 0, :, 0].long()] = native_keys(spec, query, key, value)
        return kept
    for part, of in zip(parts(spec, query, key, value), parts(spec, query, key, numbers), strict=True):
        found = _keys_of_parts(*part[:4], of.value, key_len)
        heads = slice(None) if part.heads is None else list(part.heads)
        kept[:, heads, : found.shape[2]] |= found.flip(2) if part.is_reversed else found
    return kept


def read_keys(spec, pieces: list[list[list[banded_pieces.Piece]]]) -> torch.Tensor:
    """[B, H, T, S] int: how many pieces read each pair (a "diagonal" reads up to the query)."""
    count = torch.zeros(spec.batch, spec.num_heads, spec.query_len, spec.key_len, dtype=torch.int64)
    for b, heads in enumerate(pieces):
        for h, of_head in enumerate(heads):
            for piece in of_head:
                for block in range(piece.count):
                    query, key = piece.query + block * piece.stride, piece.key + block * piece.step
                    rows, keys = slice(query, query + piece.rows), slice(key, key + piece.keys)
                    square = torch.ones(piece.rows, piece.keys, dtype=torch.int64)
                    count[b, h, rows, keys] += square.tril() if piece.kind == "diagonal" else square
    return count


def random_attack(seed: int, *, biased: bool = False, bf16: bool = False, parts: bool = False) -> Attack:
    rng = np.random.default_rng(seed)
    pick = lambda options: options[int(rng.integers(len(options)))]  # noqa: E731
    wild = rng.random() < 0.3
    spread = (-25, 25) if wild else (-1.5, 1.0)
    drawn = Attack(
        seed=seed,
        length=int(rng.integers(1, 400)),
        head_dim=int(rng.integers(1, 9)),
        slope=float(2.0 ** rng.uniform(-16 if wild else -4, 2)),
        tolerance=float(10.0 ** rng.uniform(-12, -1)),
        where=pick(WHERE),
        mask=pick(MASKS),
        causal=bool(rng.random() < 0.6),
        group=int(rng.integers(1, 4)),
        log_query=float(rng.uniform(*spread)),
        log_key=float(rng.uniform(*spread)),
        log_giant=float(rng.uniform(0, 25 if wild else 3)),
        dtype=pick(("float32", "float32", "float64", "bfloat16")),
        refine=seed % 2 == 1,
        bias=pick(BIASES) if biased else None,
    )
    if drawn.bias == "of segments" and "segments" not in drawn.mask:
        drawn = dataclasses.replace(drawn, mask="segments")
    if parts:
        drawn = dataclasses.replace(drawn, part=pick(PARTS))
    if bf16:  # half of them with longer dot products
        drawn = dataclasses.replace(drawn, dtype="bfloat16", head_dim=drawn.head_dim * (1 if seed % 2 else 16))
    return drawn


KINDS = "biased", "bf16", "parts"


def main(draws: int, out: Path, backend: str = "", *kinds: str) -> None:
    """Runs the attacks of `draws` seeds and saves a record."""
    if not set(kinds) <= set(KINDS):
        raise SystemExit(f"the kinds are {' '.join(kinds)} but must be of {', '.join(KINDS)}")
    torch.set_num_threads(1)
    started, found = datetime.datetime.now(datetime.UTC), []
    for seed in range(draws):
        attack = random_attack(seed, **dict.fromkeys(kinds, True))
        if backend and seed % 20 == 0:  # several different blocks of queries, and keys far beyond the reach
            attack = dataclasses.replace(attack, length=attack.length * 6)
        certify = native_keys_of_parts if attack.part else native_keys
        lost, share = dropped(attack, certify if backend else None)
        found.append((lost / attack.tolerance, share))
        if seed % 5000 == 4999:
            print(f"{seed + 1} draws, the worst drops {max(found)[0]:.3g} of the tolerance", flush=True)
    metrics = {
        "broken": sum(not lost <= 1 for lost, _ in found),
        "draws_that_skip": sum(share > 0 for _, share in found),
        "worst_share_of_tolerance": max(found)[0],
        "mean_skipped_share": sum(share for _, share in found) / draws,
    }
    name, config = "/".join(filter(None, ("attack", backend, *kinds))), {"draws": draws, "first_seed": 0}
    print(
        metrics, records.save(records.make("certificate", name, config=config, metrics=metrics, started=started), out)
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
