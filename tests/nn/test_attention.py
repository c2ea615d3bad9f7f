"""The attention layer and the bias module: compared with plain linear algebra in every dtype, and their errors."""

import math

import pytest
import torch
from layer_oracle import by_formula
from refusals import assert_refused

from alibi_attn import ALiBiAttention, ALiBiPositionalBias, KVCache, alibi_bias, alibi_slopes, interpolate_slopes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "num_kv_heads": 2},
        {"causal": False, "num_kv_heads": 1},
        {"window": 3, "qk_norm": True},
        {"causal": False, "window": 2, "slopes": [0.0, 0.3, -0.2, 1.0, 0.5, 0.25]},
    ],
)
def test_the_layer_is_the_formula_of_the_paper(options):
    torch.manual_seed(1)
    layer = ALiBiAttention(24, 6, **options)
    if layer.q_norm is not None:
        torch.nn.init.uniform_(layer.q_norm.weight, 0.5, 2.0)
        torch.nn.init.uniform_(layer.k_norm.weight, 0.5, 2.0)
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(layer(x).double(), by_formula(layer, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", ["slopes one head on", "window one more", "not causal"])
def test_the_comparison_fails_for_a_wrong_layer(wrong):
    torch.manual_seed(1)
    layer, x = ALiBiAttention(24, 6, window=4), torch.randn(1, 7, 24)
    truth = by_formula(layer, x)
    if wrong == "slopes one head on":
        layer.slopes.values.copy_(layer.slopes.values.roll(1))
    layer.window = 5 if wrong == "window one more" else layer.window
    layer.causal = wrong != "not causal"
    assert (layer(x) - truth).abs().max() > 1e-3


def test_alibi_adds_no_parameters_and_the_state_dict_reads_well():
    layer = ALiBiAttention(64, 8, num_kv_heads=2, bias=True, qk_norm=True)
    plain = [f"{name}_proj.{part}" for name in ("q", "k", "v", "out") for part in ("weight", "bias")]
    assert sorted(layer.state_dict()) == sorted([*plain, "q_norm.weight", "k_norm.weight"])
    linear_maps = ALiBiAttention(64, 8)
    assert sum(p.numel() for p in linear_maps.parameters()) == 4 * 64 * 64
    learned = ALiBiAttention(64, 8, learn_slopes=True)
    assert sum(p.numel() for p in learned.parameters()) == 4 * 64 * 64 + 8
    assert "slopes.values" in learned.state_dict()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.to(torch.zeros((), dtype=torch.bfloat16)),
        lambda m: m.half().float(),
        lambda m: torch.nn.Sequential(m).half()[0],
    ],
)
def test_slopes_stay_fp32_to_the_last_bit_whatever_the_model_is_cast_to(cast, learned):
    exact = torch.tensor(alibi_slopes(12), dtype=torch.float32)
    layer = ALiBiAttention(24, 12, learn_slopes=learned)
    layer.slopes.values.grad = exact.clone() if learned else None
    layer = cast(layer)
    assert torch.equal(layer.slopes.values, exact)
    assert not learned or torch.equal(layer.slopes.values.grad, exact)
    assert isinstance(layer.slopes.values, torch.nn.Parameter) == learned
    module = cast(ALiBiPositionalBias(12))
    assert torch.equal(module.slopes.values, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_give_the_same_to_their_rounding(dtype):
    torch.manual_seed(0)
    layer, x = ALiBiAttention(24, 6, qk_norm=True), torch.randn(2, 9, 24)
    expected = layer(x)
    output = layer.to(dtype)(x.to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, rtol=0.03, atol=0.02)


def test_a_model_made_on_the_meta_device_gets_its_slopes_back():
    with torch.device("meta"):
        layer = ALiBiAttention(24, 6)
    assert layer.slopes.values.is_meta
    layer.to_empty(device="cpu")
    assert torch.equal(layer.slopes.values, ALiBiAttention(24, 6).slopes.values)


def test_loading_a_checkpoint_keeps_interpolated_slopes():
    trained = ALiBiAttention(24, 6)
    longer = ALiBiAttention(24, 6, slopes=interpolate_slopes(alibi_slopes(6), 512, 2048))
    longer.load_state_dict(trained.state_dict())
    torch.testing.assert_close(longer.slopes.values, trained.slopes.values / 4)


def test_learned_slopes_receive_the_gradient_of_the_definition():
    torch.manual_seed(0)
    layer, x = ALiBiAttention(24, 6, learn_slopes=True).double(), torch.randn(2, 8, 24, dtype=torch.float64)
    outputs = layer(x), by_formula(layer, x)
    found, expected = (torch.autograd.grad(y.square().sum(), layer.slopes.values) for y in outputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    layer, x = ALiBiAttention(24, 6, dropout_p=0.5), torch.randn(1, 9, 24)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_masked_keys_and_keys_of_other_segments_change_nothing():
    torch.manual_seed(0)
    layer, x = ALiBiAttention(24, 6), torch.randn(2, 8, 24)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[:, :3] = False  # left padding
    torch.testing.assert_close(layer(x, key_mask=mask)[:, 3:], layer(x[:, 3:]), rtol=1e-5, atol=1e-6)
    packed = layer(x, segment_ids=torch.tensor([[0] * 3 + [1] * 5] * 2))
    separate = torch.cat([layer(x[:, :3]), layer(x[:, 3:])], dim=1)
    torch.testing.assert_close(packed, separate, rtol=1e-5, atol=1e-6)


def test_training_and_decoding_compile():
    torch.manual_seed(0)
    layer, x = ALiBiAttention(24, 6, num_kv_heads=2, qk_norm=True), torch.randn(1, 6, 24)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        cache = KVCache()
        steps = torch.cat([compiled(token, cache=cache) for token in x.split([3, 1, 1, 1], dim=1)], dim=1)
        torch.testing.assert_close(steps, layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_the_bias_module_takes_any_lengths_and_keeps_nothing(causal):
    module = ALiBiPositionalBias(12, causal=causal)
    for lengths in ((1,), (5,), (3, 70), (4000, 2), (1, 100_000)):
        assert torch.equal(module(*lengths), alibi_bias(module.slopes.values, *lengths, causal=causal))
    assert sum(buffer.numel() for buffer in module.buffers()) == 12
    assert module.state_dict() == {}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"embed_dim": 25}, ValueError, "embed_dim is 25 but must be a multiple of num_heads, 6"),
        ({"num_heads": 0}, ValueError, "num_heads is 0"),
        ({"num_heads": 6.0}, TypeError, "integer"),
        ({"num_kv_heads": 4}, ValueError, "num_kv_heads is 4 but must divide num_heads, 6"),
        ({"window": 0}, ValueError, "window is 0 but counts the query itself"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p is 1.0 but must be in \[0, 1\)"),
        ({"slopes": [0.5] * 8}, ValueError, r"slopes has shape \[8\] but there are 6 heads"),
        ({"slopes": [0.5] * 5 + [math.nan]}, ValueError, "slopes must be finite"),
    ],
)
def test_wrong_arguments_raise_errors_that_say_what_is_allowed(arguments, error, message):
    with pytest.raises(error, match=message):
        ALiBiAttention(**{"embed_dim": 24, "num_heads": 6, **arguments})


