"""`alibi bench gates`: attention with forget gates on this machine's processor, and how many scores it takes to be sure.

Queries and keys are normalized noise, as QK-norm makes them, so that no score is beyond U; gates are sigmoid(N(logit, 1)).
Beside the times stand the scores that are computed, and those inside of the boundary of Adaptive Computation Pruning (Lin et al.
2025, arXiv:2504.06949) at equal ε, counted in the same blocks by the same counter.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn import records
from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.native.visited import Visited
from alibi_attn.attention.certificate.constants import OUTLIER_TILES, TILE
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.attention.validation import make_spec
from alibi_attn.bench.by_kind import records_by_kind
from alibi_attn.bench.columns import Columns
from alibi_attn.bench.timing import medians_ms
from alibi_attn.slopes import alibi_slopes

LENGTHS = (2048, 4096, 8192, 16384, 32768)
LOGITS, BOUNDS = (2.0, 4.0, 6.0), (8.0, 16.0)  # of gates; U, the largest score
HEADS, HEAD_DIM = 8, 64
PRUNED_AT = math.exp(-10)  # the ε of the authors' code
LONGEST_DENSE = 4096
ROWS = 64  # the last queries, by which a peer is checked
_ALLOWED = 2e-5  # of max‖v‖: fp32 attention by hand is off by 2e-6 at these lengths


PEERS: dict[str, records.Json] = {
    "ours": "forgetting_attention",
    "causal, no bias": "SDPA is_causal=True; no gates at all",
    "SDPA + dense bias": f"attn_mask = c_i − c_j, built once; up to {LONGEST_DENSE} tokens",
    "ours, fixed slopes": "alibi_attention with the published slopes, for the time that a score takes",
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What is attended.

    Args:
        query, key, value, grad: [B, H, n, D]; the last is the gradient of the output.
        log_fgate: ln f, [B, H, n].
        slopes: [H], beside the gates; None = none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    log_fgate: Tensor
    slopes: Tensor | None = None

    def first(self, length: int) -> "Inputs":
        """The first `length` tokens, which is what a causal model computes for them alone."""
        whole = self.query, self.key, self.value, self.grad, self.log_fgate
        query, key, value, grad, log_fgate = (x[:, :, :length].contiguous() for x in whole)
        return Inputs(query, key, value, grad, log_fgate, self.slopes)

    @property
    def decay(self) -> Tensor:
        """[B, H, n] what a token takes from all scores across it: ln f, less the slope."""
        return self.log_fgate if self.slopes is None else self.log_fgate - self.slopes[:, None]

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Ours."""
        return forgetting_attention(query, key, value, self.log_fgate, self.slopes)


@dataclasses.dataclass(frozen=True)
class Gated:
    """One kind of noise: "logit-4-U-8"."""

    logit: float
    bound: float

    @property
    def name(self) -> str:
        return f"logit-{self.logit:g}-U-{self.bound:g}"

    def draw(self, length: int) -> Inputs:
        """One sequence of HEADS heads."""
        rng = torch.Generator().manual_seed(0)
        query, key, value, grad = (torch.randn(1, HEADS, length, HEAD_DIM, generator=rng) for _ in range(4))
        size = (self.bound * HEAD_DIM**0.5) ** 0.5  # of queries and keys: then scores are at most U
        query, key = (functional.normalize(x, dim=-1) * size for x in (query, key))
        log_fgate = functional.logsigmoid(torch.randn(1, HEADS, length, generator=rng) + self.logit)
        return Inputs(query, key, value, grad, log_fgate)


