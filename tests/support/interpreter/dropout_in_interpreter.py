"""Dropout in the Triton kernels; runs in the process with Triton's interpreter (see `fused_in_interpreter.py`)."""

import dataclasses
from typing import Any

import torch
from attention_cases import Case
from attention_oracle import Answer
from dropout_oracle import PARTS, PUBLISHED, factors, masks_of_part
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.call.dropout import drawn_seed
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.run.execution import attend


def dropout_is_the_same_in_backward() -> dict[str, float]:
    """Reads the mask with one-hot values, then compares all results with plain attention under that mask."""
    torch.manual_seed(1)
    p, t, d = 0.3, 150, 64
    q, k, v = (torch.randn(1, 2, t, d, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, requires_grad=True)

    def ours(value: Tensor) -> Tensor:
        torch.manual_seed(7)
        return alibi_attention(q, k, value, slopes, dropout_p=p, backend="fused")

    output = ours(v)
    assert torch.equal(output, ours(v)), "same seed, same mask"
    assert not torch.equal(output, alibi_attention(q, k, v, slopes, dropout_p=p, backend="fused")), (
        "next seed, next mask"
    )
    each = torch.eye(t).expand(1, 2, t, t).split(d, -1)
    with torch.no_grad():
        kept = torch.cat(
            [ours(torch.nn.functional.pad(some, (0, d - some.shape[-1])))[..., : some.shape[-1]] for some in each], -1
        )
    kept = (kept != 0).float()
    i = torch.arange(t)
    distance = i[:, None] - i
    torch.manual_seed(7)
    seed = int(drawn_seed(torch.device("cpu"))[0, 0])
    defined = factors(seed, p, batch=1, heads=2, positions=i[None].numpy(), key_len=t)
    here = (distance >= 0) & (distance < 60)  # farther weights vanish whether kept or not
    assert torch.equal(kept[:, :, here], (defined[:, :, here] != 0).float()), "the mask is that of the definition"
    scores = q @ k.mT / d**0.5 - slopes[:, None, None] * distance.abs()
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    true = (weights * kept / (1 - p)) @ v
    assert float((true - output).abs().max()) < 1e-5
    grad = torch.randn_like(output)
    leaf = (q, k, v, slopes)
    pairs = zip("qkvm", torch.autograd.grad(output, leaf, grad), torch.autograd.grad(true, leaf, grad), strict=True)
    errors = {name: float((a - b).abs().max() / b.abs().max()) for name, a, b in pairs}
    near = (distance >= 0) & (distance < 8)  # far weights vanish whether kept or not
    near_kept = kept[0][:, near]
    return errors | {"kept": float(near_kept.mean()), "alike": float((near_kept[0] == near_kept[1]).float().mean())}


def answer_with_dropout(case: Case) -> tuple[Answer, Answer]:
    """Returns (ours in fp32, `reference`'s in fp64) for one seed; first sequence, head and key are not 0."""
    from attention_checks import answer

    def attention(*args: Tensor, backend: str, return_lse: bool, **kwargs: Any) -> tuple[Tensor, Tensor]:
        options = dict.fromkeys(("right_slopes", "query_offset", "key_mask", "segment_ids", "key_bias")) | kwargs
        spec = make_spec(*args, **options, dropout_p=0.4, return_lse=return_lse)
        spec = dataclasses.replace(
            spec, dropout_seed=torch.tensor([[2**61 + 12345, 3, 5, (-7, 4)[case.query_len % 2]]])
        )
        return attend(spec, *args[:3], backend)

    return (
        answer(case, torch.float32, attention, backend="fused"),
        answer(case, torch.float64, attention, backend="reference"),
    )


def same_masks_of_part(kind: str) -> bool:
    return torch.equal(*masks_of_part(kind, "fused"))


def gradients_of_part(kind: str) -> list[tuple[Tensor, Tensor]]:
    """(ours in fp32, `dense`'s): output and gradients of a call in parts, with dropout."""
    t, options = PARTS[kind]
    given = {name: torch.from_numpy(x) if hasattr(x, "dtype") else x for name, x in options.items()}
    torch.manual_seed(3)
    leaves = [torch.randn(2, n, length, 16, requires_grad=True) for n, length in ((2, t), (1, 75), (1, 75))]
    found = []
    for backend in ("fused", "dense"):
        torch.manual_seed(4)
        output = alibi_attention(*leaves, [0.1, 0.0], dropout_p=0.3, backend=backend, **given)
        found.append([output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)])
    return list(zip(*found, strict=True))


def known_random_numbers() -> list[list[int]]:
    """The kernels' random numbers for the published inputs; one input is repeated to reach a power of two."""
    from random_numbers import drawn

    known = [*PUBLISHED, PUBLISHED[0]]
    return drawn(*([*column] for column in zip(*((key, *counter) for key, counter, _ in known), strict=True)))
