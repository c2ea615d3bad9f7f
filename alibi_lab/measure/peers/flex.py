"""FlexAttention (Dong et al. 2024, arXiv:2412.05496) with its ALiBi `score_mod` and a causal BlockMask."""

from typing import Any

import torch
from torch import Tensor

from alibi_lab.measure.inputs import Case, Inputs, draw
from alibi_lab.measure.peers import Attention, Peer

_MASK_COMPILED = 32768  # create_block_mask materializes T·S booleans unless it is compiled


def flex(inputs: Inputs, *, compiled: bool = True) -> Attention:
    """FlexAttention compiled for this shape; `compiled=False` runs the same code eagerly."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, slopes = inputs.query, inputs.slopes
    t, s = query.shape[2], inputs.key.shape[2]
    first = s - t

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx - first)

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + first >= kv_idx

    mask = create_block_mask(visible, None, None, t, s, device=query.device, _compile=compiled and s > _MASK_COMPILED)
    attention: Any = flex_attention
    if compiled:
        # After eight shapes torch stops compiling and would materialize all T·S scores; a training has only one shape.
        torch.compiler.reset()
        attention = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attention(q, k, v, score_mod=alibi, block_mask=mask)


def compile_ahead(case: Case) -> None:
    """Compiles FlexAttention for a case on CUDA into torch's caches on disk, for other processes.

    It starts no processes, because several of these calls run at a time, each in its own process.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    inputs = draw(case)
    leaves = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    torch.autograd.grad(flex(inputs)(*leaves), leaves, inputs.grad)
    torch.cuda.synchronize()


PEER = Peer("FlexAttention", flex)
