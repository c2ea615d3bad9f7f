"""A dense call in linear memory: a few queries at a time, which backward computes again.

For calls that no kernel supports and whose scores would not fit: each chunk of queries is a `dense` call under non-reentrant
checkpointing, so at most `MOST_SCORES` scores of one chunk are in memory, on every device and with every option.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from alibi_attn.attention.call.spec import AttentionSpec

MOST_SCORES = 2**27  # of all sequences and heads together: 512 MiB in fp32

Spec = AttentionSpec[Tensor]
Run = Callable[[Spec, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def has_many_scores(spec: Spec) -> bool:
    """Whether the scores of a call are more than those of one chunk."""
    return spec.batch * spec.num_heads * spec.query_len * spec.key_len > MOST_SCORES


def run(spec: Spec, query: Tensor, key: Tensor, value: Tensor, run_chunk: Run) -> tuple[Tensor, Tensor | None]:
    """(output, lse): the results of `run_chunk` for consecutive queries. A dropout seed must have been drawn."""
    step = max(1, MOST_SCORES // max(1, spec.batch * spec.num_heads * spec.key_len))
    results = []
    for start in range(0, spec.query_len, step):
        stop = min(start + step, spec.query_len)
        part = spec.on_queries(start, stop)
        results.append(
            checkpoint(
                run_chunk, part, query[:, :, start:stop], key, value, use_reentrant=False, preserve_rng_state=False
            )
        )
    outputs, lses = zip(*results, strict=True)
    return torch.cat(outputs, 2), torch.cat(lses, 2) if spec.return_lse else None
