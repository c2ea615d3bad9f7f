"""A method that reads the text: its hook's inputs, how the lab adds its bias, trains it, and caches it in decoding."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from loops import by_loops
from torch import Tensor, nn

from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.model.attention import LayerCache, attend
from alibi_lab.lab.model.position_method import ContentBias, Pass, PositionError, PositionMethod
from alibi_lab.lab.model.positions import METHODS, ALiBi
from alibi_lab.lab.training.checkpoint import load_checkpoint
from alibi_lab.lab.training.train import train


class Forgetting(PositionMethod):
    """A forget gate per layer, head and token that closes during training, and ALiBi's slopes.

    The score of key j gets Σ log gate_l over l = j + 1 … i: −(the sum up to j), and a constant of row i
    (FoX, Lin et al. 2025, arXiv:2503.02130).
    """

    per_layer = True

    def __init__(self, config, trained_length):
        super().__init__(config, trained_length)
        self.weight = nn.Parameter(torch.empty(config.num_layers, config.embed_dim, config.num_heads))
        self.fixed = ALiBi(config, trained_length)
        self.asked: list[Pass] = []

    def bias(self, at: Pass) -> ContentBias:
        self.asked.append(at)
        layer = at.layer
        log_gates = F.logsigmoid(layer.x @ self.weight[layer.index]) * (0.5 + at.progress / 2)
        sums = -log_gates.float().cumsum(1).mT
        if layer.earlier is not None:
            sums = sums + layer.earlier[..., -1:]
        return ContentBias(sums, self.fixed.bias(at))


@pytest.fixture
def forgetting(monkeypatch, tiny_model):
    """Makes tiny models with the method above, under a name that configs accept."""
    monkeypatch.setitem(METHODS, "kerple", Forgetting)
    return lambda **fields: tiny_model("kerple", **fields)


def some_tokens(length: int) -> Tensor:
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length))


def expected_attention(q, k, v, key_bias, slopes, sees) -> Tensor:
    """A loop over i and each j ≤ i for which `sees(b, i, j)`; the bias is a further column of k."""
    q = F.pad(q / math.sqrt(q.shape[3]), (0, 1), value=1.0)
    k = torch.cat([k, key_bias[..., None]], dim=-1)
    return by_loops(q, k, v, lambda h, d, q, k, _: float(q @ k) - slopes[h] * d, sees=sees)


@pytest.mark.parametrize(("query_len", "key_len"), [(7, 7), (1, 9), (3, 9)])
@pytest.mark.parametrize("slopes", [None, [0.5, 0.125]])
def test_a_number_for_every_key_is_added_to_its_scores(query_len, key_len, slopes):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, generator=generator) for n in (query_len, key_len, key_len))
    key_bias = 3 * torch.randn(2, 2, key_len, generator=generator)
    bias = ContentBias(key_bias, None if slopes is None else torch.tensor(slopes))
    documents = torch.tensor([[j * 3 // key_len for j in range(key_len)], [j // 2 for j in range(key_len)]])
    said = slopes or [0.0, 0.0]
    ways = {
        "all": ({}, lambda b, i, j: True),
        "window": ({"window": 3}, lambda b, i, j: i - j < 3),
        "documents": ({"segment_ids": documents}, lambda b, i, j: documents[b, i] == documents[b, j]),
    }
    for options, sees in ways.values():
        found = attend(q, k, v, bias, Pass(query_len, key_len, **options)).double()
        torch.testing.assert_close(found, expected_attention(q, k, v, key_bias, said, sees), rtol=1e-5, atol=1e-6)
    wrong = expected_attention(q, k, v, key_bias.roll(1, -1), said, lambda b, i, j: True)
    with pytest.raises(AssertionError):  # of the key before
        torch.testing.assert_close(attend(q, k, v, bias).double(), wrong, rtol=1e-5, atol=1e-6)


def test_a_constant_added_to_all_keys_changes_nothing_even_in_bfloat16():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=generator).bfloat16()
    key_bias = torch.randint(-256, 256, (1, 2, 9), generator=generator) / 64
    near, far = (attend(q, k, v, ContentBias(key_bias + offset)) for offset in (0.0, 4096.0))
    assert torch.equal(near, far)


def test_the_hook_is_handed_what_its_layer_sees_in_every_layer(forgetting):
    model, tokens = forgetting(num_layers=3), some_tokens(12)
    model.progress = 0.25
    inputs: list[Tensor] = []
    for block in model.blocks:
        block.q.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad():
        model(tokens)
    asked = model.position.asked
    assert [at.layer.index for at in asked] == [0, 1, 2]
    assert all(torch.equal(at.layer.x, x) for at, x in zip(asked, inputs, strict=True))
    assert {(at.query_len, at.key_len, at.progress) for at in asked} == {(12, 12, 0.25)}
    assert all(at.layer.earlier is None for at in asked)


@pytest.mark.parametrize("architecture", ["modern", "baevski-auli"])
@pytest.mark.parametrize("window", [None, 6])
def test_numbers_of_earlier_tokens_are_kept_with_the_keys(forgetting, architecture, window):
    model, tokens = forgetting(architecture=architecture), some_tokens(16)
    caches = [LayerCache() for _ in model.blocks]
    with torch.no_grad():
        parts = [model(part, caches=caches, window=window) for part in tokens.split((5, 1, 1, 7, 2), dim=1)]
        whole = model(tokens, window=window)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
        assert [cache.key_bias.shape for cache in caches] == [(2, 2, 16)] * 2
        for cache in caches:
            cache.key_bias = cache.key_bias.roll(1, -1)
        model.position.asked.clear()
        lost = model(tokens[:, -1:], caches=caches, window=window)
    assert model.position.asked[0].layer.earlier.shape == (2, 2, 16)
    assert not torch.allclose(lost, model(torch.cat([tokens, tokens[:, -1:]], 1), window=window)[:, -1:], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cached", [False, True])
def test_numbers_keep_their_digits_and_half_precision_is_refused(forgetting, monkeypatch, dtype, cached):
    model, tokens, hook = forgetting(), some_tokens(8), Forgetting.bias
    changed = lambda self, at: dataclasses.replace(b := hook(self, at), key_bias=b.key_bias.to(dtype))  # noqa: E731
    monkeypatch.setattr(Forgetting, "bias", changed)
    caches = [LayerCache() for _ in model.blocks] if cached else None
    with torch.no_grad():
        if dtype == torch.bfloat16:
            with pytest.raises(TypeError, match="key_bias is bfloat16 but must be float32 or float64"):
                model(tokens, caches=caches)
            return
        model(tokens, caches=caches)
    assert not cached or all(cache.key_bias.dtype == dtype for cache in caches)


def test_training_tells_how_far_it_is_and_leaves_a_checkpoint(forgetting, tiny_run, tmp_path, monkeypatch):
    config = tiny_run("kerple", steps=4, checkpoint_every=2, validate_every=2, validate_tokens=32)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=2))
    told: list[tuple[bool, float]] = []
    hook = Forgetting.bias
    monkeypatch.setattr(
        Forgetting, "bias", lambda self, at: (told.append((self.training, at.progress)), hook(self, at))[1]
    )
    corpus = load_corpus(config.data)

    def cut(progress):
        if progress.step == 3:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train(config, corpus, tmp_path, on_step=cut)
    steps = list(dict.fromkeys(told))
    assert steps == [(True, 0.0), (True, 0.25), (False, 0.5), (True, 0.5)]  # after two steps it is validated
    told.clear()
    train(config, corpus, tmp_path)
    assert list(dict.fromkeys(told)) == [(True, 0.5), (True, 0.75), (False, 1.0)]  # resumed at the checkpoint
    model = load_checkpoint(tmp_path)[0]
    assert model.progress == 1.0
    start = type(model)(config.model, trained_length=16, seed=config.train.seed).position.weight
    assert ((model.position.weight - start).abs().amax((1, 2)) > 0).all()


def test_a_hook_that_is_called_once_has_no_layer(tiny_model, monkeypatch):
    monkeypatch.setattr(ALiBi, "bias", lambda self, at: self.slopes * at.layer.index)
    with pytest.raises(PositionError, match="computed once for all layers; set per_layer = True"):
        tiny_model("alibi")(some_tokens(4))


def test_numbers_of_another_shape_are_refused(forgetting, monkeypatch):
    monkeypatch.setattr(Forgetting, "bias", lambda self, at: ContentBias(at.layer.x))
    with pytest.raises(PositionError, match=r"key_bias of shape \[2, 4, 16\] and .*must be floating, \[2, 2, 4\]"):
        forgetting()(some_tokens(4))
