"""Accuracy by the place of the evidence compared with recounts, and calibrated attention with explicit weights."""

import itertools
import math

import pytest
import torch

from alibi_lab.lab.config import EvalConfig, ModelConfig
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.model.attention import attend
from alibi_lab.lab.model.position_method import LayerInput, Pass
from alibi_lab.lab.model.positions import ALiBi
from alibi_lab.lab.systems import lost_in_the_middle
from alibi_lab.lab.systems.lost_in_the_middle import ASKED, DOCUMENTS, LostInTheMiddle, Watched, document_edges

SLOPES = torch.tensor([0.05, 0.2])
TRAIN = torch.arange(64, dtype=torch.uint8)
CONFIG = EvalConfig(lengths=(32, 64, 80), tokens=64, trials=3, batch_tokens=500)


def curves_of(model, config: EvalConfig = CONFIG) -> dict[str, list]:
    return LostInTheMiddle.curves(model, Corpus(TRAIN, TRAIN, {}), config)["lost_in_the_middle"]


def of_length(table: dict[str, list], length: int, name: str) -> list:
    return [value for value, of in zip(table[name], table["length"], strict=True) if of == length]


@pytest.fixture(scope="module")
def attention() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of 64 tokens, and the weights [B, H, T, S] of ALiBi, in float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 64, 8, generator=generator) for _ in range(3))
    distance = torch.arange(64)[:, None] - torch.arange(64)
    scores = q.double() @ k.double().mT / math.sqrt(8) - SLOPES.double()[:, None, None] * distance
    return q, k, v, scores.masked_fill(distance < 0, -torch.inf).softmax(-1)


def watched_attend(q, k, v, *, layer: int, share: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    config = ModelConfig(num_layers=4, num_heads=2, embed_dim=16)
    watch = Watched(ALiBi(config, 16), document_edges(64))
    watch.share = share
    at = Pass(64, 64, input=LayerInput(torch.zeros(3, 64, 16), layer))
    return watch.attend(q, k, v, at, lambda q, k, v: attend(q, k, v, SLOPES)), watch.seen[0]


@pytest.mark.parametrize("layer", [0, 2])
def test_weights_are_measured_and_redistributed_per_head_and_query(attention, layer):
    q, k, v, weights = attention
    share = torch.rand(3, DOCUMENTS, generator=torch.Generator().manual_seed(1)).double()
    edges, expected, seen = document_edges(64).tolist(), weights.clone(), torch.zeros(3, DOCUMENTS).double()
    for b in range(3):
        for h in range(2):
            for i in range(64 - ASKED, 64):
                documents = [slice(*pair) for pair in itertools.pairwise(edges)]
                means = [float(weights[b, h, i, one].mean()) for one in documents]
                seen[b] += torch.tensor(means).double() / (2 * ASKED)
                for n, one in enumerate(documents):
                    expected[b, h, i, one] *= float(share[b, n]) / means[n]
                kept = weights[b, h, i, : edges[-1]].sum() / expected[b, h, i, : edges[-1]].sum()
                expected[b, h, i, : edges[-1]] *= kept
    torch.testing.assert_close(expected.sum(-1), torch.ones(3, 2, 64).double())
    found, measured = watched_attend(q, k, v, layer=layer, share=share)
    torch.testing.assert_close(measured, seen, rtol=1e-5, atol=1e-7)
    wanted, other = (expected, weights) if layer >= 2 else (weights, expected)  # the second half of four layers
    torch.testing.assert_close(found.double(), wanted @ v.double(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found.double(), other @ v.double(), atol=1e-3)


BIAS = torch.tensor([9.0, 3.0, 2.0, 0.0, 1.0, 4.0, 9.5]).double()


def additive(model, rows, edges, batch_tokens, *, share=None) -> tuple[torch.Tensor, torch.Tensor]:
    """A reader with Attn = rel + bias, rel 2 for a document with the segment; right if the evidence has the highest share."""
    windows = rows[:, : int(edges[-1])].unfold(1, ASKED + 1, 1)
    same = (windows == rows[:, None, -ASKED - 1 :]).all(-1)
    evidence = torch.where(same.any(1), (edges[1:] <= same.long().argmax(1)[:, None]).sum(1), -1)
    attention = BIAS + 2.0 * (torch.arange(DOCUMENTS) == evidence[:, None])
    hits = (attention if share is None else share).argmax(1) == evidence
    return hits[:, None].expand(-1, ASKED), attention


def test_calibration_finds_evidence_that_a_bias_hides(tiny_model, monkeypatch):
    monkeypatch.setattr(lost_in_the_middle, "answers", additive)
    table = curves_of(tiny_model("alibi"))
    for length in (64, 80):
        assert of_length(table, length, "document") == list(range(1, DOCUMENTS + 1))
        assert of_length(table, length, "accuracy") == of_length(table, length, "found") == [1, 0, 0, 0, 0, 0, 1]
        assert of_length(table, length, "calibrated_accuracy") == [1] * DOCUMENTS
        assert of_length(table, length, "calibrated_found") == [1] * DOCUMENTS
        assert of_length(table, length, "dummy_attention") == (BIAS * length).tolist()
    assert of_length(table, 64, "tokens") == [3 * ASKED] * DOCUMENTS


def test_accuracy_is_that_of_texts_with_the_segment_in_each_document(tiny_model):
    model, length = tiny_model("alibi", vocab_size=64), 80
    table = curves_of(model)
    edges = document_edges(length).tolist()
    for k, found in enumerate(of_length(table, length, "accuracy")):
        rows = lost_in_the_middle._evidence_in(k, torch.tensor(edges), TRAIN, length, CONFIG)
        for row in rows.tolist():
            (start,) = [p for p in range(edges[-1]) if row[p : p + 8] == row[-8:]]
            assert edges[k] <= start <= edges[k + 1] - 8
        with torch.no_grad():
            right = model(rows[:, :-1])[:, -ASKED:].argmax(-1) == rows[:, -ASKED:]
        assert found == pytest.approx(float(right.double().mean()))


def test_what_a_method_or_length_does_not_allow_is_none(tiny_model, monkeypatch):
    table = curves_of(tiny_model("learned"))
    assert {value for name in ("accuracy", "found") for value in table[name]} == {
        None
    }  # 16 positions, 32 tokens too short
    model = tiny_model("none")
    monkeypatch.setattr(model.position, "segment", 16, raising=False)
    table = curves_of(model)
    assert of_length(table, 32, "accuracy") == [None] * DOCUMENTS
    assert all(0 <= value <= 1 for value in of_length(table, 64, "accuracy"))
    assert set(table["found"]) == set(table["calibrated_accuracy"]) == {None}
