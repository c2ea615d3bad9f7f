"""The text of `explain`, shared by PyTorch and JAX: the call, its backend, the reach of each head, and the certified bound."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from alibi_attn.attention.spec import AttentionSpec, dtype_name

Spec = AttentionSpec[Any]


def call_line(spec: Spec, dtype: object, device: object) -> str:
    direction = "causal" if spec.causal else "both directions"
    extras = [
        f"window {spec.window}" if spec.window is not None else "",
        "key mask" if spec.key_mask is not None else "",
        "segments" if spec.key_segments is not None else "",
        "key bias" if spec.key_bias is not None else "",
        f"dropout {spec.dropout_p}" if spec.dropout_p else "",
    ]
    return (
        f"B={spec.batch} H={spec.num_heads} K={spec.num_kv_heads} T={spec.query_len} S={spec.key_len} D={spec.head_dim}, "
        f"{dtype_name(dtype)} on {device}, " + ", ".join([direction, *filter(None, extras)])
    )


def backend_line(name: str, verdict: str) -> str:
    """One line per backend: it runs, it could run, or the reason why it cannot."""
    return f"  {name:<10} {verdict}"


def chosen_verdict(backend: str) -> str:
    """The verdict on the backend that runs; `backend` is the caller's argument."""
    return "runs" + (" (picked by auto)" if backend == "auto" else " (named by the caller)")


def dense_line(spec: Spec, name: str) -> str:
    return f"{name} computes every score, {spec.query_len} · {spec.key_len} per head, and skips nothing"


def head_lines(
    spec: Spec, slopes: NDArray[np.floating], reach: NDArray[np.integer], scores: NDArray[np.integer], seen: int
) -> list[str]:
    """One line per head (the widest reach in the batch), the scores computed in total, and the certified bound.

    Args:
        slopes: [H] or [B, H].
        reach, scores: [B, H] of `Backend.visits`, reach no larger than the largest distance.
        seen: number of query-key pairs that the masks allow, summed over all heads.
    """
    slopes = slopes.reshape(-1, spec.num_heads)
    lines = ["head       slope     reach   share of T·S"]
    for h in range(spec.num_heads):
        share = int(scores[:, h].sum()) / (spec.batch * spec.query_len * spec.key_len)
        lines.append(f"{h:>4} {float(slopes[:, h].max()):>11.6g} {int(reach[:, h].max()):>9} {share:>14.1%}")
    computed = int(scores.sum())
    every = spec.batch * spec.num_heads * spec.query_len * spec.key_len
    lines.append(
        f"scores computed: {computed:,} = {computed / every:.1%} of T·S, {computed / max(seen, 1):.1%} of the visible ones"
    )
    lines.append(
        f"certified: the skipped keys hold at most {spec.tolerance:.2g} of any query's softmax mass, "
        f"so an output is off by at most {2 * spec.tolerance / (1 - spec.dropout_p):.2g}·max‖v‖ before rounding"
    )
    return lines
