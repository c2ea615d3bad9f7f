"""kNN-LM compared with a brute-force loop over a small datastore; what is chosen, and on which part of the text."""

import math

import pytest
import torch

from alibi_lab.lab.config import EvalConfig
from alibi_lab.lab.data.corpus import Corpus, CorpusError
from alibi_lab.lab.systems import knn_lm
from alibi_lab.lab.systems.knn_lm import KnnLM, contexts, interpolated_nats, knn_log_probability, nearest


def texts(tokens: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(64, (n,), generator=generator, dtype=torch.uint8) for n in (tokens, 70))


def key_and_nats(model, text, place: int, first: int) -> tuple[torch.Tensor, float]:
    """Of one token, from a pass over tokens first … place − 1, read where the feed-forward layer of the last block gets it."""
    seen = []
    hook = model.blocks[-1].ffn_in.register_forward_pre_hook(lambda module, given: seen.append(given[0][0, -1]))
    with torch.no_grad():
        log_p = model(text[None, first:place].long())[0, -1].double().log_softmax(-1)
    hook.remove()
    return seen[0].double(), -float(log_p[int(text[place])])


def entries(model, text, length: int = 16) -> list[tuple[torch.Tensor, float, int]]:
    """(key, nats, token) of every scored token; a piece of length/2 tokens has a context of length/2 tokens before it."""
    step = length // 2
    places = range(length - step + 1, (len(text) - 1 - length) // step * step + length + 1)
    begins = [(place - 1 - (length - step)) // step * step for place in places]
    return [(*key_and_nats(model, text, *pair), int(text[pair[0]])) for pair in zip(places, begins, strict=True)]


def by_loop(store, test, *, k: int, share: float) -> list[float]:
    losses = []
    for query, nats, target in test:
        near = sorted((float((key - query) @ (key - query)), token) for key, _, token in store)[:k]
        total = sum(math.exp(-d) for d, _ in near)
        knn = sum(math.exp(-d) for d, token in near if token == target) / total
        losses.append(-math.log(share * knn + (1 - share) * math.exp(-nats)))
    return losses


@pytest.mark.parametrize("method", ["alibi", "rotary", "learned"])
def test_losses_equal_a_brute_force_loop(tiny_model, method, monkeypatch):
    monkeypatch.setattr(knn_lm, "_KEYS_AT_ONCE", 13)
    monkeypatch.setattr(knn_lm, "_QUERIES_AT_ONCE", 5)
    model, (train, valid) = tiny_model(method), texts()
    store, test = (contexts(model, text, most=1000, batch_tokens=40) for text in (train, valid))
    by_hand = [entries(model, text) for text in (train, valid)]
    for k, share in ((1, 0.5), (20, 0.25), (30, 0.9), (20, 0.0)):
        found = interpolated_nats(
            knn_log_probability(*nearest(store, test.keys, k), test.tokens), test.nats, share
        ).tolist()
        assert found == pytest.approx(by_loop(*by_hand, k=k, share=share), rel=1e-4)
    assert found == test.nats.tolist()  # λ = 0 is the model
    with pytest.raises(AssertionError):  # of one neighbor fewer
        assert by_loop(*by_hand, k=1, share=0.5) == pytest.approx(by_loop(*by_hand, k=2, share=0.5), rel=1e-4)


def test_k_and_the_share_are_chosen_on_the_first_half_and_the_second_is_reported(tiny_model):
    model, (train, valid) = tiny_model("alibi"), texts()
    curves = KnnLM.curves(model, Corpus(train, valid, {}), EvalConfig(lengths=(16,), tokens=1000))
    table, best = curves["knn_lm"], {name: column[0] for name, column in curves["knn_lm_best"].items()}
    place = min(range(len(table["k"])), key=table["chosen_on_nats"].__getitem__)
    assert (best["k"], best["lambda"]) == (table["k"][place], table["lambda"][place])
    assert best["nats"] == table["tested_nats"][place]
    assert (table["k"][0], table["lambda"][0], table["tested_nats"][0]) == (0, 0.0, best["plain_nats"])
    losses = by_loop(entries(model, train), entries(model, valid), k=8, share=0.1)
    row = next(n for n, pair in enumerate(zip(table["k"], table["lambda"], strict=True)) if pair == (8, 0.1))
    half = len(losses) // 2
    assert table["chosen_on_nats"][row] == pytest.approx(sum(losses[:half]) / half, rel=1e-4)
    assert table["tested_nats"][row] == pytest.approx(sum(losses[half:]) / (len(losses) - half), rel=1e-4)
    assert best["tokens"] == len(losses) - half


def test_the_datastore_is_the_training_text_only(tiny_model):
    """A text that the model was trained on is found again; the datastore never has the tokens to predict."""
    model, (train, valid) = tiny_model("alibi"), texts(300)
    again, other = (
        KnnLM.curves(model, Corpus(train, text, {}), EvalConfig(lengths=(16,), tokens=1000))["knn_lm_best"]
        for text in (train[:81], valid)
    )
    assert again["entries"] == other["entries"] == [len(contexts(model, train, most=1000, batch_tokens=99).tokens)]
    assert again["perplexity"][0] < 2  # the same contexts, at a distance of 0
    assert other["perplexity"][0] > 30  # of 64 random tokens


def test_long_texts_are_thinned_and_short_ones_are_refused(tiny_model):
    model, (train, valid) = tiny_model("alibi").train(), texts(400)
    few = contexts(model, train, most=40, batch_tokens=16)
    assert (len(few.tokens), model.training) == (40, True)
    assert torch.equal(few.tokens[:8], train[9:17].long())
    with pytest.raises(CorpusError, match="16 tokens but kNN-LM needs 17 or more"):
        contexts(model, train[:16], most=40, batch_tokens=16)
    with pytest.raises(CorpusError, match="16 tokens but kNN-LM needs 17"):
        KnnLM.curves(model, Corpus(train, valid[:16], {}), EvalConfig(lengths=(16,)))
