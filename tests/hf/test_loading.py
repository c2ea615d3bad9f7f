"""`load_decoder`, which the commands call: a folder whose weights, config or tokenizer are wrong raises one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoder_checkpoints import SIZES, original
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from alibi_attn.hf import ALiBiCache, ALiBiCausalLMConfig, ALiBiForCausalLM, read
from alibi_attn.hf.patching.loading import load_decoder
from alibi_attn.hf.readers.tokenizer_files import encode
from alibi_lab.cli.main import app

FAMILIES = ("bloom", "falcon", "mpt", "own")
HEADS = {"bloom": "n_head", "falcon": "num_attention_heads", "mpt": "n_heads", "own": "num_attention_heads"}
WIDTHS = {"bloom": "hidden_size", "falcon": "hidden_size", "mpt": "d_model", "own": "hidden_size"}
LAYERS = {"bloom": "n_layer", "falcon": "num_hidden_layers", "mpt": "n_layers", "own": "num_hidden_layers"}


def write_words(folder: Path, first: int = 0) -> None:
    words = Tokenizer(models.WordLevel({f"w{n}": first + n for n in range(60)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def folder_of(kept, build, tmp_path) -> Callable[[str], Path]:
    """A folder of this family, of which each test has its own copy."""

    def folder(family: str) -> Path:
        if not (kept / family).exists():
            model = ALiBiForCausalLM(ALiBiCausalLMConfig(**SIZES)) if family == "own" else build(family)
            model.save_pretrained(kept / family)
            write_words(kept / family)
        return Path(shutil.copytree(kept / family, tmp_path / family))

    return folder


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def assert_refused(folder: Path, *parts: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_decoder(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_and_its_tokenizer_are_those_of_the_folder(family, folder_of):
    folder = folder_of(family)
    model, tokenizer = load_decoder(str(folder))
    assert not model.training
    assert model.config.name_or_path == str(folder)
    assert encode(tokenizer, "w3 w59 w0", model) == [3, 59, 0]


def test_an_mpt_that_transformers_cannot_run_is_loaded_as_ours(tmp_path):
    """With grouped heads and `qk_ln`."""
    folder = original("mpt-grouped").write(tmp_path / "mpt")
    write_words(folder)
    assert isinstance(load_decoder(str(folder))[0], ALiBiForCausalLM)


def test_missing_weights_are_named_and_counted(folder_of):
    """transformers draws them at random, so two runs would differ."""
    folder = folder_of("bloom")
    change_weights(folder, lambda state: [state.pop(name) for name in list(state) if "query_key_value" in name])
    layer = "transformer.h.0.self_attention.query_key_value"
    last = "transformer.h.1.self_attention.query_key_value.bias"
    assert_refused(folder, f"4 missing weights: {layer}.bias, {layer}.weight, {last} and 1 more; its config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_unexpected_or_mismatched_weight_is_refused(family, folder_of):
    folder = folder_of(family)
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith(("h.0.mlp.dense_4h_to_h.weight", "0.ffn.down_proj.weight")))
    change_weights(folder, lambda state: state.pop(name))
    assert_refused(folder, name, "missing")
    more = "more.weight" if family == "own" else "transformer.more.weight"
    save_file({**state, more: torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(folder, more, "unexpected")
    cut = state[name][:, :5].clone()
    save_file({**state, name: cut}, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(folder, f"{name} [48, 5]", f"[48, {state[name].shape[1]}]")


@pytest.mark.parametrize("family", FAMILIES[:-1])
def test_a_head_that_a_decoder_lacks_is_named_and_ignored(family, folder_of, caplog):
    folder = folder_of(family)
    expected = load_decoder(str(folder))[0].state_dict()
    change_weights(folder, lambda state: state.update({"v_head.summary.weight": torch.ones(2)}))
    found = load_decoder(str(folder))[0].state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    (line,) = [line for line in caplog.messages if "another head" in line]
    assert "v_head.summary.weight" in line


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_another_model_is_refused_before_memory_is_allocated(family, folder_of):
    folder = folder_of(family)
    before = (folder / "config.json").read_text()
    for fields, part in (
        ({LAYERS[family]: 10**6}, "has 2 layers but its config says 1000000"),
        ({"vocab_size": 10**11}, "100000000000"),
        ({HEADS[family]: 7}, "7"),
        ({HEADS[family]: 0}, ""),
        ({HEADS[family]: "six"}, "six"),
        ({WIDTHS[family]: -32}, ""),
        ({WIDTHS[family]: "wide"}, ""),
    ):
        change_config(folder, **fields)
        assert_refused(folder, part)
        (folder / "config.json").write_text(before)
    load_decoder(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_files_are_named(family, folder_of):
    folder = folder_of(family)
    weights = folder / "model.safetensors"
    before = weights.read_bytes()
    for length in (0, 5, len(before) // 2):
        weights.write_bytes(before[:length])
        assert_refused(folder, "model.safetensors is damaged")
    weights.write_bytes(before)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    assert_refused(folder, "has no tokenizer that transformers can load")
    (folder / "tokenizer.json").write_text('{"a": ')
    assert_refused(folder, "tokenizer.json is damaged")
    (folder / "tokenizer.json").unlink()
    assert_refused(folder, "has no tokenizer")


def test_a_truncated_shard_or_pickle_is_named(folder_of, build):
    folder = folder_of("bloom")
    (folder / "model.safetensors").unlink()
    build("bloom").save_pretrained(folder, max_shard_size="50KB")
    load_decoder(str(folder))
    shard = max(folder.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])
    assert_refused(folder, f"{shard.name} is damaged")
    for path in folder.glob("model*"):
        path.unlink()
    torch.save(build("bloom").transformer.state_dict(), folder / "pytorch_model.bin")  # names without "transformer."
    load_decoder(str(folder))
    change_config(folder, vocab_size=61)
    assert_refused(folder, "transformer.word_embeddings.weight [60, 48] instead of [61, 48]")
    pickle = folder / "pytorch_model.bin"
    pickle.write_bytes(pickle.read_bytes()[:-9])
    assert_refused(folder, "pytorch_model.bin is damaged")


@pytest.mark.parametrize("family", FAMILIES)
def test_token_ids_beyond_the_vocabulary_are_refused(family, folder_of):
    folder = folder_of(family)
    write_words(folder, first=20)
    model, tokenizer = load_decoder(str(folder))
    assert encode(tokenizer, "w39", model) == [59]
    with pytest.raises(ValueError, match="gives token id 79 but the model has 60 token ids"):
        encode(tokenizer, "w1 w59", model)
    for ids in ([[3, 60]], [[-1, 3]]):
        with pytest.raises(ValueError, match="but the model has 60, 0 and up"):
            read(model, torch.tensor(ids), ALiBiCache())


@pytest.mark.parametrize("command", ["eval-text", "heads summary"])
def test_the_commands_compute_nothing_with_random_weights(command, folder_of, tmp_path):
    folder = folder_of("bloom")
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4")
    change_weights(folder, lambda state: state.pop("transformer.h.0.mlp.dense_4h_to_h.weight"))
    result = CliRunner().invoke(app, [*command.split(), str(folder), str(text)])
    assert "1 missing weight: transformer.h.0.mlp.dense_4h_to_h.weight" in str(result.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bloom", "text.txt"]
