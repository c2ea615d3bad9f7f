"""Forgetting Transformers of flash-linear-attention and of the authors in ALiBiForCausalLM equal their formulas in fp64."""

import copy
import functools
from pathlib import Path

import fox_oracle
import pytest
import torch
from closeness import assert_within
from encoder_oracle import write_folder
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from alibi_attn.hf import ALiBiCache, ALiBiCausalLMConfig, ALiBiForCausalLM, record_attention

PLAIN = {}
PRO = {"qk_norm": True, "use_output_gate": True, "qkv_bias": True, "num_kv_heads": 2}
AUTHORS = {"model_type": fox_oracle.AUTHORS}
AUTHORS_PRO = {
    **AUTHORS,
    "qk_norm": True,
    "use_output_gate": True,
    "use_output_norm": True,
    "use_k_shift": True,
    "use_v_shift": True,
}
FIRST_PRO = {**AUTHORS_PRO, "qk_norm_share_param_across_head": True, "use_v_shift": False, "norm_eps": 1e-2}
KINDS = {"plain": PLAIN, "pro": PRO, "authors": AUTHORS, "authors-pro": AUTHORS_PRO, "authors-first-pro": FIRST_PRO}
PARTS = ("forget_proj", "q_norm", "gate_proj", "key_shift.proj", "value_shift.proj", "output_norm")
LENGTH = 40


def model_of(folder: Path, about: dict[str, object], **options: object) -> tuple[ALiBiForCausalLM, Tensor, Tensor]:
    """The model, token ids [2, T] and their logits by the formulas."""
    weights, said = fox_oracle.checkpoint(3, **about)
    model = ALiBiForCausalLM.from_pretrained(write_folder(folder / "fox", weights, said), **options)
    return model, *ids_and_logits(tuple(about.items()))


@functools.cache
def ids_and_logits(items: tuple[tuple[str, object], ...]) -> tuple[Tensor, Tensor]:
    weights, said = fox_oracle.checkpoint(3, **dict(items))
    ids = torch.randint(1, 40, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    return ids, torch.stack([fox_oracle.logits(weights, said, row) for row in ids])


# fp32 against fp64: two layers, each a few hundred roundings of 6e-8.
assert_close = functools.partial(assert_within, share=5e-6)


@torch.no_grad()
@pytest.mark.parametrize("about", KINDS.values(), ids=KINDS)
def test_logits_and_cached_tokens_are_those_of_the_formulas(about: dict, tmp_path: Path) -> None:
    model, ids, expected = model_of(tmp_path, about)
    assert_close(model(ids).logits, expected)
    exact = ALiBiForCausalLM.from_pretrained(tmp_path / "fox", dtype=torch.float64)(ids).logits
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)
    cache = ALiBiCache()
    steps = [model(part, past_key_values=cache).logits for part in ids.split([20, 9, *[1] * 11], dim=1)]
    assert_close(torch.cat(steps, dim=1), expected)
    cache.crop(25)
    cache.reorder_cache(torch.tensor([1, 0]))
    again = model(ids[[1, 0], 25:], past_key_values=copy.deepcopy(cache)).logits
    assert_close(again, expected[[1, 0], 25:])


@torch.no_grad()
@pytest.mark.parametrize("about", [PRO, AUTHORS_PRO], ids=["pro", "authors-pro"])
def test_other_gates_norms_or_orders_would_be_noticed(about: dict, tmp_path: Path) -> None:
    model, ids, expected = model_of(tmp_path, about)
    attention = model.layers[1].attention
    owned = {name for name, _ in attention.named_parameters()}
    for changed in (attention.get_parameter(f"{part}.weight") for part in PARTS if f"{part}.weight" in owned):
        kept = changed.clone()
        changed.copy_(kept.roll(1, 0))
        with pytest.raises(AssertionError, match="off by"):
            assert_close(model(ids).logits, expected)
        changed.copy_(kept)
    assert_close(model(ids).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("about", [PRO, AUTHORS_PRO], ids=["pro", "authors-pro"])
def test_padding_and_other_texts_forget_nothing(about: dict, tmp_path: Path) -> None:
    model, ids, expected = model_of(tmp_path, about)
    hidden = 13
    mask = torch.ones(2, LENGTH + hidden, dtype=torch.int64)
    mask[:, :hidden] = 0
    padded = torch.nn.functional.pad(ids, (hidden, 0))
    assert_close(model(padded, attention_mask=mask).logits[:, hidden:], expected)
    tokens = model.generate(padded, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens[:, hidden:], plain)
    texts = torch.arange(2).repeat_interleave(LENGTH)[None]
    assert_close(model(ids.reshape(1, -1), segment_ids=texts).logits[0], expected.flatten(0, 1))


@pytest.mark.parametrize("about", [PRO, AUTHORS_PRO], ids=["pro", "authors-pro"])
@pytest.mark.parametrize("way", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}], ids=str)
def test_every_way_of_generating_keeps_gates_with_their_keys(way: dict[str, int], about: dict, tmp_path: Path) -> None:
    model, ids, _ = model_of(tmp_path, about)
    ids = ids[:1]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    beams = {name: number for name, number in way.items() if name == "num_beams"}
    expected = model.generate(ids, use_cache=False, **options, **beams)
    assert torch.equal(model.generate(ids, **options, **way), expected)


