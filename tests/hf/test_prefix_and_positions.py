"""Models with prefix_len and positions: attention replaced by its fp64 definition gives the same logits; so does decoding."""

import encoder_oracle
import pytest
import torch
from parts_oracle import truth
from refusals import assert_refused
from torch import Tensor, nn

from alibi_attn.hf import ALiBiBertForMaskedLM, ALiBiBertForSequenceClassification, ALiBiBertModel, ALiBiCache

pytestmark = pytest.mark.usefixtures("no_gradients")
FAMILIES = ["bloom", "mpt", "falcon", "ours"]
IDS = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
PREFIX = {"prefix_len": torch.tensor([20, 11])}
TIMES = {
    "positions": torch.rand(2, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cumsum(1) + 1e6
}
BOTH = {**PREFIX, **TIMES}


every_family = pytest.mark.parametrize("model", FAMILIES, indirect=True)


def by_definition(query, kept, slopes, *, scale, dropout_p, backend, **options) -> Tensor:
    [keys], query = kept, query * (scale * query.shape[3] ** 0.5)
    given = {name: x for name, x in options.items() if x is not None}
    return truth(query, keys.key, keys.value, slopes, **given)[0].to(query.dtype)


@every_family
@pytest.mark.parametrize("given", [PREFIX, TIMES, BOTH], ids=["prefix", "positions", "both"])
def test_logits_are_those_of_the_definition(model: nn.Module, given: dict) -> None:
    found, causal = model(IDS, **given).logits, model(IDS).logits
    for module in model.modules():
        module.__dict__["attend"] = by_definition
    torch.testing.assert_close(found, model(IDS, **given).logits, rtol=1e-4, atol=1e-4)
    assert (found - causal).abs().max() > 1e-2


@every_family
def test_a_prefix_sees_itself_and_nothing_after_it(model: nn.Module) -> None:
    changed = IDS.clone()
    changed[:, 15] = 59
    before, after = model(IDS, **PREFIX).logits, model(changed, **PREFIX).logits
    off = (before - after).abs().amax(-1)
    assert bool((off[0] > 1e-4).any())
    assert off[0, :15].min() > 1e-6  # token 15 is in the prefix of row 0: all tokens see it
    assert off[1, :15].max() < 1e-6  # and after that of row 1


@every_family
@pytest.mark.parametrize("given", [PREFIX, TIMES, BOTH], ids=["prefix", "positions", "both"])
def test_decoding_equals_one_pass(model: nn.Module, given: dict) -> None:
    whole, cache, outputs = model(IDS, **given).logits, ALiBiCache(), []
    for chunk in IDS.split([20, 1, 1, 18], dim=1):
        upto = cache.get_seq_length() + chunk.shape[1]
        cut = {name: x[:, :upto] if name == "positions" else x for name, x in given.items()}
        outputs.append(model(chunk, past_key_values=cache, use_cache=True, **cut).logits)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-4, atol=1e-4)


@every_family
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_takes_a_prefix(model: nn.Module, cache: str | None) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    options |= {} if cache is None else {"cache_implementation": cache}
    prompt = IDS[:, :20]
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **PREFIX, **options)
    ids = prompt
    for _ in range(4):
        ids = torch.cat([ids, model(ids, **PREFIX).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, ids)


@every_family
def test_padding_and_holes_combine_with_them(model: nn.Module) -> None:
    mask = torch.ones_like(IDS)
    mask[1, 5:8] = 0
    changed = IDS.clone()
    changed[1, 5:8] = 7
    for given in (PREFIX, BOTH):
        x, y = (model(ids, attention_mask=mask, **given).logits[mask.bool()] for ids in (IDS, changed))
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", ["bloom", "ours"], indirect=True)
@torch.enable_grad()
def test_gradients_flow(model: nn.Module) -> None:
    model(IDS, **BOTH).logits.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("model", ["bloom"], indirect=True)
def test_what_does_not_fit_is_refused(model: nn.Module, build_patched) -> None:
    cache, times, rounded = ALiBiCache(), TIMES["positions"], build_patched("bloom", numerics="checkpoint")
    model(IDS[:, :10], past_key_values=cache)

    def called(**given: object) -> object:
        return model(IDS[:, 10:15], past_key_values=cache, **given)

    assert_refused(
        ("prefix_len is 11 .* 0 to 10, the cached tokens", lambda: called(prefix_len=torch.tensor([11, 3]))),
        (r"must be \[B\] = \[2\]", lambda: called(prefix_len=torch.tensor([3]))),
        (r"positions has shape \[2, 5\]", lambda: called(positions=times[:, :5])),
        ("must not decrease", lambda: called(positions=-times[:, :15])),
        (r'prefix_len and positions need numerics="exact"', lambda: rounded(IDS, **PREFIX)),
    )
    assert_refused(("prefix_len is int but must be a tensor", lambda: called(prefix_len=3)), error=TypeError)


def test_positions_in_an_encoder_are_those_of_a_text_with_holes(tmp_path):
    """Tokens around a hole keep their distance, so without the hidden tokens their indices are their positions."""
    state = encoder_oracle.random_state("jina")
    folder = encoder_oracle.write_folder(tmp_path / "jina", state, encoder_oracle.config("jina"))
    model = ALiBiBertModel.from_pretrained(folder, dtype=torch.float64)
    ids = torch.randint(encoder_oracle.WORDS, (1, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0]])
    seen = mask[0].nonzero()[:, 0]
    expected = encoder_oracle.encode(state, "jina", ids, mask)[:, seen]
    padded = torch.cat([ids[:, seen], ids[:, :3]], 1), (torch.arange(len(seen) + 3) < len(seen)).long()[None]
    positions = torch.cat([seen, seen[-1:].expand(3)]).double()[None]
    found = model(*padded, positions=positions).last_hidden_state
    assert (found[:, : len(seen)] - expected).abs().max() <= 1e-13 * expected.abs().max()
    assert not found[:, len(seen) :].any()
    assert (model(*padded).last_hidden_state[:, : len(seen)] - expected).abs().max() > 1e-3
    with pytest.raises(ValueError, match="must not decrease"):
        model(*padded, positions=-positions)
    for head in (ALiBiBertForMaskedLM, ALiBiBertForSequenceClassification):
        whole = head(model.config).double().eval()
        assert not whole(*padded).logits.equal(whole(*padded, positions=2 * positions).logits)
