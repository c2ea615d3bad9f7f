"""What `patch` replaces around attention: linear maps and BLOOM's GELU, only for numerics="exact", and undoably."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.bloom.modeling_bloom import BloomGelu

from alibi_attn.attention.run import decoding
from alibi_attn.attention.run.decoding import attend_near
from alibi_attn.hf import ALiBiCache, patch
from alibi_attn.hf.patching import decoding_step
from alibi_attn.nn.linear import fastest

LINEARS = {
    "bloom": ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "mpt": ("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj"),
    "falcon": ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}
PREFIX = {"bloom": "transformer.h", "mpt": "transformer.blocks", "falcon": "transformer.h"}


def replaced(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


@pytest.mark.parametrize("family", LINEARS)
def test_the_handle_says_what_is_replaced_and_takes_it_back(family, build):
    model = build(family)
    handle = patch(model)
    inside = {f"{PREFIX[family]}.{block}.{name}" for block in range(2) for name in LINEARS[family]}
    assert set(handle.linears) == inside | {"lm_head"}
    gelus = {f"transformer.h.{block}.mlp.gelu_impl" for block in range(2)} if family == "bloom" else set()
    assert set(handle.activations) == gelus
    assert replaced(model) == {*handle.layers, *handle.linears, *handle.activations, "transformer", ""}
    assert f"linears={len(handle.linears)}, activations={len(gelus)}" in repr(handle)
    handle.undo()
    assert replaced(model) == set()


@pytest.mark.parametrize("family", LINEARS)
def test_with_the_checkpoints_numbers_only_attention_is_replaced(family, build):
    model = build(family)
    handle = patch(model, numerics="checkpoint")
    assert handle.linears == handle.activations == ()
    assert replaced(model) == {*handle.layers, "transformer", ""}


def test_maps_of_other_classes_or_with_another_forward_are_left_alone(build, tokens):
    class Adapted(nn.Linear):
        pass

    model = build("bloom")
    first, second = model.transformer.h[0].mlp, model.transformer.h[1].mlp
    first.dense_h_to_4h.__class__ = Adapted
    own = second.dense_h_to_4h.forward = second.dense_h_to_4h.forward
    handle = patch(model)
    assert len(handle.linears) == 2 * 4 + 1 - 2
    assert second.dense_h_to_4h.forward is own
    model(tokens(1, 5))


def test_the_linear_maps_are_ours(build, tokens, monkeypatch):
    """One token uses the kernel for few rows, 9 use oneDNN if MKL is slow; with gradients torch computes everything."""
    monkeypatch.setattr(fastest, "mkl_is_slow", lambda: True)
    rows, real = [], fastest.quicker
    monkeypatch.setattr(fastest, "quicker", lambda x, *rest: rows.append(x.shape[1]) or real(x, *rest))
    model, ids = build("bloom"), tokens(1, 9)
    expected = model(ids).logits
    with patch(model):
        with torch.no_grad():
            assert torch.allclose(model(ids).logits, expected, atol=1e-4)
            assert torch.allclose(model(ids[:, :1]).logits, expected[:, :1], atol=1e-4)
        assert rows == [9] * 9 + [1] * 9
        assert model(ids).logits.requires_grad


def test_the_fused_gelu_is_blooms_and_so_is_its_gradient(build):
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.randn(4000)]).requires_grad_()
    expected = BloomGelu()(x)
    (of_expected,) = torch.autograd.grad(expected.sum(), x)
    model = build("bloom")
    with patch(model):
        actual = model.transformer.h[0].mlp.gelu_impl(x)
        (of_actual,) = torch.autograd.grad(actual.sum(), x)
    assert float((actual - expected).detach().abs().max()) <= 3e-7 * float(expected.detach().abs().max())
    assert float((of_actual - of_expected).abs().max()) <= 2e-6


@pytest.mark.parametrize("cache", [DynamicCache, ALiBiCache])
def test_one_token_with_any_cache_goes_through_the_kernel(cache, build, tokens, monkeypatch):
    if not decoding.has_kernel(torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16)):
        pytest.skip("there is no compiler")
    lengths = []

    def counted(*args, **kwargs):
        lengths.append(args[1].shape[2])
        return attend_near(*args, **kwargs)

    monkeypatch.setattr(decoding, "attend_near", counted)
    monkeypatch.setattr(decoding_step, "step", lambda *_: None)  # attention runs in its module
    model, ids = build("bloom", hidden_size=64, n_head=4), tokens(2, 70)
    with patch(model), torch.no_grad():
        expected = model(ids).logits[:, -1]
        store = cache()
        model(ids[:, :69], past_key_values=store)
        got = model(ids[:, 69:], past_key_values=store).logits[:, -1]
    assert lengths == [70, 70]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long  # half a minute of compiling
@pytest.mark.filterwarnings("default")  # of the compiler
def test_inductor_compiles_a_patched_model(build, tokens):
    model, ids = build("bloom"), tokens(1, 40)
    with torch.no_grad(), patch(model):
        expected = model(ids, use_cache=False).logits
        actual = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
