"""ALiBiCache(capacity=...): steps of a patched model that a graph can replay."""

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn import alibi_attention
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms, in_tiles
from alibi_attn.attention.run import decoding
from alibi_attn.hf import ALiBiCache, patch
from alibi_attn.nn.cache import fixed


@pytest.fixture
def model() -> BloomForCausalLM:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50)).eval()
    patch(model)
    return model


@torch.no_grad()
def test_generate_gives_the_same_tokens(model: BloomForCausalLM) -> None:
    tokens, options = torch.randint(50, (2, 9)), {"max_new_tokens": 7, "pad_token_id": 0, "do_sample": False}
    generated = model.generate(tokens, past_key_values=ALiBiCache(capacity=16), **options)
    assert torch.equal(generated, model.generate(tokens, **options))


@torch.no_grad()
def test_a_left_padded_batch_generates_the_same_tokens(model: BloomForCausalLM) -> None:
    tokens, mask = torch.randint(50, (2, 9)), (torch.arange(9) >= torch.tensor([[0], [4]])).long()
    options = {"max_new_tokens": 7, "pad_token_id": 0, "do_sample": False, "attention_mask": mask}
    generated = model.generate(tokens, past_key_values=ALiBiCache(capacity=16), **options)
    assert torch.equal(generated, model.generate(tokens, **options))


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


@torch.no_grad()
def test_a_device_reads_near_keys_by_the_norms(model: BloomForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with kernels that read near keys: they get the position, and bounds of all norms up to it."""
    positions = []

    def attend_at(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor,
        norms: Norms,
        first: Tensor,
        *,
        window: None,
        scale: float,
    ) -> Tensor:
        positions.append(int(first))
        for rows, bounds in ((key, norms.keys), (value, norms.values)):
            assert (in_tiles(rows.double().norm(dim=-1)).amax(-1) <= bounds).all()
        last = int(first) + query.shape[2] - 1
        assert (norms.keys[..., last // TILE + 1 :] == 0).all()
        return alibi_attention(query, key, value, slopes, scale=scale, query_offset=first)

    monkeypatch.setattr(fixed, "skips_on_device", lambda key: True)
    monkeypatch.setattr(decoding, "reads_near_at", lambda query: True)
    monkeypatch.setattr(decoding, "attend_at", attend_at)
    tokens, cache = torch.randint(50, (2, 70)), ALiBiCache(capacity=200)
    logits = [model(part, past_key_values=cache).logits for part in tokens.split([60, 2, 1, 1, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens).logits)
    assert positions == [0, 0, 60, 60, 62, 62, 63, 63, 64, 64, 65, 65]
    cache.reset()
    norms = cache.layers[0].store.fixed.norms
    assert norms is not None
    assert norms.keys.sum() == 0


def test_beams_are_refused(model: BloomForCausalLM) -> None:
    options = {"num_beams": 2, "max_new_tokens": 3, "pad_token_id": 0}
    with pytest.raises(ValueError, match="has no beams, whose rows would move; use a cache that grows"):
        model.generate(torch.ones(1, 3, dtype=torch.int64), past_key_values=ALiBiCache(capacity=9), **options)
