"""An encoder as a SentenceTransformer equals the formulas, survives saving, and refuses unsupported settings."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_oracle import WIDTH, config, pooled, random_state, write_folder, write_tokenizer

from alibi_attn.hf import ALiBiBertModel, sentence_transformer
from alibi_attn.hf.embedding.sentence_encoder import load

TEXTS = ["a b c", "d e f g h i j k a a b", "z"]


def original(folder: Path, layout: str = "jina", *, files: dict[str, object] | None = None, **tokenizer) -> Path:
    """A checkpoint as its family publishes it, with more files."""
    write_tokenizer(write_folder(folder, random_state(layout), config(layout)), **tokenizer)
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def modules(*names: str) -> list[dict[str, object]]:
    """modules.json as older versions wrote it."""
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return [
        {"idx": at, "name": str(at), "path": places.get(name, name), "type": f"sentence_transformers.models.{name}"}
        for at, name in enumerate(names)
    ]


def truth(pooling: str = "mean", layout: str = "jina") -> np.ndarray:
    return torch.stack([pooled(random_state(layout), layout, text, pooling) for text in TEXTS]).numpy()


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= 3e-6 * np.abs(wanted).max()


def test_vectors_are_the_mean_of_the_formulas_and_come_back_from_a_saved_folder(tmp_path):
    from sentence_transformers import SentenceTransformer

    made = sentence_transformer(original(tmp_path / "jina"), device="cpu")
    found = made.encode(TEXTS)
    assert_close(found, truth())
    units = truth() / np.linalg.norm(truth(), axis=1, keepdims=True)
    assert_close(made.similarity(found, found).numpy(), units @ units.T)
    with pytest.raises(AssertionError):
        assert_close(made.encode(TEXTS[::-1]), truth())

    made.save(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "alibi-bert"
    assert "alibi_attn" not in (tmp_path / "saved" / "modules.json").read_text()
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    again = sentence_transformer(tmp_path / "saved", normalize=True, device="cpu")
    for other in (theirs, again):
        assert type(other[0].model) is ALiBiBertModel
        assert other.max_seq_length == 8192  # and not 16, the trained length in the original's config
    assert np.array_equal(theirs.encode(TEXTS), found)
    assert_close(again.encode(TEXTS), units)


def test_the_pooling_settings_of_the_folder_are_applied(tmp_path):
    files = {
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": {
            "word_embedding_dimension": WIDTH,
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
        },
        "sentence_bert_config.json": {"max_seq_length": 6, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": "a a "}, "similarity_fn_name": "dot"},
    }
    made = sentence_transformer(original(tmp_path / "cls", "mosaic", files=files), device="cpu")
    assert made.max_seq_length == 6
    assert made.prompts["query"] == "a a "
    assert made.similarity_fn_name == "dot"
    wanted = truth("cls", "mosaic")[0]
    assert_close(made.encode(TEXTS[0]), wanted / np.linalg.norm(wanted))
    cut = made.encode(TEXTS[1])
    assert np.array_equal(cut, made.encode("d e f g"))


@pytest.mark.parametrize(
    ("said", "asked", "longest"), [({}, None, 8192), ({"model_max_length": 77}, None, 77), ({}, 9000, 9000)]
)
def test_the_longest_text_is_as_requested_or_the_tokenizer_s_or_8192(said, asked, longest, tmp_path):
    assert load(original(tmp_path, **said), max_seq_length=asked).max_seq_length == longest


POOLING = "1_Pooling/config.json"
REFUSED = [
    ({"modules.json": modules("Transformer", "Pooling", "Dense")}, "models.Dense; only Transformer"),
    ({"modules.json": modules("Transformer")}, "lists sentence_transformers.models.Transformer; only"),
    ({"modules.json": [{"type": "their_code.Transformer"}, {}]}, "lists their_code.Transformer, None"),
    ({"modules.json": "[]"}, "lists no module"),
    ({"modules.json": "{"}, r"modules\.json is damaged"),
    (
        {"modules.json": [{**modules("Transformer", "Pooling")[0], "path": "../.."}, modules("", "Pooling")[1]]},
        "is not the name",
    ),
    ({POOLING: {"pooling_mode_max_tokens": True}}, "has pooling max but only mean or cls"),
    ({POOLING: {"pooling_mode": ["cls", "mean"]}}, "has pooling cls and mean but"),
    ({POOLING: {"pooling_mode": 3}}, "has pooling_mode 3"),
    ({POOLING: {"word_embedding_dimension": 7}}, "pools vectors of width 7 but its model has 48"),
    ({POOLING: {"word_embedding_dimension": True}}, "only an integer is supported"),
    ({POOLING: "7"}, "holds a JSON int"),
    ({"sentence_bert_config.json": {"do_lower_case": True}}, "has do_lower_case True, which is not supported"),
    ({"sentence_bert_config.json": {"max_seq_length": 2}}, "max_seq_length is 2 but must be at least 3"),
    ({"config_sentence_transformers.json": {"prompts": ["a"]}}, "has prompts = "),
    ({"tokenizer.json": "{"}, r"tokenizer\.json is damaged"),
]


@pytest.mark.parametrize(("files", "message"), REFUSED)
def test_unsupported_settings_are_refused_by_name(files, message, tmp_path):
    folder = original(tmp_path / "model", files=files)
    with pytest.raises(ValueError, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_tokenizer_or_with_another_model_is_refused(tmp_path):
    folder = original(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="has no tokenizer that transformers can load"):
        load(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer, neither tokenizer\.json nor a vocabulary"):
        load(folder)
    with pytest.raises(FileNotFoundError, match="pass the folder of a checkpoint"):
        sentence_transformer(tmp_path / "gone")


@pytest.mark.parametrize(
    ("longest", "message"), [(0, "is 0 but must be at least 3"), (9.5, "9.5 but must be an integer")]
)
def test_a_length_that_holds_no_text_is_refused(longest, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        load(original(tmp_path / "model"), max_seq_length=longest)


def test_empty_texts_and_texts_of_20_000_tokens_have_vectors(tmp_path):
    model = sentence_transformer(original(tmp_path / "model"), max_seq_length=30_000, device="cpu")
    long = " ".join(["a", "b", "c", "d"] * 5000)
    vectors = model.encode(["", "a b c", " ", long])
    assert np.isfinite(vectors).all()
    for row, text in enumerate(["", "a b c", " ", long]):
        assert np.abs(model.encode(text) - vectors[row]).max() <= 3e-6 * np.abs(vectors).max()
    assert model.encode([]).size == 0


def test_arguments_without_effect_are_accepted_and_others_refused(tmp_path):
    folder = original(tmp_path / "model")
    made = sentence_transformer(folder, device="cpu", trust_remote_code=True)
    assert_close(made.encode(TEXTS), truth())
    with pytest.raises(TypeError, match=r"_transformer\(\) got an unexpected keyword argument 'max_seq_len'; leave"):
        sentence_transformer(folder, max_seq_len=8)


def test_the_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r'install it with: pip install "\.\[embed\]"'):
        sentence_transformer(tmp_path)
