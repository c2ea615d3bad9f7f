"""ALiBiForCausalLM compared with the outputs of the original code, and with its formulas in fp64."""

import dataclasses
import functools
import math

import pytest
import torch
from closeness import assert_within
from decoder_checkpoints import NAMES, choices, loaded, original, seen
from decoder_oracle import logits as formula

from alibi_attn.hf import ALiBiForCausalLM

pytestmark = pytest.mark.usefixtures("no_gradients")
ROUNDED = [name for name in NAMES if not name.startswith("mpt")]


# fp32 against fp64 or another order of fp32: two layers, each a few hundred roundings of 6e-8.
assert_close = functools.partial(assert_within, share=3e-6)


@pytest.fixture
def load(tmp_path):
    """load("jais", numerics=…, about={config changes}) -> (its files, the model)"""
    return functools.partial(loaded, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_original_code(name, load):
    files, model = load(name)
    numbers = files.numbers
    actual = model(numbers["input_ids"], attention_mask=numbers["attention_mask"]).logits
    assert_close(seen(numbers, actual), seen(numbers, numbers["logits"]))
    by_formula = formula(files.weights, files.config, numbers["input_ids"], numbers["attention_mask"], **choices(name))
    assert_close(seen(numbers, numbers["logits"]), seen(numbers, by_formula))


def test_another_slope_scale_or_head_would_be_noticed(load):
    files, model = load("baichuan2")
    numbers = files.numbers
    expected = seen(numbers, formula(files.weights, files.config, numbers["input_ids"], numbers["attention_mask"]))
    with pytest.raises(AssertionError, match="off by"):  # the head as stored
        assert_close(seen(numbers, numbers["logits"]), expected)
    for layer in model.layers:
        slopes = layer.attention.alibi_settings.slopes
        layer.attention.alibi_settings = dataclasses.replace(
            layer.attention.alibi_settings, slopes=slopes[1:] + slopes[:1]
        )
    with pytest.raises(AssertionError, match="off by"):
        assert_close(model(numbers["input_ids"]).logits[0], numbers["logits"][0])


@pytest.mark.parametrize("name", ROUNDED)
def test_the_checkpoints_numerics_round_where_the_original_rounds(name, load):
    """In bf16, where m·j loses digits beyond 256 positions; the rows exceed one block of the computation."""
    errors = {}
    for numerics in ("exact", "checkpoint"):
        files, model = load(name, dtype=torch.bfloat16, numerics=numerics)
        actual = model(files.numbers["long_input_ids"], logits_to_keep=20).logits
        errors[numerics] = float((actual.float() - files.numbers["long_logits"].float()).abs().mean())
    # 0 if norms and softmax sum in the same order as on the machine that made the file. With shorter vectors,
    # some roundings differ, by up to a third of the biases' roundings in jais, whose slopes have few digits.
    same = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert errors["checkpoint"] < (0.2 if same or name != "jais" else 0.5) * errors["exact"]


@pytest.mark.parametrize("name", ["mpt-grouped"])
def test_mpt_has_no_rounding_to_reproduce(name, load):
    files, model = load(name, dtype=torch.bfloat16)
    _, same = load(name, dtype=torch.bfloat16, numerics="checkpoint")
    ids = files.numbers["long_input_ids"]
    assert torch.equal(model(ids).logits, same(ids).logits)
    error = (model(ids, logits_to_keep=20).logits.float() - files.numbers["long_logits"].float()).abs().max()
    assert error < 16 * torch.finfo(torch.bfloat16).eps * files.numbers["long_logits"].abs().max()


TRAINED = {"baichuan2": "model_max_length", "btlm": "n_positions", "mpt-grouped": "max_seq_len"}


@pytest.mark.parametrize(("name", "length"), [*((name, 1) for name in NAMES), *((name, 200) for name in TRAINED)])
def test_one_token_and_texts_far_past_the_trained_length(name, length, load):
    files, model = load(name, about={TRAINED.get(name, "unused"): 32})
    ids = torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(length))
    assert_close(model(ids).logits, formula(files.weights, files.config, ids, **choices(name)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_is_computed_in(dtype, load):
    files, model = load("baichuan2", dtype=dtype)
    ids = files.numbers["input_ids"]
    expected, actual = formula(files.weights, files.config, ids, normalized_head=True), model(ids).logits
    assert actual.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 1e-7)  # slopes are fp32
    assert (actual.double() - expected).abs().max() < 16 * eps * expected.abs().max()


def test_masks_with_holes_keep_their_distances(load):
    files, model = load("btlm")
    ids = files.numbers["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 4:9] = 0
    mask[1, ::3] = 0
    expected = formula(files.weights, files.config, ids, mask)[mask.bool()]
    assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected)


def test_slopes_come_from_the_checkpoint(load, tmp_path):
    files, model = load("jais")
    stored = files.weights["transformer.relative_pe.slopes"]
    assert model.config.slopes == [float(slope) for slope in stored.flatten().double()]
    files.weights["transformer.relative_pe.slopes"] = stored * 3
    changed = ALiBiForCausalLM.from_pretrained(files.write(tmp_path / "changed"))
    ids = files.numbers["input_ids"]
    assert_close(changed(ids).logits, formula(files.weights, files.config, ids))
    assert (changed(ids).logits - model(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0}, {"type": "linear", "train_seq_len": 16}])
