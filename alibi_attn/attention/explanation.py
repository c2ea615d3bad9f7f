"""The words of `explain`: who runs a call and why, how far each head looks, and what is certified about the rest."""

import torch
from torch import Tensor

from alibi_attn.attention import dispatch
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.spec import AttentionSpec, dtype_name
from alibi_attn.attention.visibility import largest_distance, visible_count

Spec = AttentionSpec[Tensor]


def describe(spec: Spec, name: str, asked: str, query: Tensor, key: Tensor, value: Tensor) -> str:
    """Several lines; `name` is the backend that runs, `asked` what the caller wrote."""
    with torch.no_grad():
        visited = dispatch.visits(name, spec, query, key, value)
    lines = [_call(spec, query), *_backends(spec, name, asked, query, key, value)]
    if visited is None:
        lines.append(f"{name} computes every score, {spec.query_len} · {spec.key_len} a head, and skips nothing")
        return "\n".join(lines)
    reach, scores = visited
    lines += _heads(spec, torch.minimum(reach, largest_distance(spec, reach.device)[:, None]), scores)
    seen, computed = int(visible_count(spec).sum()) * spec.num_heads, int(scores.sum())
    every = spec.batch * spec.num_heads * spec.query_len * spec.key_len
    lines.append(
        f"scores computed: {computed:,} = {computed / every:.1%} of T·S, {computed / max(seen, 1):.1%} of the visible ones"
    )
    lines.append(
        f"certified: what is skipped weighs at most {spec.tolerance:.2g} of any query's softmax mass, "
        f"so an output is off by at most {2 * spec.tolerance / (1 - spec.dropout_p):.2g}·max‖v‖ before rounding"
    )
    return "\n".join(lines)


def _call(spec: Spec, query: Tensor) -> str:
    look = "causal" if spec.causal else "both directions"
    extras = [
        f"window {spec.window}" if spec.window is not None else "",
        "key mask" if spec.key_mask is not None else "",
        "segments" if spec.key_segments is not None else "",
        "key bias" if spec.key_bias is not None else "",
        f"dropout {spec.dropout_p}" if spec.dropout_p else "",
    ]
    return (
        f"B={spec.batch} H={spec.num_heads} K={spec.num_kv_heads} T={spec.query_len} S={spec.key_len} D={spec.head_dim}, "
        f"{dtype_name(query.dtype)} on {query.device}, " + ", ".join([look, *filter(None, extras)])
    )


def _backends(spec: Spec, name: str, asked: str, query: Tensor, key: Tensor, value: Tensor) -> list[str]:
    lines = []
    preferred = dispatch.PREFERRED.get(query.device.type, (dispatch.BACKENDS["dense"],))
    for other, backend in dispatch.BACKENDS.items():
        reason = backend.why_not(spec, query, key, value)
        if other == name:
            verdict = "runs" + (" (picked by auto)" if asked == "auto" else " (asked for)")
            if other == native.name:
                verdict += f": {build.instructions()}"
        elif reason is not None:
            verdict = f"cannot: {reason}"
        else:
            too_small = backend.too_small(spec)
            verdict = "could"
            if backend not in preferred:
                verdict += "; auto never picks it here"
            elif too_small is not None:
                verdict += f"; auto leaves it to dense: {too_small}"
        lines.append(f"  {other:<10} {verdict}")
    return lines


def _heads(spec: Spec, reach: Tensor, scores: Tensor) -> list[str]:
    """One line a head; over several sequences the widest."""
    slopes = spec.slopes.detach().reshape(-1, spec.num_heads)
    lines = ["head       slope     reach   share of T·S"]
    for h in range(spec.num_heads):
        share = int(scores[:, h].sum()) / (spec.batch * spec.query_len * spec.key_len)
        lines.append(f"{h:>4} {float(slopes[:, h].max()):>11.6g} {int(reach[:, h].max()):>9} {share:>14.1%}")
    return lines
