"""Where forward of the Triton kernels needs no online softmax; runs on a GPU, and in the child process with the interpreter.

On a GPU fp32 always has online softmax. The interpreter cannot multiply bf16, whose weights have the range of fp32, so there
fp32 stands for it.
"""

import dataclasses
import math
import unittest.mock

import torch
from certificate_attack import random_attack
from torch import Tensor

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import FIXED_DIGITS, FIXED_HALF_DIGITS, TILE
from alibi_attn.attention.run.dispatch import RUNS

Call = tuple[AttentionSpec[Tensor], Tensor, Tensor, Tensor]
EVERYWHERE = 2**29  # a distance up to which softmax is online
LOG2E = math.log2(math.e)


def run(call: Call, online: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, the distance of every block of TILE queries up to which softmax is online, [B, H, blocks]).

    `online` replaces the certificate's distances.
    """
    spec, *inputs = call
    tiles = fused.plan(spec, *inputs)
    shape = spec.batch, spec.num_heads, -(-spec.query_len // TILE)
    distances = tiles.online.value[: math.prod(shape)].view(shape)
    if online is not None:
        distances.fill_(online)
    with unittest.mock.patch.object(fused, "may_fix", return_value=True):
        return *fused.forward(spec, *inputs, tiles, measured=False), distances


def allowed_digits(dtype: torch.dtype, keys: int, longest_value: float = 1.0) -> float:
    """By how many binary digits scores may exceed the largest one of the nearest keys."""
    digits = FIXED_DIGITS - math.log2(keys) - max(math.log2(longest_value), 0.0)
    return min(digits, FIXED_HALF_DIGITS) if dtype == torch.float16 else digits


def beyond_the_nearest(dtype: torch.dtype, digits: float, slope: float = 0.0, device: str = "cpu") -> Call:
    """256 tokens in which one of 64 keys has a score of this many digits more than is allowed, and all others 0."""
    torch.manual_seed(0)
    query, key = torch.zeros(2, 1, 1, 256, 16, dtype=dtype, device=device)
    query[..., 0], key[:, :, 63::64, 0] = 1.0, 1.0
    value = torch.nn.functional.normalize(torch.randn(1, 1, 256, 16), dim=-1).to(device, dtype)
    scale = (allowed_digits(dtype, 256) + digits) / LOG2E
    return make_spec(query, key, value, [slope], scale=scale, tolerance=1e-9, return_lse=True), query, key, value


def error_beyond_the_nearest(
    dtype: torch.dtype, digits: float, slope: float = 0.0, device: str = "cpu"
) -> tuple[list[int], float]:
    """(distances, the largest error of output and lse against fp64)."""
    spec, *inputs = call = beyond_the_nearest(dtype, digits, slope, device)
    *found, distances = run(call)
    true = RUNS["reference"](spec, *(x.double() for x in inputs))
    error = max(float((x.double() - y).abs().max()) for x, y in zip(found, true, strict=True))
    return distances.flatten().tolist(), error


def without_proof(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """The output where scores exceed the nearest by 16 digits more than is allowed, as if that were proved to be harmless."""
    return run(beyond_the_nearest(dtype, 16.0, device=device), online=0)[0].cpu()


def noise() -> Call:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 256, 16)
    return make_spec(query, key, value, [0.05], tolerance=1e-9), query, key, value


def attacked(seed: int) -> tuple[float, float, float]:
    """(The most digits by which a score that is not online exceeds the largest of the nearest keys, minus those allowed; the
    share of blocks that have such scores; how much output and lse differ from online softmax's, relatively.)
    """
    attack = random_attack(seed)
    mask = attack.mask if attack.mask in ("none", "window", "offset before") else "none"
    dtype = "float16" if seed % 2 else "float32"
    attack = dataclasses.replace(attack, mask=mask, causal=True, dtype=dtype, length=230)
    (query, key, value, slopes), kwargs = attack.inputs()
    call = make_spec(query, key, value, slopes, **kwargs), query, key, value
    output, lse, distances = run(call)
    online = run(call, EVERYWHERE)[:2]
    assert torch.equal(output.isfinite(), online[0].isfinite()), attack
    assert torch.equal(lse.isfinite(), online[1].isfinite()), attack
    unit = 2.0**-10 if dtype == "float16" else 2.0**-20
    largest = float(abs(call[0].scale) * query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max())
    scale = float(value.double().abs().max()) + 1e-30
    rough = 2.0**-20 * (1 + largest)
    differ = max(
        float((output.double() - online[0].double()).nan_to_num().abs().max()) / scale / (unit + rough),
        float((lse.double() - online[1].double()).nan_to_num().abs().max()) / (2.0**-20 * (4 + largest)),
    )
    worst, blocks = _excess(call, distances)
    return worst, blocks, differ


def _excess(call: Call, distances: Tensor) -> tuple[float, float]:
    """In fp64: the first two numbers of `attacked`."""
    spec, query, key, value = call
    allowed = allowed_digits(query.dtype, spec.key_len, float(value.double().norm(dim=-1).max()))
    i, j = torch.arange(spec.query_len) + spec.query_offset, torch.arange(spec.key_len)
    scores = spec.scale * (query.double() @ key.double().repeat_interleave(spec.group, 1).mT)
    scores -= spec.slopes.double().reshape(-1, 1, 1) * (i[:, None] - j)
    seen = (j <= i[:, None]) & ((i[:, None] - j < spec.window) if spec.window is not None else True)
    scores = scores.masked_fill(~seen, -torch.inf)[0]
    worst, count = -math.inf, 0
    for h, of_head in enumerate(distances[0].tolist()):
        for n, distance in enumerate(of_head):
            rows, start = slice(n * TILE, (n + 1) * TILE), n * TILE + int(spec.query_offset)
            far = scores[h, rows, : max(start - distance + 1, 0) // TILE * TILE]
            near = scores[h, rows, max((start + 1) // TILE * TILE, 0) :]
            if far.numel() > 0:
                more = (far.amax(-1) - near.amax(-1))[far.amax(-1) > -math.inf]
                worst, count = max(worst, float(more.max()) * LOG2E - allowed if len(more) else worst), count + 1
    return worst, count / distances.numel()
