"""`alibi bench gates`: attention with forget gates: ours, SDPA with a dense bias, causal SDPA without gates, and the scores that
ACP keeps.

Queries and keys are normalized noise, as after QK-norm, so that no score exceeds U; gates are sigmoid(N(logit, 1)).
The record has the times, the number of computed scores, and the number inside the boundary of Adaptive Computation Pruning
(ACP; Lin et al. 2025, arXiv:2504.06949) at equal ε, counted in the same blocks.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from alibi_attn import forgetting_attention, inspect
from alibi_attn.inspect import TILE
from alibi_lab import records
from alibi_lab.measure import harness
from alibi_lab.measure.harness import WAYS, Columns, Config, Row, Rows, Say
from alibi_lab.measure.inputs import published_slopes
from alibi_lab.measure.peers import Attention, sdpa_causal, sdpa_dense_bias
from alibi_lab.measure.peers.ours import ours

LENGTHS = (2048, 4096, 8192, 16384, 32768)
LOGITS, BOUNDS = (2.0, 4.0, 6.0), (8.0, 16.0)  # of gates; U, the largest score
HEADS, HEAD_DIM = 8, 64
PRUNED_AT = math.exp(-10)  # the ε of the authors' code
LONGEST_DENSE = 4096
ROWS = 64  # the last queries, which are checked
_ALLOWED = 2e-5  # of max‖v‖: hand-written fp32 attention is off by 2e-6 at these lengths


PEERS: dict[str, records.Json] = {
    "ours": "forgetting_attention",
    "causal, no bias": "SDPA is_causal=True; no gates at all",
    "SDPA + dense bias": f"attn_mask = c_i − c_j, built once; up to {LONGEST_DENSE} tokens",
    "ours, fixed slopes": "alibi_attention with the published slopes, for the time that a score takes",
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of one call.

    Args:
        query, key, value, grad: [B, H, n, D]; `grad` is the gradient of the output.
        log_fgate: ln f, [B, H, n].
        slopes: [H], in addition to the gates; None = none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    log_fgate: Tensor
    slopes: Tensor | None = None

    def first(self, length: int) -> "Inputs":
        """The first `length` tokens; a causal model computes the same values for them alone."""
        whole = self.query, self.key, self.value, self.grad, self.log_fgate
        query, key, value, grad, log_fgate = (x[:, :, :length].contiguous() for x in whole)
        return Inputs(query, key, value, grad, log_fgate, self.slopes)

    @property
    def decay(self) -> Tensor:
        """[B, H, n], what each token adds to every score that spans it: ln f minus the slope (at most 0)."""
        return self.log_fgate if self.slopes is None else self.log_fgate - self.slopes[:, None]

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Our forgetting attention with these gates and slopes."""
        return forgetting_attention(query, key, value, self.log_fgate, self.slopes)


def draw(logit: float, bound: float, length: int) -> Inputs:
    """Noise for one sequence of HEADS heads whose gates have the mean `logit` and whose scores stay below `bound`."""
    rng = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, HEADS, length, HEAD_DIM, generator=rng) for _ in range(4))
    size = (bound * HEAD_DIM**0.5) ** 0.5  # the norm of queries and keys that bounds scores by U
    query, key = (functional.normalize(x, dim=-1) * size for x in (query, key))
    log_fgate = functional.logsigmoid(torch.randn(1, HEADS, length, generator=rng) + logit)
    return Inputs(query, key, value, grad, log_fgate)


