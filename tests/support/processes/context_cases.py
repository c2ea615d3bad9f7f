"""Calls of context-parallel attention: sequences split into the shards of 1 to 4 ranks, and one process's results."""

import dataclasses
import math

import torch

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.distributed import Halo, plan_halo

SLOPES = (2.0, 1.0, 0.45, 0.4)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; `lengths` has the rows of every rank."""

    lengths: tuple[int, ...]
    kv_heads: int = 4
    options: dict = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    slopes: object = SLOPES
    mask: bool = False
    segments: bool = False
    bias: str = ""
    gates: bool = False
    cut: int = 0  # the position of a gate of −inf
    outlier: bool = False
    batch: int = 2
    dim: int = 8

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def drawn(self) -> dict[str, torch.Tensor]:
        """All tensors of the whole sequence, including the incoming gradients of output and lse."""
        generator = torch.Generator().manual_seed(7)
        heads, n, b = 4, self.total, self.batch

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        found = {"query": normal(b, heads, n, self.dim)}
        found |= {name: normal(b, self.kv_heads, n, self.dim) for name in ("key", "value")}
        if self.outlier:
            found["key"][:, :, 3] *= 10
        found = {name: x.to(self.dtype) for name, x in found.items()}
        if self.mask:
            seen = torch.ones(b, n, dtype=torch.bool)
            seen[0, n - n // 3 :] = False
            seen[1, n // 4 : n // 3] = False
            found["key_mask"] = seen
            found["key"][0, :, -1] = math.nan  # hidden entries are never used
            found["value"][1, :, n // 4] = math.inf
        if self.segments:
            found["segment_ids"] = torch.stack([torch.arange(n) // 70, torch.arange(n) // 111])
        if self.bias:
            shape = {"all": (b, heads, n), "row": (n,)}[self.bias]
            found["key_bias"] = normal(*shape)
            if self.bias == "all":
                found["key_bias"][1, 2, 5:9] = -math.inf
        if self.gates:
            found["log_fgate"] = torch.nn.functional.logsigmoid(normal(b, self.kv_heads, n) + 1.0)
        if self.cut:
            found["log_fgate"][:, :, self.cut] = -math.inf
            found["log_fgate"][0, 0, self.cut + 40] = -math.inf
        wide = torch.promote_types(self.dtype, torch.float32)
        found["grad"] = normal(b, heads, n, self.dim).to(self.dtype)
        found["grad_lse"] = normal(b, heads, n).to(wide)
        found["slopes"] = torch.tensor(self.slopes, dtype=wide)
        return found


CASES = {
    "two ranks": Case((200, 200), kv_heads=2),
    "one rank": Case((90,), kv_heads=2),
    "three, uneven": Case((150, 130, 57)),
    "four, one short, one empty": Case((150, 20, 0, 130), kv_heads=2),
    "first and last empty": Case((0, 120, 90, 0)),
    "symmetric": Case((100, 15, 120, 65), options={"causal": False}),
    "right slopes": Case((120, 100), options={"causal": False, "right_slopes": (0.5, math.inf, 1.0, 2.0)}),
    "window": Case((110, 8, 100), options={"window": 30}),
    "window, symmetric": Case((110, 8, 100), options={"window": 5, "causal": False}),
    "outlier keys on rank 0": Case((150, 90, 160, 100), kv_heads=2, outlier=True),
    "outlier keys, symmetric": Case((150, 90, 160, 100), outlier=True, options={"causal": False}),
    "outlier keys and padding": Case((150, 90, 160, 100), outlier=True, mask=True),
    "padding": Case((100, 80, 60, 90), mask=True),
    "padding, symmetric": Case((100, 80, 60, 90), mask=True, kv_heads=2, options={"causal": False}),
    "segments": Case((100, 90, 110), segments=True),
    "segments, padding": Case((100, 0, 90, 110), segments=True, mask=True, kv_heads=1),
    "bias": Case((120, 90, 100), bias="all", kv_heads=2),
    "bias of a row, symmetric": Case((120, 90, 100), bias="row", options={"causal": False}),
    "gates": Case((100, 80, 0, 90), gates=True, slopes=(0.0,) * 4),
    "gates, bias, slopes, padding": Case((100, 80, 20, 90), gates=True, bias="all", mask=True, kv_heads=2),
    "gates, a cut before padding": Case((50, 6, 50, 80), gates=True, mask=True, cut=46, kv_heads=2),
    "gates, segments": Case((100, 80, 90), gates=True, segments=True, slopes=(0.0,) * 4),
    "score bound": Case((120, 30, 100), kv_heads=2, options={"score_bound": 14.0}),
    "slopes of sequences": Case((120, 100), slopes=(SLOPES, (1.0, 2.0, 0.5, 0.6))),
    "flat and rising slopes": Case((60, 50, 40), slopes=(0.0, -0.01, 1.0, 2.0)),
    "no tolerance": Case((60, 50, 40), options={"tolerance": 0.0}),
    "a wide tolerance": Case((150, 130, 120), slopes=(1.0, 0.5, 0.25, 0.2), options={"tolerance": 1e-3}),
    "dropout": Case((150, 130, 57), kv_heads=2, options={"dropout_p": 0.3}),
    "dropout, padding, outliers, empty": Case((150, 90, 0, 160), mask=True, outlier=True, options={"dropout_p": 0.5}),
    "dropout, heads apart": Case((100, 90, 110), slopes=(2.0, 0.3, 1.5, 0.2), options={"dropout_p": 0.2}),
    "dropout, gates, symmetric segments": Case(
        (100, 80, 20, 90), gates=True, segments=True, options={"dropout_p": 0.3}
    ),
    "float32": Case((300, 320), dtype=torch.float32, dim=16),
    "bfloat16": Case((120, 60, 90), dtype=torch.bfloat16, kv_heads=2),
}


CALL = torch.zeros(1, 4, 10, 8)  # query, key and value


def _all(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("query", "key", "value"), x)


_BOUND, _IDS = {"score_bound": 3.0}, {"segment_ids": torch.zeros(1, 10).long()}
# What ranks 0 and 2 pass, what rank 1 passes, and what every rank reports, or rank 1.
DISAGREEMENTS: dict[str, tuple[dict, dict, str]] = {
    "dtype": ({}, _all(CALL.double()), "dtype = float64 but rank 0 with dtype = float32"),
    "batch": ({}, _all(CALL.expand(2, -1, -1, -1)), "batch = 2 but rank 0 with batch = 1"),
    "num_heads": ({}, _all(CALL[:, :2]) | {"slopes": [1.0, 2.0]}, "num_heads = 2"),
    "num_kv_heads": ({}, _all(CALL[:, :2]) | {"query": CALL}, "num_kv_heads = 2"),
    "head_dim": ({}, _all(CALL[..., :4]), "head_dim = 4"),
    "causal": ({}, {"causal": False}, "causal = False but rank 0 with causal = True"),
    "window": ({}, {"window": 5}, "window = 5 but rank 0 with window = None"),
    "scale": ({}, {"scale": 0.5}, "scale = 0.5"),
    "tolerance": ({}, {"tolerance": 0.1}, "tolerance = 0.1"),
    "slopes": ({}, {"slopes": [0.5, 0.25, 0.2, 0.1]}, "slopes = other numbers"),
    "dropout_p": ({}, {"dropout_p": 0.5}, "dropout_p = 0.5 but rank 0 with dropout_p = 0.0"),
    "segment_ids": ({}, _IDS, "segment_ids = given but rank 0 with segment_ids = None"),
    "key_bias": ({}, {"key_bias": torch.zeros(10)}, "the dtype of key_bias = float32"),
    "score_bound": ({}, _BOUND, "score_bound = 3.0 but rank 0 with score_bound = None"),
    "masked": (_BOUND, {"key_mask": torch.ones(1, 10).bool()}, "score_bound = None"),
    "gradient": ({}, {"key": CALL.clone().requires_grad_()}, "whether key or value needs a gradient = True"),
}
INVALID: dict[str, tuple[dict, dict, str]] = {
    "refused": ({}, {"key_mask": torch.ones(1, 11).bool()}, "key_mask has shape"),
    "rows": ({}, {"query": CALL[:, :, :5]}, "5 rows and key 10"),
    "backend": ({}, {"backend": "fastest"}, "'fastest' but must be"),
}


def shard(case: Case, rank: int, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of one rank; slopes and their gradients are shared by all ranks."""
    start = sum(case.lengths[:rank])
    stop = start + case.lengths[rank]
    rows = {"query": 2, "key": 2, "value": 2, "grad": 2}
    return {
        name: x if name == "slopes" else x[:, :, start:stop] if name in rows else x[..., start:stop]
        for name, x in drawn.items()
    }


