"""Gates captured from a model are those its layers used, and the records have the columns of `alibi bench gates`."""

from pathlib import Path

import pytest
import torch

from alibi_lab import records
from alibi_lab.lab.config import Method, ModelConfig
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.measure.trained_gates import captured_gates, trained_gates
from alibi_lab.measure.trained_models import outputs_of

TOKENS = torch.arange(40)[None] * 7 % 256


def model_of(method: Method) -> LanguageModel:
    config = ModelConfig(method=method, num_layers=2, num_heads=2, embed_dim=16, ffn_dim=24)
    return LanguageModel(config, trained_length=40)


@pytest.mark.parametrize("method", ["fox", "alibi-fox"])
def test_captured_gates_reproduce_the_outputs_of_the_layers(method: Method) -> None:
    model = model_of(method)
    inputs = captured_gates(model, TOKENS)
    attended = inputs.attention(inputs.query, inputs.key, inputs.value).transpose(1, 2).flatten(2)
    outputs = outputs_of(model, TOKENS, ("attention_out",))
    assert inputs.log_fgate.shape == (2, 2, 40)
    assert (inputs.slopes is None) == (method == "fox")
    for index, block in enumerate(model.blocks):
        torch.testing.assert_close(block.attention_out(attended[index]), outputs[f"layer-{index}"]["attention_out"][0])


def test_the_first_tokens_are_those_of_a_shorter_text() -> None:
    model = model_of("alibi-fox")
    long, short = captured_gates(model, TOKENS).first(25), captured_gates(model, TOKENS[:, :25])
    for name in ("query", "key", "value", "log_fgate"):
        torch.testing.assert_close(getattr(long, name), getattr(short, name))
    assert torch.equal(long.decay, long.log_fgate - torch.tensor([[2.0**-4], [2.0**-8]]))


def test_a_model_without_gates_is_refused() -> None:
    with pytest.raises(
        ValueError, match="the model has alibi positions, without gates; pass a model with fox or alibi-fox"
    ):
        captured_gates(model_of("alibi"), TOKENS)


def test_a_text_too_short_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Gates may close\n" * 200)
    with pytest.raises(ValueError, match="the text has 160 held-out tokens but 256 are needed"):
        trained_gates(tmp_path, scale="smoke", text=[text], run=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.long
def test_it_trains_measures_and_keeps_one_record_per_model(tmp_path: Path) -> None:
    messages: list[str] = []
    paths = trained_gates(
        tmp_path / "results", scale="smoke", run=tmp_path / "run", repeats=1, seconds=0.1, say=messages.append
    )
    loaded = [records.load(path) for path in paths]
    assert [record.name for record in loaded] == ["gates/trained-fox", "gates/trained-alibi-fox"]
    for record in loaded:
        assert record.curves["ours"]["length"] == [128, 256]
        assert record.curves["scores"]["visible"] == [2 * 2 * n * (n + 1) // 2 for n in (128, 256)]
        assert all(error < 1e-5 for error in record.curves["ours"]["relative_error"])
    assert messages[0] == "training"
    assert "layer 1: U" in messages[1]
