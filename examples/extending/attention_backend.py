"""A new backend, complete: the definition in fp64 for every dtype, without dropout.

    python examples/extending/attention_backend.py

adds it to the tables in memory and compares it with `reference`. To add it for good, copy this file without its last part to
alibi_attn/attention/backends/, and give it a row in `_FORMULAS` of alibi_attn/attention/run/dispatch.py.
"""

from torch import Tensor

from alibi_attn.attention.backends.protocol import Pairs, Result, Spec, TooSmall
from alibi_attn.attention.call.reads import GATES, MASKS, PARTS, SPACE
from alibi_attn.attention.call.visibility import per_query_head

name = "made-up"
READS = MASKS | PARTS | SPACE | GATES  # it gets no call with dropout, and no table


def formula(spec: Spec, query: Tensor, key: Tensor, value: Tensor, pairs: Pairs) -> Result:
    """(output, lse): softmax(scale·q·kᵀ + bias)·v."""
    keys, values = (per_query_head(spec, x.double()) for x in (key, value))
    scores = (spec.scale * (query.double() @ keys.mT)).masked_fill(~pairs.seen, 0.0) + pairs.bias
    return scores.softmax(-1) @ values, scores.logsumexp(-1).to(pairs.bias.dtype)


def why_not(spec: Spec, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why it cannot run a call; None = it runs."""
    return f"{query.device} has no fp64" if query.device.type == "mps" else None


def too_small(spec: Spec) -> TooSmall | None:
    """Why "auto" should leave a call to `dense`."""
    return None


def visits(spec: Spec, query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """What a call reads; None = every score."""


if __name__ == "__main__":
    import sys

    import torch

    from alibi_attn import alibi_attention, explain
    from alibi_attn.attention.run import dispatch
    from alibi_attn.attention.run.guards import guarded

    dispatch.BACKENDS[name] = sys.modules[__name__]
    dispatch.RUNS[name] = guarded(formula)
    q, k, v = torch.randn(3, 1, 8, 200, 64).unbind(0)
    given = {"window": 50, "key_mask": torch.rand(1, 200) < 0.9}
    ours, expected = (alibi_attention(q, k, v, backend=backend, **given) for backend in (name, "reference"))
    print("largest difference from reference:", float((ours - expected).abs().max()))
    try:
        alibi_attention(q, k, v, dropout_p=0.1, backend=name)
    except ValueError as error:
        print(error)
    print(explain(q, k, v, backend=name))
