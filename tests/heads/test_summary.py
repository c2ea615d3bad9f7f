"""`alibi heads summary` on models of the lab and of transformers, compared with a loop over every query and key."""

import json
import math
from pathlib import Path

import pytest
import torch
from small_runs import checkpoint_of
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from alibi_attn import head_reach
from alibi_attn.hf import patch
from alibi_attn.hf.patching.capture_qk import watched
from alibi_attn.inspect import default_tolerance
from alibi_attn.slopes import alibi_slopes
from alibi_lab import records
from alibi_lab.cli.main import app
from alibi_lab.heads.loading import load
from alibi_lab.heads.summary import distinct_up_to, half_of_the_smallest, measured, summary, totals, weights
from alibi_lab.lab.model.layer_outputs import attention_inputs
from alibi_lab.lab.training.checkpoint import load_checkpoint
from alibi_lab.report.page import report_html
from alibi_lab.report.sections.heads import has_maps

TEXT = "the cat sat on the mat and the dog sat on the cat " * 12


def loop(query: Tensor, key: Tensor, slope: float, scale: float) -> tuple[float, float, float, dict[str, float]]:
    """Mean distance, mean share of the first token, share of the keys within reach that weigh more than fp32's tolerance,
    and zero weights by dtype, of one head [n, D], pair by pair."""
    n, heavy, distance, first = len(query), [], 0.0, 0.0
    reach = int(head_reach(query[None, None], key[None, None], torch.tensor([slope]), scale=scale))
    tolerance = default_tolerance(query[None, None], key[None, None], key[None, None])
    zeros = dict.fromkeys(("float32", "bfloat16", "float16"), 0)
    for i in range(n):
        scores = [scale * float(query[i].double() @ key[j].double()) - slope * (i - j) for j in range(i + 1)]
        weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
        distance += float(weights @ (i - torch.arange(i + 1.0, dtype=torch.float64))) / n
        first += float(weights[0]) / (n - 1) if i else 0.0
        heavy += [float(weights[j]) > tolerance for j in range(max(0, i - reach + 1), i + 1)]
        for name in zeros:
            zeros[name] += int((weights.to(getattr(torch, name)) == 0).sum())
    return distance, first, sum(heavy) / len(heavy), {name: count / (n * (n + 1) / 2) for name, count in zeros.items()}