def gates(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    logits: Sequence[float] = LOGITS,
    bounds: Sequence[float] = BOUNDS,
    repeats: int = 5,
    budget_s: float = 10.0,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Measure and keep one record for every pair of a gate's logit and a bound of scores; returns their paths.

    Raises:
        RuntimeError: a peer is wrong.
    """
    kinds = {kind.name: kind for logit in logits for bound in bounds for kind in [Gated(float(logit), float(bound))]}
    configs = {
        name: {"gate_logit": kind.logit, "score_bound": kind.bound, **asked(HEADS, HEAD_DIM, lengths)}
        for name, kind in kinds.items()
    }
    return records_by_kind(
        out, "gates", configs, lengths=lengths, summary=summary, train_step=None, say=say,
        measure=lambda name, n: measured(name, kinds[name].draw(n), repeats=repeats, budget_s=budget_s, say=say),
    )  # fmt: skip


def asked(heads: int, head_dim: int, lengths: Sequence[int]) -> dict[str, records.Json]:
    """What the config of every such record says."""
    return {
        "heads": heads, "head_dim": head_dim, "dtype": "float32", "lengths": list(lengths),
        "threads": torch.get_num_threads(), "pruned_at": PRUNED_AT, "peers": PEERS,
    }  # fmt: skip


def pruned_scores(decay: Tensor, query: Tensor, key: Tensor, tolerance: float) -> int:
    """The scores in blocks of TILE inside of ACP's boundary, summed over sequences and heads; T = S.

    Its rule: with U = max‖q‖·max‖k‖·scale of a head and δ = −(2U + ln n) + ln ε, a tile of keys is left out for a block of
    queries if c of the first query less c of the last key of the tile is below δ; c is the running sum of `decay` [B, H, n].
    """
    batch, heads, length = decay.shape
    kept = decay.double().cumsum(-1).numpy()
    largest = [x.double().norm(dim=-1).amax(-1).numpy() for x in (query, key)]
    delta = -(2 * largest[0] * largest[1] * query.shape[-1] ** -0.5 + math.log(length)) + math.log(tolerance)
    starts = np.arange(0, length, TILE)
    ends = np.minimum(starts + TILE, length)
    seen = np.zeros((batch, heads, len(starts), 4), np.int32)
    for at in np.ndindex(batch, heads):
        c = kept[at]
        # c falls, so tiles are left out from the first on.
        bound = c[starts] - delta[at]
        low = np.searchsorted(-c[ends - 1], -bound, side="left") * TILE
        seen[at] = np.stack([np.minimum(low, starts), ends, np.zeros_like(ends), ends], -1)
    nothing = np.zeros(seen.shape[:3], np.int32), np.full((batch, heads, OUTLIER_TILES), -1, np.int32)
    spec = make_spec(query, key, key)
    return int(Visited(seen, *nothing, np.zeros(batch, np.int64), length).reach_and_scores(spec)[1].sum())


def computed_scores(inputs: Inputs, tolerance: float | None = None) -> int:
    """The scores that the kernels compute, in blocks of TILE, summed over sequences and heads."""
    query, key, value = inputs.query, inputs.key, inputs.value
    slopes = [0.0] * query.shape[1] if inputs.slopes is None else inputs.slopes
    bias = -inputs.log_fgate.double().cumsum(-1)
    spec = make_spec(query, key, value, slopes, key_bias=bias, tolerance=tolerance)
    return int(native.visits(spec, query, key, value)[1].sum())


def measured(
    name: str, inputs: Inputs, *, repeats: int, budget_s: float, say: Callable[[str], None]
) -> dict[str, dict[str, records.Json]]:
    """A row for every peer at one length, and the scores.

    Raises:
        RuntimeError: a peer is wrong.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, length, _ = query.shape
    with torch.no_grad():
        ours = computed_scores(inputs)
        fixed = make_spec(query, key, value)
        of_slopes = int(native.visits(fixed, query, key, value)[1].sum())
        scores: dict[str, records.Json] = {
            "length": length, "visible": batch * heads * length * (length + 1) // 2,
            "ours": ours, "acp": pruned_scores(inputs.decay, query, key, fixed.tolerance), "tolerance": fixed.tolerance,
            "ours_at_acps": computed_scores(inputs, PRUNED_AT),
            "acp_at_acps": pruned_scores(inputs.decay, query, key, PRUNED_AT), "fixed_slopes": of_slopes,
        }  # fmt: skip
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float32)
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "ours": inputs.attention,
        "causal, no bias": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "ours, fixed slopes": lambda q, k, v: alibi_attention(q, k, v, slopes),
    }
    if length <= LONGEST_DENSE:
        mask = _dense_bias(inputs.decay)
        calls["SDPA + dense bias"] = lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    errors: dict[str, float] = {
        peer: _error(peer, calls[peer], inputs) for peer in ("ours", "SDPA + dense bias") if peer in calls
    }
    forward = medians_ms(
        {n: lambda call=call: _without_grad(call, query, key, value) for n, call in calls.items()},  # type: ignore[misc]
        repeats=repeats, budget_s=budget_s,
    )  # fmt: skip
    steps = {}
    for peer, call in calls.items():
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        output = call(*leaves)
        steps[peer] = lambda output=output, leaves=leaves: torch.autograd.grad(
            output, leaves, inputs.grad, retain_graph=True
        )
    backward = medians_ms(steps, repeats=repeats, budget_s=budget_s)
    rows: dict[str, dict[str, records.Json]] = {
        peer: {
            "length": length,
            "relative_error": errors.get(peer),
            "forward_ms": forward[peer],
            "backward_ms": backward[peer],
        }
        for peer in calls
    }
    whole = {peer: forward[peer] + backward[peer] for peer in calls}
    share = ours / int(scores["visible"])  # type: ignore[arg-type]
    said = ", ".join(f"{peer} {ms:.0f} ms ({ms / whole['ours']:.2f}×)" for peer, ms in whole.items())
    per_score = whole["ours"] / ours / (whole["ours, fixed slopes"] / of_slopes)
    say(
        f"{name} {length:>6}: {said}; scores {share:.1%} of the visible, {ours / int(scores['acp']):.2f} of ACP's "  # type: ignore[arg-type]
        f"({int(scores['ours_at_acps']) / int(scores['acp_at_acps']):.2f} at its ε), {per_score:.2f}× the time a score"  # type: ignore[arg-type]
    )
    return {**rows, "scores": scores}


