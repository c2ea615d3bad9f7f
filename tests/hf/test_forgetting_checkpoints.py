"""Forgetting Transformers of flash-linear-attention in ALiBiForCausalLM, compared with their formulas in fp64."""

import copy
from pathlib import Path

import fox_oracle
import pytest
import torch
from encoder_oracle import write_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from alibi_attn.hf import ALiBiCache, ALiBiForCausalLM, record_attention

PLAIN = {}
PRO = {"qk_norm": True, "use_output_gate": True, "qkv_bias": True, "num_kv_heads": 2}
LENGTH = 40


def model_of(folder: Path, about: dict[str, object], **options: object) -> tuple[ALiBiForCausalLM, Tensor, Tensor]:
    """The model, token ids [2, T] and their logits by the formulas."""
    weights, about = fox_oracle.checkpoint(3, **about)
    model = ALiBiForCausalLM.from_pretrained(write_folder(folder / "fox", weights, about), **options)
    ids = torch.randint(1, 40, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    return model, ids, torch.stack([fox_oracle.logits(weights, about, row) for row in ids])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """fp32 against fp64: two layers, each a few hundred roundings of 6e-8."""
    worst = float((actual.double() - expected).abs().max() / expected.abs().max())
    assert worst < 5e-6, f"off by {worst:.1e} of the largest"


@torch.no_grad()
@pytest.mark.parametrize("about", [PLAIN, PRO], ids=["plain", "pro"])
def test_logits_and_cached_tokens_are_those_of_the_formulas(about: dict, tmp_path: Path) -> None:
    model, ids, expected = model_of(tmp_path, about)
    assert_close(model(ids).logits, expected)
    cache = ALiBiCache()
    steps = [model(part, past_key_values=cache).logits for part in ids.split([20, 9, *[1] * 11], dim=1)]
    assert_close(torch.cat(steps, dim=1), expected)
    cache.crop(25)
    cache.reorder_cache(torch.tensor([1, 0]))
    again = model(ids[[1, 0], 25:], past_key_values=copy.deepcopy(cache)).logits
    assert_close(again, expected[[1, 0], 25:])


@torch.no_grad()
def test_other_gates_norms_or_orders_would_be_noticed(tmp_path: Path) -> None:
    model, ids, expected = model_of(tmp_path, PRO)
    attention = model.layers[1].attention
    for changed in (attention.forget_proj.bias, attention.q_norm.weight, attention.gate_proj.weight):
        kept = changed.clone()
        changed.copy_(kept.roll(1, 0))
        with pytest.raises(AssertionError, match="off by"):
            assert_close(model(ids).logits, expected)
        changed.copy_(kept)
    assert_close(model(ids).logits, expected)


@torch.no_grad()
def test_padding_and_other_texts_forget_nothing(tmp_path: Path) -> None:
    model, ids, expected = model_of(tmp_path, PRO)
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


@pytest.mark.parametrize("way", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}], ids=str)
def test_every_way_of_generating_keeps_gates_with_their_keys(way: dict[str, int], tmp_path: Path) -> None:
    model, ids, _ = model_of(tmp_path, PRO)
    ids = ids[:1]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    beams = {name: number for name, number in way.items() if name == "num_beams"}
    expected = model.generate(ids, use_cache=False, **options, **beams)
    assert torch.equal(model.generate(ids, **options, **way), expected)


@pytest.mark.parametrize("name", ["forget_proj.weight", "forget_proj.bias", "q_norm.weight", "gate_proj.weight"])
def test_gradients_are_those_of_differences(name: str, tmp_path: Path) -> None:
    model, ids, _ = model_of(tmp_path, PRO, dtype=torch.float64)
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
def test_a_saved_model_is_read_again(tmp_path: Path) -> None:
    model, ids, expected = model_of(tmp_path, PRO)
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


def test_the_width_of_the_feed_forward_is_the_originals(tmp_path: Path) -> None:
    """256·⌈(2/3)·4·48/256⌉ = 256 by default."""
    weights, about = fox_oracle.checkpoint(3, intermediate_size=256)
    del about["intermediate_size"]
    model = ALiBiForCausalLM.from_pretrained(write_folder(tmp_path / "fox", weights, about))
    assert model.config.intermediate_size == 256
