"""Landmark attention compared with a loop over queries, blocks and keys; causality, decoding with a cache, training."""

import math

import pytest
import torch

from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import Pass
from alibi_lab.lab.systems.landmark import Landmark, grouped_weights

METHOD = "alibi_lab.lab.systems.landmark:Landmark"
SLOPES = torch.tensor([0.5, 0.03])


def softmax(scores: dict[object, float]) -> dict[object, float]:
    total = sum(math.exp(score) for score in scores.values())
    return {name: math.exp(score) / total for name, score in scores.items()}


def by_loop(q, k, landmarks, seen, *, block: int, farthest: int, retrieved: int) -> torch.Tensor:
    """Grouped softmax, one query at a time, from dictionaries of scores."""
    heads, query_len, key_len = q.shape[0], q.shape[1], k.shape[1]
    weights = torch.zeros(heads, query_len, key_len, dtype=torch.float64)
    for h in range(heads):
        for row in range(query_len):
            i, m = key_len - query_len + row, float(SLOPES[h])
            scores, to_landmarks = (x[h] @ q[h, row] / math.sqrt(q.shape[2]) for x in (k, landmarks))
            here = i // block
            gates = {j: float(scores[j]) - m * (i - j) for j in range(here * block, i + 1) if seen(i, j)}
            blocks = {}
            for n in range(here):
                end = (n + 1) * block - 1
                if seen(i, end):
                    blocks["block", n] = float(to_landmarks[n]) - m * min(i - end, farthest)
            best = sorted(blocks, key=lambda name: -blocks[name])[:retrieved]
            for name, weight in softmax(gates | {name: blocks[name] for name in best}).items():
                if isinstance(name, int):
                    weights[h, row, name] = weight
                    continue
                tokens = range(name[1] * block, (name[1] + 1) * block)
                inside = {j: float(scores[j]) - m * (tokens[-1] - j) for j in tokens if seen(i, j)}
                for j, share in softmax(inside).items():
                    weights[h, row, j] = weight * share
    return weights


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("retrieved", [99, 2])
@pytest.mark.parametrize(("query_len", "key_len"), [(17, 17), (5, 16), (1, 19), (2, 3)])
def test_weights_are_a_grouped_softmax(query_len, key_len, retrieved, window):
    generator = torch.Generator().manual_seed(key_len)
    q, k = (2 * torch.randn(1, 2, n, 6, generator=generator, dtype=torch.float64) for n in (query_len, key_len))
    landmarks = torch.randn(1, 2, key_len // 4, 6, generator=generator, dtype=torch.float64)
    options = {"block": 4, "farthest": 9, "retrieved": retrieved}
    visible = Pass(query_len, key_len, window=window).visible(q.device)
    found = grouped_weights(q, k, landmarks, SLOPES, visible, **options)
    seen = lambda i, j: window is None or i - j < window  # noqa: E731
    expected = by_loop(q[0], k[0], landmarks[0], seen, **options)
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    if key_len > 8:
        with pytest.raises(AssertionError):  # of blocks of another size
            torch.testing.assert_close(found[0], by_loop(q[0], k[0], landmarks[0], seen, **{**options, "block": 5}))


@pytest.fixture
def model() -> LanguageModel:
    config = ModelConfig(method=METHOD, vocab_size=64, num_layers=2, num_heads=2, embed_dim=16, ffn_dim=24)
    return LanguageModel(config, trained_length=16).eval()


def test_tests_read_few_blocks_and_training_reads_all_with_gradients(model, monkeypatch):
    tokens = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        few, everything = model(tokens), model.train()(tokens)
        assert torch.equal(few[:, :10], everything[:, :10])  # the fifth block of 2 tokens has four earlier ones
        assert not torch.allclose(few[:, 10:], everything[:, 10:])
        monkeypatch.setattr(Landmark, "retrieved", 20)
        torch.testing.assert_close(model.eval()(tokens), everything)
    model.train()(tokens[:, :-1], targets=tokens[:, 1:]).mean().backward()
    assert all(float(parameter.grad.abs().max()) > 0 for parameter in model.parameters())
