"""Soft prompts before a left-padded batch: masks with a hole, 1…1 0…0 1…1, give each row what it has without padding."""

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers_names import checkpoint_activations

from alibi_attn.hf import ALiBiCache, patch

FAMILIES = ["bloom", "mpt", "falcon"]
PROMPT, LENGTHS = 6, [40, 25, 3]


def prompted(model, tokens):
    """(embeddings [B, S, E], mask [B, S]) of six virtual tokens, padding, and each row's tokens."""
    ids = tokens(len(LENGTHS), max(LENGTHS))
    padding = max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    mask = torch.cat([torch.ones(3, PROMPT), torch.arange(max(LENGTHS)) >= padding], 1).long()
    table = model.get_input_embeddings()
    prompt = torch.randn(1, PROMPT, table.weight.shape[1], generator=torch.Generator().manual_seed(3)) * 0.2
    return torch.cat([prompt.expand(3, -1, -1), table(ids)], 1), mask


def alone(model, embeddings, mask, row):
    return model(inputs_embeds=embeddings[row][mask[row] > 0][None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", ["bloom", "falcon"])
@pytest.mark.parametrize("training", [False, True])
def test_logits_and_gradients_are_those_of_each_row_alone(family, training, build, tokens):
    model = build(family)
    patch(model)
    embeddings, mask = prompted(model, tokens)
    embeddings = embeddings.detach().requires_grad_()
    if training:
        model.train()
        checkpoint_activations(model, {"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    found = model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits[mask > 0]
    expected = torch.cat([alone(model, embeddings, mask, row) for row in range(3)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(expected)
    (mine,) = torch.autograd.grad((found * weight).sum(), embeddings)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), embeddings)
    assert (mine - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("kind", [DynamicCache, ALiBiCache])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_after_soft_prompts(family, kind, build, tokens):
    """`generate` from embeddings: greedy tokens are those of each row alone, and those of the unpatched model."""
    model = build(family)
    embeddings, mask = prompted(model, tokens)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "use_cache": True}
    whole = {"inputs_embeds": embeddings, "attention_mask": mask}
    unpatched = model.generate(**whole, past_key_values=DynamicCache(), **options)
    with patch(model, numerics="exact" if family != "falcon" else "checkpoint"):
        assert torch.equal(model.generate(**whole, past_key_values=kind(), **options), unpatched)
    if family == "mpt":
        return  # its positions are indices
    with patch(model):
        found = model.generate(**whole, past_key_values=kind(), **options)
        for row in range(3):
            own = embeddings[row][mask[row] > 0][None]
            expected = model.generate(
                inputs_embeds=own, attention_mask=torch.ones(own.shape[:2]).long(), past_key_values=kind(), **options
            )
            assert torch.equal(found[row : row + 1], expected)