def test_slopes_are_stretched_as_the_config_says(scaling, load):
    files, model = load("btlm", about={"alibi_scaling": scaling})
    for length in (9, 16, 50):
        ids = files.numbers["long_input_ids"][:, :length]
        assert_close(model(ids).logits, formula(files.weights, files.config, ids))


def test_a_step_with_slopes_by_length_has_those_of_all_keys(tmp_path):
    """One layer, whose keys do not depend on slopes; in more layers cached keys stay unchanged, as in the original."""
    files = original("btlm")
    files.config |= {"alibi_scaling": {"type": "linear", "train_seq_len": 8}, "n_layer": 1}
    files.weights = {name: tensor for name, tensor in files.weights.items() if ".h.1." not in name}
    model = ALiBiForCausalLM.from_pretrained(files.write(tmp_path))
    ids = files.numbers["long_input_ids"][:, :20]
    cache = model(ids[:, :19], use_cache=True).past_key_values
    step = model(ids[:, 19:], past_key_values=cache).logits
    assert_close(step[:, -1], formula(files.weights, files.config, ids)[:, -1])


def test_the_lengths_of_a_normalized_head_do_not_matter(load):
    files, model = load("baichuan2")
    ids, before = files.numbers["input_ids"], model.lm_head.weight.clone()
    expected = model(ids).logits
    model.lm_head.weight.mul_(torch.linspace(0.5, 30, 60)[:, None])
    assert_close(model(ids).logits, expected)
    model.lm_head.weight.copy_(before)
    assert torch.equal(model(ids).logits, expected)
    assert not math.isclose(float(before.norm(dim=1).mean()), 1.0, rel_tol=0.1)


@pytest.mark.parametrize("name", ["baichuan2", "jais", "mpt-grouped"])
@torch.enable_grad()
def test_gradients_are_those_of_the_formula(name, load):
    files, model = load(name)
    ids, mask = files.numbers["input_ids"], files.numbers["attention_mask"]
    target = torch.randn((*ids.shape, 60), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target *= mask[..., None]
    embedding = next(key for key in files.weights if key.endswith(("wte.weight", "embed_tokens.weight")))
    weights = {key: tensor.double() for key, tensor in files.weights.items()}
    weights[embedding].requires_grad_()
    (formula(weights, files.config, ids, mask, **choices(name)) * target).sum().backward()
    (model(ids, attention_mask=mask).logits * target).sum().backward()
    expected = weights[embedding].grad
    assert (model.embed_tokens.weight.grad - expected).abs().max() < 1e-5 * expected.abs().max()