def test_the_columns_equal_a_loop_with_shared_key_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 150, 8, generator=generator) for heads in (4, 2))
    slopes = torch.tensor([2.0, 0.5, 0.0625, 0.0])
    columns = measured(query, key, slopes, 0.3)
    for head, slope in enumerate(slopes.tolist()):
        distance, first, carried, zeros = loop(query[0, head], key[0, head // 2], slope, 0.3)
        assert columns["mean_distance"][head] == pytest.approx(distance, rel=1e-9)
        assert columns["first_token"][head] == pytest.approx(first, rel=1e-9)
        assert columns["carried"][head] == pytest.approx(carried)
        assert {name: columns[f"zero_{name}"][head] for name in zeros} == pytest.approx(zeros)
    assert columns["certified"] == head_reach(query, key, slopes, scale=0.3)[0].tolist()
    assert columns["zero_bfloat16"][0] > 0.4  # slope 2: zero beyond about 46 tokens
    assert columns["zero_bfloat16"][3] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_up_to_half_of_the_smallest_number_rounds_to_zero(dtype: torch.dtype) -> None:
    edge = half_of_the_smallest(dtype)
    assert torch.tensor([edge], dtype=torch.float64).to(dtype).item() == 0
    assert torch.tensor([edge * 1.01], dtype=torch.float64).to(dtype).item() > 0
    assert -math.log(2 * edge) == pytest.approx(
        {torch.bfloat16: 92.18, torch.float16: 16.64, torch.float32: 103.28}[dtype], abs=0.01
    )


def test_rounded_biases_are_distinct_as_far_as_the_bits_of_the_dtype_reach() -> None:
    for slope in (0.5, 2**-8, 1.0):
        assert distinct_up_to(slope, torch.bfloat16, 1000) == 256
        assert distinct_up_to(slope, torch.float16, 4000) == 2048
        assert distinct_up_to(slope, torch.float32, 4000) == 4000
    assert distinct_up_to(0.0, torch.bfloat16, 1000) == 0  # without a slope all biases are equal


def test_collapsed_and_blind_heads_are_counted() -> None:
    columns = {"head": [0, 1, 2], "first_token": [0.95, 0.9, 0.1]}
    columns |= {f"zero_{name}": [0.5, 0.4, 0.0] for name in ("float32", "bfloat16", "float16")}
    assert totals(columns) == {"heads": 3, "collapsed": 2, "blind_float32": 1, "blind_bfloat16": 1, "blind_float16": 1}


def _saved(model: torch.nn.Module, folder: Path) -> Path:
    vocabulary = {word: number for number, word in enumerate(["<unk>", *sorted(set(TEXT.split()))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=20, hidden_size=24, n_layer=2, n_head=4))
    with (
        torch.no_grad()
    ):  # large weights, so that some head gives most of its attention to the first token despite its slope
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return _saved(model, tmp_path_factory.mktemp("models") / "bloom")


def test_watching_leaves_logits_unchanged_and_ends_with_its_block(bloom: Path) -> None:
    model = BloomForCausalLM.from_pretrained(bloom).eval()
    with (
        pytest.raises(ValueError, match="BloomForCausalLM has no layer that uses alibi_attention"),
        watched(model, print),
    ):
        pass
    patch(model)
    tokens = torch.arange(1, 12)[None]
    before, seen = model(tokens).logits, []
    with watched(model, lambda layer, query, key, slopes, scale: seen.append((layer, tuple(query.shape)))) as count:
        torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=0)
    assert (count, seen) == (2, [(0, (1, 4, 11, 6)), (1, (1, 4, 11, 6))])
    model(tokens)
    assert len(seen) == 2


def test_a_model_of_the_lab_agrees_with_the_captured_tensors(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path, "alibi")
    heads = summary(load(folder), TEXT).curves["heads"]
    model, config = load_checkpoint(folder)
    tokens = torch.tensor([list(TEXT.encode()[: 2 * config.train.length])])
    query, key, _, (slopes, gates) = attention_inputs(model, tokens)
    assert (slopes.tolist(), gates) == (pytest.approx(alibi_slopes(4).tolist()), None)
    for at, (layer, head) in enumerate(zip(heads["layer"], heads["head"], strict=True)):
        distance, first, *_ = loop(query[layer, head], key[layer, head], float(slopes[head]), query.shape[-1] ** -0.5)
        assert heads["mean_distance"][at] == pytest.approx(distance, rel=1e-6)
        assert heads["first_token"][at] == pytest.approx(first, rel=1e-6)
    matrix, _ = weights(load(folder), TEXT, layer=1, length=20)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(4, 20, dtype=torch.float64))
    assert float(matrix.triu(1).abs().max()) == 0
    with pytest.raises(ValueError, match="layer is 2 but the model has the layers 0 to 1"):
        weights(load(folder), TEXT, layer=2)


def test_positions_without_slopes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model has rotary positions, which are not slopes"):
        summary(load(checkpoint_of(tmp_path, "rotary")), TEXT)


def test_the_command_writes_a_table_a_picture_and_a_record(bloom: Path, tmp_path: Path) -> None:
    text, png, svg = tmp_path / "text.txt", tmp_path / "heads.png", tmp_path / "heads.svg"
    text.write_text(TEXT, encoding="utf-8")
    arguments = ["heads", "summary", str(bloom), str(text), "--length", "50"]
    result = CliRunner().invoke(app, [*arguments, "--picture", str(png), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "8 heads on 50 tokens" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    assert CliRunner().invoke(app, [*arguments, "--picture", str(svg)]).exit_code == 0
    assert svg.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    (path,) = (tmp_path / "out").iterdir()
    record = records.load(path)
    assert json.loads(path.read_text(encoding="utf-8"))["kind"] == "heads"
    assert has_maps(record)
    page = report_html([record])
    assert "Where the heads attend: bloom" in page
    assert "Other records" not in page


def test_the_other_commands_show_what_they_measure(bloom: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    given = [str(bloom), str(text), "--length", "40"]
    for command, words in (("weights", "0 back: "), ("reach", "certified"), ("rollout", "with residual")):
        out = [] if command == "weights" else ["--out", str(tmp_path / command)]
        picture = tmp_path / f"{command}.png"
        result = CliRunner().invoke(app, ["heads", command, *given, "--picture", str(picture), *out])
        assert result.exit_code == 0, result.output
        assert words in result.output
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert [record.name for record in records.find(tmp_path / "reach")] == [
        f"trained-reach/bloom/layer-{layer}" for layer in (0, 1)
    ]
    slopes = CliRunner().invoke(app, ["heads", "slopes", "--heads", "12"])
    assert slopes.exit_code == 0
    assert len([line for line in slopes.output.splitlines() if line.strip()]) == 14


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["heads", "summary", "{model}"], "no validation text; pass TEXT"),
        (["heads", "reach", "{model}", "{text}", "--picture", "a.pdf"], "must end in .png or .svg"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_is_loaded(
    arguments, words: str, bloom: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    result = CliRunner().invoke(app, [part.format(model=bloom, text=text) for part in arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_a_text_that_is_too_short_is_refused(bloom: Path) -> None:
    with pytest.raises(ValueError, match="has 3 tokens but 60 are needed"):
        summary(load(bloom), "the cat sat", length=60)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        summary(load(bloom / "gone"), TEXT)
