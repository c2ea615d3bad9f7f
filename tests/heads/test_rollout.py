"""Attention accumulated over layers, compared with sums over paths, exact fractions, and products of explicit weights."""

import itertools
import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn import alibi_slopes, attention_rows
from alibi_attn.hf import patch
from alibi_attn.hf.patching.capture_qk import watched
from alibi_lab import records
from alibi_lab.heads import rollout
from alibi_lab.heads.rollout import Rollout, measured, run_of_the_lab, stretches, theory
from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.layer_outputs import by_head, outputs_of


def model_of(method: str) -> LanguageModel:
    config = ModelConfig(method=method, vocab_size=64, num_layers=2, num_heads=2, embed_dim=16, ffn_dim=24)
    return LanguageModel(config, trained_length=16).eval()


Shares = dict[tuple[str, int], dict[str, float]]


def shares(record: records.Record) -> Shares:
    """The columns of a record's rows by way and depth, averaged over its texts."""
    columns, found = record.curves["rollout"], defaultdict(list)
    for at, key in enumerate(zip(columns["way"], columns["depth"], strict=True)):
        found[key].append([columns[name][at] for name in rollout.COLUMNS[3:]])
    means = {key: torch.tensor(rows, dtype=torch.float64).mean(0).tolist() for key, rows in found.items()}
    return {key: dict(zip(rollout.COLUMNS[3:], row, strict=True)) for key, row in means.items()}


def first_token_by_paths(length: int, depth: int, slope: float) -> float:
    """The mean over the second half of the queries of the weight of all paths of `depth` steps back to token 0."""
    total = 0.0
    for start in range(length // 2, length):
        for steps in itertools.product(range(length), repeat=depth - 1):
            path = [start, *steps, 0]
            if any(later > earlier for earlier, later in itertools.pairwise(path)):
                continue
            weights = (
                math.exp(-slope * (i - j)) / math.fsum(math.exp(-slope * d) for d in range(i + 1))
                for i, j in itertools.pairwise(path)
            )
            total += math.prod(weights)
    return total / (length - length // 2)


@pytest.mark.parametrize(("way", "slope"), [("causal mask", 0.0), ("ALiBi, m = 1/2", 0.5), ("ALiBi, m = 1/16", 1 / 16)])
def test_their_setting_equals_a_sum_over_all_paths(way: str, slope: float) -> None:
    found = shares(theory(8))
    for depth in (1, 2, 4):
        assert found[way, depth]["first_token"] == pytest.approx(first_token_by_paths(8, depth, slope), rel=1e-12)


def test_shares_are_counted_in_tenths_of_what_a_query_sees() -> None:
    """Of 20 tokens, queries 10 to 18 have 11 to 19 keys, two of which are a tenth; query 19 has 20, hence two as well."""
    product = torch.eye(20)[None].clone()
    (row,) = measured("attention", 3, product)
    assert row == ("attention", 3, 0, 0.0, 0.0, 1.0)
    product = torch.zeros(1, 20, 20)
    product[..., 1] = 0.25
    product[..., 0] = 0.5
    product[:, 10:, 8] = 0.25  # of query 10's last tenth, 9 and 10, it is none
    (row,) = measured("attention", 3, product)
    assert row[3:] == (0.5, 0.75, 0.0)
    product[:, 10, 9] = 1.0
    assert measured("attention", 3, product)[0][5] == pytest.approx(0.1)


def accumulated(layers: list[Tensor]) -> dict[str, Tensor]:
    """The products of layers' weights [B, H, n, n]."""
    plain = residual = torch.eye(layers[0].shape[-1], dtype=torch.float64)
    for weights in layers:
        mean = weights.mean(1)
        plain, residual = mean @ plain, (mean @ residual + residual) / 2
    return {"attention": plain, "with residual": residual}


@pytest.mark.parametrize("method", ["alibi", "none"])
def test_a_lab_model_equals_the_product_of_explicit_weights(method: str) -> None:
    model, tokens = model_of(method), torch.randint(64, (1, 37), generator=torch.Generator().manual_seed(0))
    found, before = Rollout(1, 37), model.position
    with torch.no_grad():
        logits = model.eval()(tokens)
        run_of_the_lab(model, tokens, found)
        assert model.position is before
        torch.testing.assert_close(model(tokens), logits, rtol=0, atol=0)
    heads = model.config.num_heads
    slopes = torch.tensor(alibi_slopes(heads) if method == "alibi" else [0.0] * heads)
    layers = []
    for part in outputs_of(model, tokens, ("q", "k")).values():
        query, key = (by_head(part[name], heads).double() for name in "qk")
        layers.append(attention_rows(query, key, slopes, rows=slice(None)))
    for way, expected in accumulated(layers).items():
        torch.testing.assert_close(found.products[way].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["rotary", "sinusoidal", "t5", "fox", "nope-window"])
def test_every_method_gives_rows_that_sum_to_one(method: str) -> None:
    model, tokens = model_of(method), torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(0))
    found = Rollout(2, 40)
    with torch.no_grad():
        run_of_the_lab(model, tokens, found)
    assert found.depth == model.config.num_layers
    assert len(found.rows) == 2 * 2 * found.depth
    for product in found.products.values():
        torch.testing.assert_close(product.sum(-1), torch.ones(2, 40), rtol=0, atol=1e-5)
        assert float(product.triu(1).abs().max()) == 0
        assert float(product.min()) >= -1e-6


def test_a_patched_bloom_equals_the_attentions_of_transformers() -> None:
    torch.manual_seed(0)
    model = BloomForCausalLM._from_config(
        BloomConfig(vocab_size=20, hidden_size=24, n_layer=3, n_head=4), attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    tokens, found = torch.arange(30)[None] % 20, Rollout(1, 30)
    with torch.no_grad():
        expected = accumulated([one.double() for one in model(tokens, output_attentions=True).attentions])
        patch(model)
        with watched(model, lambda *layer: rollout.add_layer(found, *layer)):
            model(tokens)
    for way, product in expected.items():
        torch.testing.assert_close(found.products[way].double(), product, rtol=1e-4, atol=1e-5)


def test_whole_stretches_are_read_and_a_short_text_is_refused() -> None:
    assert stretches(range(25), 10).tolist() == [list(range(10)), list(range(10, 20))]
    assert len(stretches(range(1000), 10)) == rollout.TEXTS
    with pytest.raises(ValueError, match="has 9 tokens but 10 are needed"):
        stretches(range(9), 10)


def test_methods_that_read_in_segments_are_refused() -> None:
    model = model_of("alibi_lab.lab.systems.transformer_xl:TransformerXL")
    with pytest.raises(ValueError, match="which read texts in segments"):
        run_of_the_lab(model, torch.arange(20)[None], Rollout(1, 20))
