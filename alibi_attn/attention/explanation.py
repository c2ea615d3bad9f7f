"""The words of `explain`: who runs a call and why, how far each head looks, and what is certified about the rest."""

import torch
from torch import Tensor

from alibi_attn.attention import dispatch, lines
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import largest_distance, visible_count

Spec = AttentionSpec[Tensor]


def describe(spec: Spec, name: str, asked: str, query: Tensor, key: Tensor, value: Tensor) -> str:
    """Several lines; `name` is the backend that runs, `asked` what the caller wrote."""
    with torch.no_grad():
        visited = dispatch.visits(name, spec, query, key, value)
    before = [lines.of_call(spec, query.dtype, query.device), *_backends(spec, name, asked, query, key, value)]
    if visited is None:
        return "\n".join([*before, lines.of_everything(spec, name)])
    reach, scores = visited
    reach = torch.minimum(reach, largest_distance(spec, reach.device)[:, None])
    seen = int(visible_count(spec).sum()) * spec.num_heads
    slopes, reaches, counts = (x.detach().cpu().numpy() for x in (spec.slopes, reach, scores))
    return "\n".join([*before, *lines.of_heads(spec, slopes, reaches, counts, seen)])


def _backends(spec: Spec, name: str, asked: str, query: Tensor, key: Tensor, value: Tensor) -> list[str]:
    said = []
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
        said.append(f"  {other:<10} {verdict}")
    return said