@pytest.mark.parametrize("name", ["forget_proj.bias", *(f"{part}.weight" for part in PARTS)])
def test_gradients_are_those_of_differences(name: str, tmp_path: Path) -> None:
    model, ids, _ = model_of(tmp_path, AUTHORS_PRO, dtype=torch.float64)
    weight = model.layers[0].attention.get_parameter(name)

    def loss() -> Tensor:
        return model(ids, use_cache=False).logits.logsumexp(-1).square().mean()

    (gradient,) = torch.autograd.grad(loss(), [weight])
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    step = 1e-5
    with torch.no_grad():
        weight += step * direction
        above = loss()
        weight -= 2 * step * direction
        slope = (above - loss()) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, atol=1e-8, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("about", [PRO, AUTHORS_PRO], ids=["pro", "authors-pro"])
def test_a_saved_model_is_read_again(about: dict, tmp_path: Path) -> None:
    model, ids, expected = model_of(tmp_path, about)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_close(again(ids).logits, expected)
    half = ALiBiForCausalLM.from_pretrained(tmp_path / "fox", dtype=torch.bfloat16)
    assert (half(ids).logits.double() - expected).abs().max() < 0.1 * expected.abs().max()


@torch.no_grad()
def test_what_the_gates_do_not_support_is_refused(tmp_path: Path) -> None:
    model, ids, _ = model_of(tmp_path, PLAIN)
    with pytest.raises(
        ValueError, match="forget gates need an ALiBiCache, which stores them, but the cache is a Dynamic"
    ):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="prefix_len and positions do not exist for a model with forget gates"):
        model(ids, prefix_len=torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="gates"):
        model(ids, past_key_values=ALiBiCache(tmp_path / "files"))
    with pytest.raises(ValueError, match="do not support forget gates"), record_attention(model, rows=[3]):
        model(ids)
    with pytest.raises(ValueError, match="window_size = 16 but only None is supported"):
        model_of(tmp_path / "window", {"window_size": 16})
    for option, value in (("use_rope", True), ("fgate_type", "bias_only"), ("ogate_act", "silu")):
        with pytest.raises(ValueError, match=rf"{option} = {value!r} but only .* is supported"):
            model_of(tmp_path / option, {**AUTHORS, option: value})
    shifted, ids, _ = model_of(tmp_path / "shifted", AUTHORS_PRO)
    with pytest.raises(ValueError, match="does not store keys before their shift; use ALiBiCache"):
        shifted(ids, past_key_values=ALiBiCache(forget=True))
    with pytest.raises(StrictDataclassError, match="key_shift is True but must be False without forget_gate"):
        ALiBiCausalLMConfig(key_shift=True)


def test_the_width_of_the_feed_forward_is_the_originals(tmp_path: Path) -> None:
    """256·⌈(2/3)·4·48/256⌉ = 256 by default."""
    weights, about = fox_oracle.checkpoint(3, intermediate_size=256)
    del about["intermediate_size"]
    model = ALiBiForCausalLM.from_pretrained(write_folder(tmp_path / "fox", weights, about))
    assert model.config.intermediate_size == 256


@torch.no_grad()
@pytest.mark.parametrize("others", [{}, {"score.weight": torch.ones(2, 48)}], ids=["complete", "with-a-head"])
@pytest.mark.parametrize("missing", [None, "model.layers.1.attn.k_proj.shift_proj.weight"])
def test_folders_with_more_heads_and_fewer_weights(others: dict, missing: str | None, tmp_path: Path, caplog) -> None:
    weights, about = fox_oracle.checkpoint(3, **AUTHORS_PRO)
    ids = torch.arange(12)
    expected = fox_oracle.logits(weights, about, ids)
    stored = {name: x for name, x in weights.items() if name != missing}
    folder = write_folder(tmp_path / "fox", stored | others, about)
    if missing is None:
        assert_close(ALiBiForCausalLM.from_pretrained(folder)(ids[None]).logits[0], expected)
        assert ["score.weight" in line for line in caplog.messages if "another head" in line] == [True] * len(others)
    else:
        with pytest.raises(ValueError, match=rf"is not the FoX that .*: the weights {missing} are missing"):
            ALiBiForCausalLM.from_pretrained(folder)
