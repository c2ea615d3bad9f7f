"""A patched model equals the original: logits, padding, caches, generation; undoing restores every bit."""

import copy
import dataclasses
import functools
import pickle

import pytest
import torch
from closeness import assert_within
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from alibi_attn.hf import patch

FAMILIES = ["bloom", "mpt", "falcon"]
SHAPES = [*FAMILIES, "falcon multi-query", "falcon new"]


pytestmark = pytest.mark.usefixtures("no_gradients")


assert_same = functools.partial(assert_within, share=1e-5)


def numerics_of(family: str) -> str:
    """Falcon rounds its slopes to bf16 in every dtype, so that equality needs its rounding."""
    return "checkpoint" if family.startswith("falcon") else "exact"


def padded(batch: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """(tokens, mask) whose rows are 0, 3, 6, … tokens shorter."""
    tokens, mask = batch.clone(), torch.ones_like(batch)
    for row in range(len(batch)):
        empty = slice(0, 3 * row) if side == "left" else slice(batch.shape[1] - 3 * row, None)
        tokens[row, empty], mask[row, empty] = 0, 0
    return tokens, mask


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits_are_those_of_the_unpatched_model(family, side, build, tokens):
    model, ids = build(family), tokens(3, 40)
    ids, mask = (ids, None) if side is None else padded(ids, side)
    expected = model(ids, attention_mask=mask).logits
    with patch(model, numerics=numerics_of(family)):
        actual = model(ids, attention_mask=mask).logits
    shown = torch.ones_like(ids) if mask is None else mask
    assert_same(actual[shown.bool()], expected[shown.bool()])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_notices_slopes_that_are_off(family, build, tokens):
    model, ids = build(family), tokens(2, 40)
    expected = model(ids).logits
    with patch(model, numerics=numerics_of(family)):
        assert_same(model(ids).logits, expected)
    for name in patch(model).layers:
        layer = model.get_submodule(name)
        slopes = [slope * 1.01 for slope in layer.alibi_settings.slopes]
        layer.alibi_settings = dataclasses.replace(layer.alibi_settings, slopes=tuple(slopes))
    with pytest.raises(AssertionError, match="of the largest"):
        assert_same(model(ids).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_square_is_built(family, build, tokens, largest):
    model, ids = build(family, **({"max_seq_len": 2048} if family == "mpt" else {})), tokens(1, 1500)
    vocabulary_or_width = (4 * 48, 60, 3 * 48 * 2)  # feed-forward, vocabulary, fused projections
    with patch(model):
        built = largest(lambda: model(ids, attention_mask=torch.ones_like(ids)))
    assert built <= 1.1 * 1500 * max(vocabulary_or_width)
    if family == "bloom":
        assert largest(lambda: model(ids)) >= 1500 * 1500  # the check detects them


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_generations_are_the_same(family, options, build, tokens):
    model = build(family)
    ids, mask = padded(tokens(3, 14), "left")
    asked = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, **options}
    expected = model.generate(ids, **{**asked, "cache_implementation": None})
    with patch(model, numerics=numerics_of(family)):
        assert torch.equal(model.generate(ids, **asked), expected)


def unpickled(saved: object) -> object:
    return pickle.loads(pickle.dumps(saved))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("numerics", ["exact", "checkpoint"])
@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled], ids=["deepcopy", "pickle"])
def test_a_copied_model_is_patched_and_undone_independently(family, numerics, copied, build, tokens):
    model, (ids, mask) = build(family), padded(tokens(2, 20), "left")
    unpatched = model(ids, attention_mask=mask).logits
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    handle = patch(model, numerics=numerics)
    expected = model(ids, attention_mask=mask).logits
    twin, twins_handle = copied((model, handle))
    with pytest.raises(ValueError, match="is patched already"):
        patch(twin)
    handle.undo()
    assert torch.equal(model(ids, attention_mask=mask).logits, unpatched)
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(twin(ids, attention_mask=mask).logits, expected)  # from its own layers, not the original's
    twins_handle.undo()
    assert torch.equal(twin(ids, attention_mask=mask).logits, unpatched)
    assert {name: set(vars(module)) for name, module in twin.named_modules()} == before


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_a_patched_model_builds_an_unpatched_one(family, build, tokens):
    model, ids = build(family), tokens(2, 20)
    expected, other = model(ids).logits, type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    with patch(model):
        patched = model(ids).logits
        fresh, body = type(model)(model.config).eval(), type(model.transformer)(model.transformer.config).eval()
        fresh.load_state_dict(model.state_dict())
        body.load_state_dict(model.transformer.state_dict())
        for logits in (other(ids).logits, fresh(ids).logits, model.lm_head(body(ids)[0])):
            assert torch.equal(logits, expected)
        assert other.config._attn_implementation in ("eager", "sdpa")
        assert torch.equal(model(ids).logits, patched)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_saves_what_it_was_loaded_from(family, build, tokens, tmp_path):
    model, ids = build(family), tokens(1, 20)
    expected = model(ids).logits
    with patch(model):
        model.save_pretrained(tmp_path)
        model.config.use_cache = not model.config.use_cache  # a change of the user's own survives undo()
        wanted = model.config.use_cache
    assert model.config.use_cache == wanted
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config._attn_implementation in ("eager", "sdpa")
    assert_same(again(ids).logits, expected)


def test_a_bare_body_and_a_wrapped_model_are_found(build, tokens):
    model, ids = build("bloom"), tokens(1, 10)
    with patch(model.transformer) as handle:
        assert handle.layers == ("h.0.self_attention", "h.1.self_attention")
        model(ids)
    with patch(torch.nn.ModuleDict({"a": model, "b": build("mpt")})) as handle:
        assert handle.layers[0] == "a.transformer.h.0.self_attention"
        assert handle.layers[-1] == "b.transformer.blocks.1.attn"


def test_logits_of_padding_only_rows_are_numbers(build, tokens):
    for family in FAMILIES:
        model, ids = build(family), tokens(2, 8)
        mask = torch.ones_like(ids)
        with patch(model):
            alone = model(ids[:1], attention_mask=mask[:1]).logits
            mask[1] = 0
            both = model(ids, attention_mask=mask).logits
        assert both.isfinite().all()
        assert_same(both[:1], alone)


def is_invariant(model, dtype: torch.dtype) -> bool:
    """Whether the products of this processor do not depend on the number of rows, for every linear layer of the model."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            x = torch.randn(3, 40, module.in_features, dtype=dtype)
            together, alone = (torch.cat([linear(part, module.weight) for part in x.split(n)]) for n in (3, 1))
            if not torch.equal(together, alone):
                return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_logits_alone_and_in_a_batch(family, build, tokens):
    model, ids = build(family), tokens(3, 40)
    if not is_invariant(model, torch.float32):
        pytest.skip("torch's linear layers round by the number of rows on this processor")
    mask = torch.arange(40) >= torch.tensor([[0], [7], [20]])
    patch(model, backend="native")
    whole = model(ids, attention_mask=mask.long(), use_cache=False).logits
    for row in range(3):
        alone = model(ids[row : row + 1], attention_mask=mask[row : row + 1].long(), use_cache=False).logits
        assert torch.equal(whole[row : row + 1], alone)
