"""Linear layers in int8: the formula in exact integers, one copy of the weights in int8, and errors instead of wrong numbers."""

import copy
import ctypes
import pickle

import numpy as np
import pytest
import torch
from encoder_oracle import config, random_state, write_folder, write_tokenizer
from quantized_checks import assert_rows_stay_apart, by_the_formula
from torch import nn
from torch.testing import assert_close
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn.hf import late_chunks, patch, sentence_transformer
from alibi_attn.nn.linear import quantized
from alibi_attn.nn.linear.quantized import QuantizedLinear

try:
    quantized.check_supported()
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (2, 300, 24)])
def test_outputs_are_those_of_the_formula(bias, shape):
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 40, bias=bias), torch.randn(*shape)
    with torch.no_grad():
        actual, expected = QuantizedLinear(layer)(x), by_the_formula(layer, x, "int8")
        # Where fp32 and fp64 divide to different sides of a half, a code is off by one: at most one step of one product.
        assert (actual - expected).abs().max() <= 0.01 * expected.abs().max()
        assert (actual - expected).abs().median() <= 1e-5 * expected.abs().max()
        assert (actual - layer(x)).norm() <= 0.02 * layer(x).norm()
        assert QuantizedLinear(layer)(x.bfloat16()).dtype == torch.bfloat16


def test_the_only_copy_of_the_weights_is_in_int8():
    layer = QuantizedLinear(nn.Linear(64, 256))
    tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert [x.dtype for x in tensors if x.numel() == 64 * 256] == [torch.int8]
    # Codes; scales, bias, zeros, sums.
    assert sum(x.numel() * x.element_size() for x in tensors) == 64 * 256 + 256 * (4 + 4 + 8 + 4)
    assert not list(layer.parameters())


def test_copies_pickles_and_casts_give_the_same_outputs():
    layer, x = QuantizedLinear(nn.Linear(24, 40)), torch.randn(3, 24)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).half()):
        assert torch.equal(other(x), layer(x))
    assert layer.state_dict()["codes"].shape == (40, 24)


def test_extreme_rows_stay_what_they_are():
    assert_rows_stay_apart("int8")


def test_what_cannot_run_in_int8_is_refused():
    layer = QuantizedLinear(nn.Linear(24, 40))
    with pytest.raises(ValueError, match=r"requires gradients; call the model under torch\.no_grad"):
        layer(torch.randn(2, 24, requires_grad=True))
    for x in (
        torch.ones(2, 24).long(),
        torch.ones(2, 24).cfloat(),
        torch.ones(2, 12),
        torch.ones(0, 12),
        torch.tensor(1.0),
    ):
        with pytest.raises(ValueError, match=r"real floating-point numbers, \[\.\.\., 24\]"):
            layer(x)
    for inputs, weight, message in (
        (24, float("nan"), "are not finite"),
        (24, -float("inf"), "are not finite"),
        (24, 1e37, "overflow fp32"),
        (140_000, 1.0, "140,000 inputs, but int8 takes 1 to 66,311"),
    ):
        broken = nn.Linear(inputs, 2)
        nn.init.constant_(broken.weight, weight)
        with pytest.raises(ValueError, match=message):
            QuantizedLinear(broken)


def test_sums_of_many_inputs_do_not_overflow():
    layer = nn.Linear(66_311, 1, bias=False)
    nn.init.ones_(layer.weight)
    for sign in (-1, 1):
        assert_close(QuantizedLinear(layer)(torch.full((1, 66_311), float(sign))), torch.tensor([[sign * 66_311.0]]))


def test_an_encoder_in_int8_has_almost_the_same_vectors(tmp_path):
    folder = write_tokenizer(write_folder(tmp_path / "jina", random_state("jina"), config("jina")))
    texts = ["a b c d e f g", "h i j", "k l m n o p a b c"]
    model = sentence_transformer(folder, dtype="int8")
    expected = torch.from_numpy(sentence_transformer(folder, device="cpu").encode(texts))
    vectors = torch.from_numpy(model.encode(texts))
    assert torch.nn.functional.cosine_similarity(vectors, expected).min() > 0.999
    assert not torch.equal(vectors, expected)
    linears = [module for module in model[0].auto_model.encoder.modules() if isinstance(module, nn.Linear)]
    assert not linears
    (chunks,) = late_chunks(model, [texts[0]])
    assert chunks.vectors.shape == (1, 48)
    with pytest.raises(ValueError, match="cannot be saved"):
        model.save(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="device is 'meta'"):
        sentence_transformer(folder, dtype="int8", device="meta")


def test_an_encoder_in_float8_has_similar_vectors(tmp_path, monkeypatch):
    """With the products of a GPU, which torch also has on a CPU."""
    monkeypatch.setitem(quantized._PRODUCTS, ("float8", "cpu"), quantized._PRODUCTS["float8", "cuda"])
    folder = write_tokenizer(write_folder(tmp_path / "jina", random_state("jina"), config("jina")))
    expected, vectors = (
        late_chunks(sentence_transformer(folder, dtype=dtype, device="cpu"), ["a b c d e f g"])[0].vectors
        for dtype in (None, "float8")
    )
    assert 0.99 < (vectors * expected).sum() / np.linalg.norm(vectors) / np.linalg.norm(expected) < 1 - 1e-6


def test_a_patched_model_in_int8_frees_its_weights_and_cannot_be_undone():
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=100)).eval()
    ids = torch.randint(1, 100, (1, 40))  # 0 pads
    with torch.no_grad():
        expected = model(ids).logits
        handle = patch(model, linears="int8")
        assert len(handle.linears) == 8
        assert (model(ids).logits - expected).norm() <= 0.03 * expected.norm()
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 8
    assert model.generate(ids, max_new_tokens=2, pad_token_id=0).shape == (1, 42)
    with pytest.raises(ValueError, match="has freed the original weights"):
        handle.undo()
    with pytest.raises(ValueError, match="without one"), handle:
        pass
    for options in ({"linears": "int4"}, {"linears": "int8", "numerics": "checkpoint"}):
        with pytest.raises(ValueError, match="linears"):
            patch(BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=9)), **options)


def test_weights_that_cannot_be_converted_leave_a_model_unpatched():
    model = BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=9))
    nn.init.constant_(model.transformer.h[0].mlp.dense_4h_to_h.weight, float("nan"))
    with pytest.raises(ValueError, match="are not finite"):
        patch(model, linears="int8")
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    patch(model).undo()


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (256, 64)])
def test_the_address_of_the_blocks_is_that_of_the_codes(inputs, outputs):
    """oneDNN's layout is checked, not assumed: the address is 0 if it has another one, or pads."""
    layer = QuantizedLinear(nn.Linear(inputs, outputs))
    assert torch.equal(layer.sums, 128 * layer.codes().sum(1, dtype=torch.int32))
    assert quantized._address_of_blocks(layer.packed, layer.codes().flip(0)) == 0
    assert QuantizedLinear(nn.Linear(inputs, outputs - 8)).blocks == 0
    if layer.blocks:
        stored = np.ctypeslib.as_array((ctypes.c_int8 * (inputs * outputs)).from_address(layer.blocks))
        assert stored[4 * 3 + 2] == layer.codes()[3, 2]
        assert stored[4 * 64 * 5 + 4 * 7 + 1] == layer.codes()[7, 4 * 5 + 1]
