"""Layers with forget gates: their results, equal decoding, and gates in full precision."""

import copy

import pytest
import torch

from alibi_attn import ALiBiAttention, ALiBiTransformerBlock, KVCache, forgetting_attention


def layer(**options: object) -> ALiBiAttention:
    torch.manual_seed(3)
    made = ALiBiAttention(32, 4, forget_gate=True, **options)
    torch.nn.init.normal_(made.gate_proj.weight)
    return made


def test_it_is_the_function_between_four_maps() -> None:
    attention = layer(num_kv_heads=2, slopes=[0.0] * 4)
    x = torch.randn(2, 50, 32)
    q, k, v = (
        p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    gates = torch.nn.functional.logsigmoid(x @ attention.gate_proj.weight.T + attention.gate_proj.bias).transpose(1, 2)
    right = attention.out_proj(forgetting_attention(q, k, v, gates, backend="reference").transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), right, rtol=1e-5, atol=1e-5)
    assert float(ALiBiAttention(32, 4, forget_gate=True).gate_proj.bias.detach().abs().max()) == 0


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"num_kv_heads": 1, "qk_norm": True}])
@pytest.mark.parametrize("grad", [False, True])
def test_chunks_are_one_pass(options: dict, grad: bool) -> None:
    attention, x = layer(**options), torch.randn(2, 40, 32)
    with torch.set_grad_enabled(grad):
        whole = attention(x)
        cache = KVCache()
        parts = [attention(chunk, cache=cache) for chunk in x.split([20, 1, 1, 13, 5], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
    assert cache.log_fgate is not None
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
    with pytest.raises(ValueError, match="forget_gate needs causal=True"):
        ALiBiAttention(32, 4, forget_gate=True, causal=False)
    cache = KVCache()
    cache.append(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8))
    with pytest.raises(ValueError, match="for every token or for none"):
        cache.append(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), log_fgate=torch.zeros(1, 4, 2))
    with pytest.raises(ValueError, match=r"must be \[B, H, T\]"):
        KVCache().append(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), log_fgate=torch.zeros(1, 4, 3))
    assert len(cache) == 2
    gated = KVCache()
    gated.append(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), log_fgate=torch.zeros(1, 4, 2))
    with pytest.raises(ValueError, match="for every token or for none"):
        gated.append(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8))
