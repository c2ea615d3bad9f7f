"""`alibi bench cpu`: causal ALiBi attention, forward and backward: ours compared with what users would run instead."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alibi_attn import alibi_attention, inspect
from alibi_attn.inspect import TILE
from alibi_lab.measure import harness
from alibi_lab.measure.harness import Columns, Row, Say, number
from alibi_lab.measure.inputs import Case, draw, published_slopes
from alibi_lab.measure.peers import Peer, eager, flex, rank_two, sdpa_causal, sdpa_dense_bias
from alibi_lab.measure.peers.ours import ours, ours_dropping
from alibi_lab.measure.timing import matrix_product, matrix_rate_gflops

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PRODUCT = "matrix product"  # in fp32

OURS = Peer("ours", ours("auto"), "backend='auto'", longest=65536)
OURS_IN_FP32 = replace(OURS, name="ours, fp32", note=f"{OURS.note}, the same numbers in fp32", dtype=torch.float32)
BANDED = Peer("ours, no compiler", ours("banded"), "backend='banded', for machines without g++", longest=32768)
CAUSAL = replace(sdpa_causal.PEER, longest=32768)
DENSE = replace(sdpa_dense_bias.PEER, longest=8192)
EAGER = replace(eager.PEER, longest=2048)
RANK_TWO_NOTE = "the bias as two more head dimensions of causal SDPA"
RANK_TWO = replace(rank_two.PEER, note=RANK_TWO_NOTE, longest=16384, longest_backward=8192)
FLEX_NOTE = "score_mod and BlockMask, compiled; no backward on a CPU"
FLEX = Peer(flex.NAME, flex.flex, FLEX_NOTE, longest=4096, longest_backward=0)
PEERS = {
    "float32": (OURS, BANDED, CAUSAL, DENSE, RANK_TWO, EAGER, FLEX),
    "bfloat16": (OURS, OURS_IN_FP32, CAUSAL, DENSE, EAGER),
}


def cpu(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 1,
    kinds: Sequence[str] = ("noise",),
    repeats: int = 5,
    seconds: float = 20.0,
    memory: bool = True,
    dropout: float = 0.0,
    dtype: str = "float32",
    peers: Sequence[Peer] | None = None,
    say: Say = print,
) -> list[Path]:
    """Measures calls with 8 heads × 64 and T = S, saves one record per kind of input, and returns their paths.

    Args:
        lengths: sequence lengths, as in 1024,8192; default 512 … 65536.
        batch: sequences per batch, as in training on short texts.
        kinds: kinds of input: noise, peaked, sink; default noise.
        repeats: most turns per call; the median counts.
        seconds: time limit in seconds per length and direction.
        memory: also measure peak memory at 8192, 16384, 32768 and 65536 tokens.
        dropout: also measure ours with this dropout probability, below 1; 0 = not measured.
        dtype: "float32"; or "bfloat16", which also runs ours in fp32 on the same numbers.
        peers: default PEERS[dtype].
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r} but must be one of {', '.join(DTYPES)}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is {dropout} but must be a probability in [0, 1); pass 0 to leave dropout out")
    peers = [*(PEERS[dtype] if peers is None else peers), *([ours_dropping(dropout)] if dropout > 0 else [])]
    config = harness.attention_config(peers, lengths, dtype=dtype, batch=batch, threads=torch.get_num_threads())
    options = {"bf16": dtype == "bfloat16", "dropout": dropout > 0, f"batch-{batch}": batch > 1}
    name = "-".join(["cpu", *(part for part, is_set in options.items() if is_set)])
    # A matrix product takes turns with the peers: it measures the speed of the machine while they ran.
    product = matrix_product()
    also = {_PRODUCT: harness.Candidate({}, product, product)}

    def measure(kind: str, length: int) -> dict[str, Row]:
        """The rows by peer, plus the row "reach" with the scores that the certificate requires."""
        case = Case(kind, length, batch)
        query, key, value, _ = inputs = [x.to(DTYPES[dtype]) for x in draw(case)]
        slopes = published_slopes(case.num_heads)
        rows = harness.measured(peers, inputs, slopes, repeats=repeats, seconds=seconds, also=also)
        rows["reach"] = _reach_row(case, query, key, value, rows["ours"], rows.pop(_PRODUCT))
        return rows

    configs = {kind: {**config, "kind": kind} for kind in kinds}
    step = functools.partial(_train_step, dtype=DTYPES[dtype], batch=batch) if memory else None
    return harness.keep_by_length(
        out, name, configs, lengths=lengths, measure=measure, train_step=step, summary=_summary, say=say
    )


def _reach_row(case: Case, query: Tensor, key: Tensor, value: Tensor, ours: Row, product: Row) -> Row:
    """The scores that the certificate requires, those that are computed, and their rate as a share of a matrix product's."""
    name = inspect.backend_of(query, key, value)
    computed, of_backward = (
        inspect.computed_scores(query, key, value, backend=name, backward=backward) for backward in (False, True)
    )
    if name == "native":  # which computes its certificate inside the kernel
        left = inspect.visited_reach(query, key, value)
    else:
        left = inspect.certified_bounds(query, key, value).left
    position = torch.arange(case.length)
    required = int(torch.minimum(left[..., position // TILE], position + 1).sum())
    causal = case.batch * case.num_heads * case.length * (case.length + 1) // 2
    bounded = left[left < case.length]  # blocks that skip keys
    row: Row = {
        "length": case.length,
        "backend": name,
        "widest_reach": int(bounded.max()) if len(bounded) else case.length,
        "scores_asked_share": required / causal,
        "scores_computed_share": computed / causal,
        "scores_of_backward_share": of_backward / causal,
    }
    for way, products in (("forward", 4), ("backward", 10)):
        rate = matrix_rate_gflops(number(product[f"{way}_ms"]))
        flops = products * case.head_dim * (required if way == "forward" else min(required, of_backward))
        row[f"{way}_matrix_gflops"] = rate
        row[f"{way}_rate_share"] = flops / number(ours[f"{way}_ms"]) / 1e6 / rate
    return row


def _train_step(kind: str, length: int, *, dtype: torch.dtype, batch: int) -> None:
    query, key, value, grad = (x.to(dtype) for x in draw(Case(kind, length, batch)))
    harness.training_step(alibi_attention, (query, key, value), grad)()


def _summary(columns: Columns) -> dict[str, float | None]:
    """How each peer's time grows: the slope of log time over log length, for the longer half of the lengths."""
    growth: dict[str, float | None] = {}
    for name, column in columns.items():
        points = list(harness.whole_times(column).items())
        points = points[len(points) // 2 :] if len(points) > 3 else points
        if len(points) >= 2:
            lengths, times = np.log(np.array(points)).T
            growth[f"growth of {name}"] = float(np.polyfit(lengths, times, 1)[0])
    return growth
