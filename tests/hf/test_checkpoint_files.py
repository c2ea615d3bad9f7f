"""Published checkpoints: every file layout is read, and damaged files raise an error that names them."""

import json
import os

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from alibi_attn.hf.readers import checkpoint_files
from alibi_attn.hf.readers.checkpoint_files import read_config, read_state, resolve

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(4, dtype=torch.bfloat16)}
SAFE_INDEX, PICKLED_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"


class Malicious:
    """Unpickled by a careless reader, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_shards(folder, index=SAFE_INDEX):
    suffix, writer = (".safetensors", save_file) if index == SAFE_INDEX else (".bin", torch.save)
    places = {}
    for n, (name, tensor) in enumerate(TENSORS.items()):
        places[name] = f"part-{n}{suffix}"
        writer({name: tensor}, folder / places[name])
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": places}))
    return places


def assert_same(found):
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_all_four_layouts_give_the_same_tensors(tmp_path):
    folders = [tmp_path / name for name in "abcde"]
    for folder in folders:
        folder.mkdir()
    save_file(TENSORS, folders[0] / "model.safetensors")
    write_shards(folders[1])
    torch.save(TENSORS, folders[2] / "pytorch_model.bin")
    torch.save(TENSORS, folders[3] / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    write_shards(folders[4], PICKLED_INDEX)
    for folder in folders:
        assert_same(read_state(folder))


def test_safetensors_come_before_a_pickle(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    assert_same(read_state(tmp_path))


TWICE = r" is damaged: .*the name 'schema' comes twice.*; download or save"
NOT_READ = [
    (read_state, {}, r"has no weights: neither model\.safetensors nor pytorch_model\.bin"),
    (read_config, {}, r"config\.json does not exist; pass a folder that holds config\.json"),
    (read_config, {"config.json": '{"schema": 1, "schema": 2}'}, f"config.json{TWICE}"),
    (read_state, {SAFE_INDEX: '{"schema": 1, "schema": 2}'}, f"{SAFE_INDEX}{TWICE}"),
    (read_config, {"config.json": "[1]"}, r"config\.json holds a JSON list but must hold an object"),
]


@pytest.mark.parametrize(("reader", "files", "message"), NOT_READ)
def test_a_missing_or_damaged_config_or_index_is_named(reader, files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError if files else FileNotFoundError, match=message):
        reader(tmp_path)


def test_a_file_that_is_cut_anywhere_is_named(tmp_path):
    torch.save(TENSORS, tmp_path / "new.bin")
    torch.save(TENSORS, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    save_file(TENSORS, tmp_path / "x.safetensors")
    for source, name in (
        ("new.bin", "pytorch_model.bin"),
        ("old.bin", "pytorch_model.bin"),
        ("x.safetensors", "model.safetensors"),
    ):
        content = (tmp_path / source).read_bytes()
        for length in {0, 1, 8, 30, len(content) // 2, len(content) - 40}:
            path = tmp_path / name
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match=rf"{name} is damaged: .+; download or save") as raised:
                read_state(tmp_path)
            assert "\n" not in str(raised.value)
            path.unlink()


def test_nothing_in_a_pickle_is_executed(tmp_path):
    torch.save({"a": Malicious(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds objects other than tensors, which could execute code"):
        read_state(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "does not map names to tensors"),
        ([torch.ones(1)], "does not map names to tensors"),
        ({"state_dict": TENSORS}, "has a dict at 'state_dict'"),
        ({1: torch.ones(1)}, "has a Tensor at 1"),
        ({"a": torch.ones(2, device="meta")}, "quantized, sparse or empty tensor at a"),
    ],
)
def test_a_pickle_of_something_else_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        read_state(tmp_path)


@pytest.mark.parametrize("name", ["../part-0.safetensors", "/etc/passwd", "..", "sub/x.safetensors", "x.bin", "", 7])
def test_an_index_does_not_lead_out_of_its_folder(name, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    write_shards(tmp_path)
    (inside / SAFE_INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(ValueError, match=r"index\.json is damaged: it places a\.weight in"):
        read_state(inside)


@pytest.mark.parametrize("index", [SAFE_INDEX, PICKLED_INDEX])
def test_shards_match_their_index(index, tmp_path):
    places = write_shards(tmp_path, index)
    (tmp_path / index).write_text(json.dumps({"weight_map": {**places, "c.weight": places["a.weight"]}}))
    with pytest.raises(ValueError, match=r"part-0\.\w+ is damaged: c\.weight is missing"):
        read_state(tmp_path)
    (tmp_path / places["b.bias"]).unlink()
    with pytest.raises(ValueError, match=r"part-1\.\w+ is missing, but .* lists weights in it"):
        read_state(tmp_path)
    for nothing in ({}, {"weight_map": {}}, {"weight_map": ["a.weight"]}):
        (tmp_path / index).write_text(json.dumps(nothing))
        with pytest.raises(ValueError, match="has no weight_map"):
            read_state(tmp_path)


def test_a_folder_resolves_to_itself_and_other_names_do_not(tmp_path, monkeypatch):
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="is a file; pass the folder of a checkpoint"):
        resolve(tmp_path / "config.json")
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/c", str(tmp_path / "gone"), "../gone"):
        with pytest.raises(FileNotFoundError, match=r"folder .* does not exist; pass the folder of a checkpoint"):
            resolve(name)


def test_the_hub_gives_safetensors_or_else_pickles_and_no_code(tmp_path, monkeypatch):
    asked = []

    def download(name, *, allow_patterns, **options):
        asked.append((name, allow_patterns, options["revision"]))
        return str(tmp_path)

    monkeypatch.setattr(checkpoint_files, "snapshot_download", download)
    assert resolve("owner/name", revision="main") == tmp_path
    assert [name for name, _, _ in asked] == ["owner/name", "owner/name"]
    assert "model*.safetensors" in asked[0][1]
    assert "pytorch_model*.bin" in asked[1][1]
    assert not any(pattern.endswith((".py", "*")) and pattern != "tokenizer*" for _, p, _ in asked for pattern in p)
    save_file(TENSORS, tmp_path / "model.safetensors")
    asked.clear()
    resolve("owner/name")
    assert len(asked) == 1


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def download(*_, **__):
        raise LocalEntryNotFoundError("no network\nand a long story")

    monkeypatch.setattr(checkpoint_files, "snapshot_download", download)
    with pytest.raises(OSError, match=r"owner/name does not exist, and downloading .* no network\); pass a folder"):
        resolve("owner/name")