def gates(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    logits: Sequence[float] = LOGITS,
    bounds: Sequence[float] = BOUNDS,
    repeats: int = 5,
    seconds: float = 10.0,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record per pair of a gate logit and a score bound, and returns their paths.

    Args:
        lengths: sequence lengths, as in 2048,8192; default 2048 … 32768.
        logits: mean logits of the gates, as integers; 12 forgets nothing. Default 2,4,6.
        bounds: bounds of the scores, as integers; default 8,16.
        repeats: most turns per call; the median counts.
        seconds: time limit in seconds per length and direction.

    Raises:
        RuntimeError: a peer is wrong.
    """
    kinds = {f"logit-{logit:g}-U-{bound:g}": (float(logit), float(bound)) for logit in logits for bound in bounds}
    shared = gates_config(HEADS, HEAD_DIM, lengths)
    configs = {name: {"gate_logit": logit, "score_bound": bound, **shared} for name, (logit, bound) in kinds.items()}

    def measure(name: str, length: int) -> Rows:
        return measured(draw(*kinds[name], length), repeats=repeats, seconds=seconds)

    return harness.keep_by_length(out, "gates", configs, lengths=lengths, measure=measure, summary=summary, say=say)


def gates_config(heads: int, head_dim: int, lengths: Sequence[int]) -> Config:
    """The part of the config that all gate benchmarks share."""
    shared = harness.attention_config((), lengths, heads=heads, head_dim=head_dim, threads=torch.get_num_threads())
    return {**shared, "pruned_at": PRUNED_AT, "peers": PEERS}


def pruned_scores(decay: Tensor, query: Tensor, key: Tensor, tolerance: float) -> int:
    """The number of scores in blocks of TILE inside ACP's boundary, summed over sequences and heads; T = S.

    ACP's rule, per head: let U = max‖q‖·max‖k‖·scale and δ = −(2U + ln n) + ln ε, and let c be the running sum of
    `decay` [B, H, n]. A block of queries skips a tile of keys if c of the first query minus c of the tile's last key is
    below δ.
    """
    length, c = decay.shape[-1], decay.double().cumsum(-1)
    largest = [x.double().norm(dim=-1).amax(-1) for x in (query, key)]
    delta = -(2 * largest[0] * largest[1] * query.shape[-1] ** -0.5 + math.log(length)) + math.log(tolerance)
    starts = torch.arange(0, length, TILE)
    ends = (starts + TILE).clamp(max=length)
    # c decreases, so the skipped tiles are the first ones.
    skipped = (c[..., None, ends - 1] > (c[..., starts] - delta[..., None])[..., None]).sum(-1) * TILE
    return int(((ends - torch.minimum(skipped, starts)) * (ends - starts)).sum())


def computed_scores(inputs: Inputs, tolerance: float | None = None) -> int:
    """The number of scores that the kernels compute, in blocks of TILE, summed over sequences and heads."""
    query, key, value = inputs.query, inputs.key, inputs.value
    slopes = [0.0] * query.shape[1] if inputs.slopes is None else inputs.slopes
    bias = -inputs.log_fgate.double().cumsum(-1)
    return inspect.computed_scores(query, key, value, slopes, backend="native", key_bias=bias, tolerance=tolerance)


def measured(inputs: Inputs, *, repeats: int, seconds: float) -> dict[str, Row]:
    """The rows of one length: one per peer, plus "scores" with the numbers of scores.

    Raises:
        RuntimeError: a peer is wrong.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, length, _ = query.shape
    tolerance = inspect.default_tolerance(query, key, value)
    with torch.no_grad():
        counts = {
            "visible": batch * heads * length * (length + 1) // 2,
            "ours": computed_scores(inputs),
            "acp": pruned_scores(inputs.decay, query, key, tolerance),
            "ours_at_acps": computed_scores(inputs, PRUNED_AT),
            "acp_at_acps": pruned_scores(inputs.decay, query, key, PRUNED_AT),
            "fixed_slopes": inspect.computed_scores(query, key, value, backend="native"),
        }
    slopes = published_slopes(heads)
    attentions: dict[str, Attention] = {
        "ours": inputs.attention,
        "causal, no bias": sdpa_causal.causal(query, key, value, slopes),
        "ours, fixed slopes": ours("auto")(query, key, value, slopes),
    }
    if length <= LONGEST_DENSE:
        attentions["SDPA + dense bias"] = sdpa_dense_bias.with_mask(_dense_bias(inputs.decay))
    candidates = {}
    for peer, attention in attentions.items():
        gated = peer in ("ours", "SDPA + dense bias")
        row: Row = {"length": length, "relative_error": _error(peer, attention, inputs) if gated else None}
        candidates[peer] = harness.candidate(row, attention, (query, key, value), inputs.grad)
    rows = harness.timed(candidates, repeats=repeats, seconds=seconds)
    return {**rows, "scores": {"length": length, **counts, "tolerance": tolerance}}


def _dense_bias(decay: Tensor) -> Tensor:
    """[B, H, n, n] fp32, c_i − c_j formed in fp64."""
    c = decay.double().cumsum(-1)
    later = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool).triu(1)
    return (c[..., :, None] - c[..., None, :]).float().masked_fill_(later, -math.inf)


def _error(name: str, attention: Attention, inputs: Inputs) -> float:
    """The largest error of the last queries' outputs against fp64, as a share of max‖v‖."""
    query, key, value = inputs.query, inputs.key, inputs.value
    with torch.no_grad():
        outputs = attention(query, key, value)[:, :, -ROWS:].double()
    last, keys, values, log_fgate = (x.double() for x in (query[:, :, -ROWS:], key, value, inputs.log_fgate))
    exact = forgetting_attention(last, keys, values, log_fgate, inputs.slopes, tolerance=0.0, backend="reference")
    error = float((outputs - exact).norm(dim=-1).max() / value.norm(dim=-1).max())
    if not error <= _ALLOWED:
        raise RuntimeError(
            f"{name} is wrong at {query.shape[2]} tokens: off by {error:.1e} of max‖v‖ but {_ALLOWED:.0e} is allowed"
        )
    return error


def summary(columns: Columns) -> dict[str, float | None]:
    """The shares of scores and the time per score, each as a geometric mean over lengths."""
    of = {name: np.array(column, dtype=float) for name, column in columns["scores"].items()}
    gated, fixed, causal = (
        np.array([columns[name][way] for way in WAYS], dtype=float).sum(0)
        for name in ("ours", "ours, fixed slopes", "causal, no bias")
    )
    ratios = {
        "scores as a share of ACP's": of["ours"] / of["acp"],
        "scores as a share of ACP's, at its ε": of["ours_at_acps"] / of["acp_at_acps"],
        "scores as a share of the visible": of["ours"] / of["visible"],
        "time of a score over that of fixed slopes": gated / of["ours"] / (fixed / of["fixed_slopes"]),
        "time of causal SDPA without bias over ours": causal / gated,
    }
    return {name: float(np.exp(np.log(x).mean())) for name, x in ratios.items()}