def test_wrong_inputs_raise_errors_that_say_what_is_allowed():
    layer, x, cache = ALiBiAttention(24, 6), torch.randn(2, 4, 24), KVCache()
    seen, of_all_keys = torch.ones(2, 4).bool(), r" has shape \[2, 4\] but must be \[B, S\] = \[2, 8\].* the 4 cached"
    layer(x, cache=cache)
    assert_refused(
        (r"x has shape \[2, 4\] but must be \[B, T, 24\]", lambda: layer(x[..., 0])),
        ("with T ≥ 1", lambda: layer(x[:, :0])),
        ("cache needs causal=True", lambda: ALiBiAttention(24, 6, causal=False)(x, cache=KVCache())),
        (f"key_mask{of_all_keys}", lambda: layer(x, cache=cache, key_mask=seen)),
        (f"segment_ids{of_all_keys}", lambda: layer(x, cache=cache, segment_ids=seen)),
    )
    assert_refused(
        ("pass embeddings, not token numbers", lambda: layer(x.long())),
        ("x is a list", lambda: layer([1.0])),
        (r"cache is a dict but must be a KVCache\(\)", lambda: layer(x, cache={})),
        ("key_mask is float32 but must be bool", lambda: layer(x, cache=cache, key_mask=torch.ones(2, 8))),
        ("segment_ids is float32 but must hold int", lambda: layer(x, cache=cache, segment_ids=torch.ones(2, 8))),
        error=TypeError,
    )
    assert len(cache) == 4  # a refused pass leaves the cache as it was


def test_an_input_of_another_dtype_is_refused_outside_of_autocast():
    layer = ALiBiAttention(16, 2)
    with pytest.raises(TypeError, match=r"x is torch.bfloat16 but the layer's weights are torch.float32; pass x.to"):
        layer(torch.zeros(1, 3, 16, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(1, 3, 16)).dtype == torch.bfloat16
        layer(torch.zeros(1, 3, 16, dtype=torch.bfloat16))