def _without_grad(call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return call(*inputs)


def _dense_bias(decay: Tensor) -> Tensor:
    """[B, H, n, n] fp32, c_i − c_j formed in fp64."""
    kept = decay.double().cumsum(-1)
    length = kept.shape[-1]
    bias = (kept[..., :, None] - kept[..., None, :]).float()
    return bias.masked_fill_(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)


def _error(name: str, call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> float:
    """How far the outputs of the last queries are from fp64, as a share of max‖v‖."""
    query, key, value = inputs.query, inputs.key, inputs.value
    found, length = _without_grad(call, query, key, value)[:, :, -ROWS:].double(), query.shape[2]
    last, wide = query[:, :, -ROWS:].double(), (key.double(), value.double())
    gates, slopes = inputs.log_fgate.double(), inputs.slopes
    exact = forgetting_attention(last, *wide, gates, slopes, tolerance=0.0, backend="reference")
    error = float((found - exact).norm(dim=-1).max() / value.norm(dim=-1).max())
    if not error <= _ALLOWED:
        raise RuntimeError(
            f"{name} is wrong at {length} tokens: off by {error:.1e} of max‖v‖, {_ALLOWED:.0e} is allowed"
        )
    return error


def summary(columns: Columns) -> dict[str, float | None]:
    """Shares of scores, and times of a score, in the geometric mean over lengths."""
    scores = columns.get("scores")
    if scores is None:
        return {}
    of = {name: np.array(column, dtype=float) for name, column in scores.items()}
    found = {
        "scores as a share of ACP's": of["ours"] / of["acp"],
        "scores as a share of ACP's, at its ε": of["ours_at_acps"] / of["acp_at_acps"],
        "scores as a share of the visible": of["ours"] / of["visible"],
    }
    whole = {
        name: np.array(columns[name]["forward_ms"], dtype=float) + np.array(columns[name]["backward_ms"], dtype=float)
        for name in ("ours", "ours, fixed slopes", "causal, no bias")
    }
    found["time of a score over that of fixed slopes"] = (
        whole["ours"] / of["ours"] / (whole["ours, fixed slopes"] / of["fixed_slopes"])
    )
    found["time of causal SDPA without bias over ours"] = whole["causal, no bias"] / whole["ours"]
    return {name: float(np.exp(np.log(x).mean())) for name, x in found.items()}