def answer(attention, gated, tensors: dict[str, torch.Tensor], seed=0, **options) -> dict[str, torch.Tensor]:
    """Output, lse and the gradients of all tensors that have one. `seed` seeds torch's generator."""
    torch.manual_seed(seed)
    given = {name: x.clone() for name, x in tensors.items() if name not in ("grad", "grad_lse")}
    leaves = {name: x.requires_grad_() for name, x in given.items() if x.is_floating_point()}
    masks = {name: given[name] for name in ("key_mask", "segment_ids", "key_bias") if name in given}
    args = [given["query"], given["key"], given["value"]]
    if "log_fgate" in given:
        output, lse = gated(*args, given["log_fgate"], given["slopes"], return_lse=True, **masks, **options)
    else:
        output, lse = attention(*args, given["slopes"], return_lse=True, **masks, **options)
    back = tensors["grad"], tensors["grad_lse"].to(lse.dtype).masked_fill(lse.isinf(), 0.0)
    found = torch.autograd.grad([output, lse], list(leaves.values()), back, allow_unused=True)
    gradients = {f"d{n}": torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, found, strict=True)}
    return {"output": output.detach(), "lse": lse.detach(), **gradients}


def planned(case: Case, drawn: dict[str, torch.Tensor] | None = None, **options) -> Halo:
    """The halo of the whole sequence."""
    drawn = case.drawn() if drawn is None else drawn
    return plan_halo(drawn["query"], drawn["key"], drawn["value"], drawn["slopes"], lengths=case.lengths, **options)


def truth(case: Case) -> dict[str, torch.Tensor]:
    """The results of one process in fp64, with nothing skipped."""
    drawn = {name: x.double() if x.is_floating_point() else x for name, x in case.drawn().items()}
    options = {name: x for name, x in case.options.items() if name != "score_bound"} | {"tolerance": 0.0}
    return answer(alibi_attention, forgetting_attention, drawn, backend="dense", **options)


def joined(case: Case, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Joins the ranks' results: concatenates rows and sums gradients of slopes."""
    found = {}
    for name in parts[0]:
        of_ranks = [part[name].double() for part in parts]
        per_row = 2 if name in ("output", "dquery", "dkey", "dvalue") else -1
        found[name] = sum(of_ranks) if name == "dslopes" else torch.cat(of_ranks, per_row)
    return found
