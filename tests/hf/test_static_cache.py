"""ALiBiCache(capacity=...): steps of a patched model that a graph can replay."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn.hf import ALiBiCache, patch


@pytest.fixture
def model() -> BloomForCausalLM:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50)).eval()
    patch(model)
    return model


@torch.no_grad()
def test_logits_beyond_the_capacity_are_nan(model: BloomForCausalLM) -> None:
    cache, tokens = ALiBiCache(capacity=4), torch.randint(50, (1, 5))
    assert model(tokens[:, :4], past_key_values=cache).logits.isfinite().all()
    assert model(tokens[:, 4:], past_key_values=cache).logits.isnan().all()


@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
@torch.no_grad()
def test_beams_are_refused_with_a_sentence(change: str, model: BloomForCausalLM) -> None:
    cache = ALiBiCache(capacity=4)
    model(torch.randint(50, (2, 3)), past_key_values=cache)
    with pytest.raises(ValueError, match="a cache of a fixed capacity has no beams"):
        getattr(cache, change)(2 if change == "batch_repeat_interleave" else torch.tensor([1, 0]))
