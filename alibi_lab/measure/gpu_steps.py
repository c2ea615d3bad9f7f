"""Training steps that `alibi bench gpu` does not time: through a CUDA graph, with forget gates, and symmetric with a key mask."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from alibi_attn import alibi_attention, forgetting_attention
from alibi_lab.measure.gpu_parts import GRAPH, Calls, Case, Part, cases, drawn, in_both_ways
from alibi_lab.measure.gpu_truth import Truth, biased_by, causal_distance, head, with_gates, with_slope
from alibi_lab.measure.inputs import published_slopes
from alibi_lab.measure.peers.sdpa_causal import causal, causal_by

SDPA, CUDNN = "SDPA, no bias", "SDPA, no bias, cuDNN"
MASKED, BIASED = "SDPA + mask, no bias", "SDPA + dense bias"
NOTES = {
    "ours": "backend='fused'",
    SDPA: "scaled_dot_product_attention(is_causal=True); no ALiBi at all",
    CUDNN: "the same, restricted to cuDNN's kernel",
    MASKED: "attn_mask [B, 1, 1, S]; no ALiBi at all",
    BIASED: "attn_mask [B, H, T, S] with bias and mask, built once",
}


def plain(case: Case, device: torch.device) -> Calls:
    """Causal, fixed slopes."""
    *inputs, grad = drawn(case, device)
    slopes = published_slopes(case.heads, device)
    ours = functools.partial(alibi_attention, slopes=slopes, backend="fused")
    biased = Truth.of(with_slope(slopes, case.length), inputs, grad)
    return {**in_both_ways(ours, inputs, grad, biased, "ours"), **_causal_peers(inputs, grad, slopes)}


def gated(case: Case, device: torch.device) -> Calls:
    """Forget gates, without slopes."""
    *inputs, grad = drawn(case, device)
    noise = torch.randn(grad.shape[:3], generator=torch.Generator(device).manual_seed(1), device=device)
    gates = functional.logsigmoid(noise + 4)
    ours = functools.partial(forgetting_attention, backend="fused")
    calls = in_both_ways(ours, [*inputs, gates], grad, Truth.of(with_gates, [*inputs, gates], grad), "ours")
    return {**calls, **_causal_peers(inputs, grad, published_slopes(case.heads, device))}


def masked(case: Case, device: torch.device) -> Calls:
    """Symmetric, with padding: texts of a third of the length or more, two thirds on average."""
    *inputs, grad = drawn(case, device)
    slopes, mask = published_slopes(case.heads, device), padding(case, device)
    distance = causal_distance(case.length, device)
    distance = distance.minimum(distance.T)
    hidden, slope = ~mask[-1], head(slopes[None, :, None].double())
    ours = functools.partial(alibi_attention, slopes=slopes, causal=False, key_mask=mask, backend="fused")
    biased, unbiased = (
        Truth.of(biased_by((-m * distance).masked_fill_(hidden, -torch.inf)), inputs, grad) for m in (slope, 0 * slope)
    )
    shown = mask[:, None, None]
    bias = (-slopes[:, None, None] * distance.float()).to(grad.dtype).masked_fill(~shown, -torch.inf)
    del distance
    return {
        **in_both_ways(ours, inputs, grad, biased, "ours"),
        **in_both_ways(_with_mask(shown), inputs, grad, unbiased, MASKED),
        **in_both_ways(_with_mask(bias), inputs, grad, biased, BIASED),
    }


def padding(case: Case, device: torch.device) -> Tensor:
    """[B, S] bool, True = a token of its text. The lengths are random, and one text is as long as the batch."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(case.length // 3, case.length + 1, (case.batch,), generator=generator)
    if case.batch > 1:
        lengths[0] = case.length
    return (torch.arange(case.length) < lengths[:, None]).to(device)


def _causal_peers(inputs: list[Tensor], grad: Tensor, slopes: Tensor) -> Calls:
    query, key, value = inputs
    truth = Truth.of(with_slope(0 * slopes, grad.shape[2]), inputs, grad)
    return {
        **in_both_ways(causal(query, key, value, slopes), inputs, grad, truth, SDPA),
        **in_both_ways(causal_by(SDPBackend.CUDNN_ATTENTION)(query, key, value, slopes), inputs, grad, truth, CUDNN),
    }


def _with_mask(mask: Tensor) -> Callable[..., Tensor]:
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _notes(*names: str) -> dict[str, str]:
    return {name + way: NOTES[name] + way for name in names for way in ("", GRAPH)}


SMOKE = "2x70x2x16"
PLAIN_CASES = cases("8x2048x16x128 1x16384x16x128 32x512x16x128", SMOKE)
MASKED_CASES = cases("32x512x12x64 8x2048x12x64 2x8192x12x64", SMOKE)
PLAIN = Part("graphs", 15.0, _notes("ours", SDPA, CUDNN), PLAIN_CASES, plain)
GATED = Part("gates", 12.0, _notes("ours", SDPA, CUDNN), cases("2x8192x16x128", SMOKE), gated)
WITH_MASK = Part("masked", 15.0, _notes("ours", MASKED, BIASED), MASKED_CASES, masked)
