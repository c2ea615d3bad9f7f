"""Layers with forget gates: their results, equal decoding, and gates in full precision."""

import copy

import pytest
import torch
from layer_oracle import heads_of, output_of
from refusals import assert_refused

from alibi_attn import ALiBiAttention, ALiBiTransformerBlock, KVCache, forgetting_attention


def layer(**options: object) -> ALiBiAttention:
    torch.manual_seed(3)
    made = ALiBiAttention(32, 4, forget_gate=True, **options)
    torch.nn.init.normal_(made.gate_proj.weight)
    return made


def test_it_is_the_function_between_four_maps() -> None:
    attention = layer(num_kv_heads=2, slopes=[0.0] * 4)
    x = torch.randn(2, 50, 32)
    parts = [heads_of(attention, name, x) for name in "qkv"]
    gates = torch.nn.functional.logsigmoid(x @ attention.gate_proj.weight.T + attention.gate_proj.bias).transpose(1, 2)
    right = output_of(attention, forgetting_attention(*parts, gates.double(), backend="reference"))
    torch.testing.assert_close(attention(x), right.float(), rtol=1e-5, atol=1e-5)
    assert float(ALiBiAttention(32, 4, forget_gate=True).gate_proj.bias.detach().abs().max()) == 0


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"num_kv_heads": 1, "qk_norm": True}])
def test_chunks_and_their_gradients_are_those_of_one_pass(options: dict) -> None:
    """`test_cache_sequences.py` has the chunks without gradients."""
    attention, x, cache = layer(**options), torch.randn(2, 40, 32), KVCache()
    parts = [attention(chunk, cache=cache) for chunk in x.split([20, 1, 1, 13, 5], dim=1)]
    outputs = torch.cat(parts, 1), attention(x)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y.square().sum(), list(attention.parameters())) for y in outputs]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert cache.log_fgate.shape == (2, 4, 40)
    assert cache.nbytes >= 4 * (cache.key.numel() + cache.value.numel() + cache.log_fgate.numel())


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"num_kv_heads": 2, "slopes": [0.0] * 4}])
def test_a_token_reads_the_keys_that_gates_have_left(options: dict, near: list[dict]) -> None:
    attention, x = layer(**options), torch.randn(2, 400, 32)
    cuts = [350, 1, 16, 1, 32]
    with torch.no_grad():
        whole, cache = attention(x), KVCache()
        parts = [attention(chunk, cache=cache) for chunk in x.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
        assert len(near) == 3
        cache.crop(320)
        cache.key.data[:, :, :64], cache.value.data[:, :, :64] = torch.nan, torch.nan  # their norms are cached
        cache.reorder([1, 0])
        torch.testing.assert_close(
            attention(x[[1, 0], 320:321], cache=cache), whole[[1, 0], 320:321], rtol=1e-5, atol=1e-5
        )
        assert len(near) == 4
        seen = torch.ones(2, 322, dtype=torch.bool)
        seen[0, :70] = False
        attention(x[:, :1], cache=cache, key_mask=seen)
        assert len(near) == 4, "with a mask and gates all keys are scored"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_stay_fp32_in_a_model_cast_to_half_precision(dtype: torch.dtype) -> None:
    exact = layer()
    attention = copy.deepcopy(exact).to(dtype)
    assert attention.q_proj.weight.dtype == dtype
    assert attention.gate_proj.weight.dtype == torch.float32
    torch.testing.assert_close(attention.gate_proj.weight, exact.gate_proj.weight, rtol=0, atol=0)
    x = torch.randn(1, 300, 32).to(dtype)
    assert attention.gate_proj(x).dtype == torch.float32
    torch.testing.assert_close(attention(x).float(), exact(x.float()), rtol=0, atol=0.05)
    with torch.autocast("cpu", dtype):
        assert exact.gate_proj(x.float()).dtype == torch.float32


def test_gates_learn() -> None:
    block = ALiBiTransformerBlock(32, 4, forget_gate=True, slopes=[0.0] * 4)
    x = torch.randn(2, 40, 32)
    block(x).square().sum().backward()
    assert float(block.attention.gate_proj.weight.grad.abs().max()) > 0
    assert {"attention.gate_proj.weight", "attention.gate_proj.bias"} <= block.state_dict().keys()
    assert not any("gate" in name for name in ALiBiTransformerBlock(32, 4).state_dict())


def test_invalid_arguments_are_refused() -> None:
    cache, gated, key, gates = KVCache(), KVCache(), torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2)
    cache.append(key, key)
    gated.append(key, key, log_fgate=gates)
    assert_refused(
        ("forget_gate needs causal=True", lambda: layer(causal=False)),
        ("for every token or for none", lambda: cache.append(key, key, log_fgate=gates)),
        ("for every token or for none", lambda: gated.append(key, key)),
        (r"must be \[B, H, T\]", lambda: KVCache().append(key, key, log_fgate=gates[:, :, :1])),
    )
    assert len(cache) == len(gated) == 2
