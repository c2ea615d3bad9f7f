"""A decoder exports to an MPT or BLOOM checkpoint that AutoModelForCausalLM loads with equal logits."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from alibi_attn import ALiBiTransformerBlock
from alibi_attn.hf import patch
from alibi_attn.hf.readers.export import DecoderConfig, export_bloom, export_mpt, import_bloom, import_mpt
from alibi_attn.hf.readers.tokenizing import saved_tokenizer
from alibi_lab.lab.data.tokenizing import make_tokenizer

ABOUT = DecoderConfig(num_heads=4, trained_length=64)


class Decoder(nn.Module):
    """The decoder that `export.py` describes."""

    def __init__(self, *, num_heads: int = 4, scale: float = 1.0, vocabulary: int = 50, **block: object) -> None:
        super().__init__()
        self.scale = scale
        self.embedding = nn.Embedding(vocabulary, 32)
        self.blocks = nn.ModuleList(ALiBiTransformerBlock(32, num_heads, **block) for _ in range(2))
        self.norm = nn.LayerNorm(32, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.scale


class WithBiases(Decoder):
    """The one that is a BLOOM."""

    def __init__(self, **options: object) -> None:
        super().__init__(bias=True, **options)
        self.embedding_norm, self.norm = nn.LayerNorm(32), nn.LayerNorm(32)
        for block in self.blocks:
            block.ffn[1] = nn.GELU(approximate="tanh")
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.1, 0.2)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embedding_norm(self.embedding(tokens))


def _without_one(weights: bytes) -> bytes:
    tensors = load(weights)
    del tensors["transformer.norm_f.weight"]
    return save(tensors, metadata={"format": "pt"})


def decoder(kind: type[Decoder] = Decoder, **options: object) -> Decoder:
    torch.manual_seed(0)
    return kind(**options).eval()


def assert_transformers_computes(folder: Path, model: torch.nn.Module, ids: torch.Tensor) -> None:
    """The exported model gives the same logits in transformers, patched also beyond the trained length."""
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids), rtol=1e-4, atol=1e-5)
    with patch(loaded):
        long = torch.randint(50, (1, 100))
        torch.testing.assert_close(loaded(long).logits, model(long), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_heads": 1}, {"num_kv_heads": 2}, {"ffn_dim": 70}, {"scale": math.sqrt(32), "num_kv_heads": 1}],
)
@torch.no_grad()
def test_logits_are_equal_and_the_decoder_comes_back(options, tmp_path):
    model, ids = decoder(**options), torch.randint(50, (2, 40))
    about = DecoderConfig(
        num_heads=options.get("num_heads", 4), trained_length=64, embedding_scale=options.get("scale", 1.0)
    )
    folder = export_mpt(model.state_dict(), about, str(tmp_path / "mpt"))
    assert_transformers_computes(folder, model, ids)
    state, config = import_mpt(str(folder))
    assert config == DecoderConfig(num_heads=about.num_heads, trained_length=64)
    again = decoder(num_heads=about.num_heads)
    again.load_state_dict(state)
    torch.testing.assert_close(again(ids), model(ids), rtol=1e-4, atol=1e-5)
    if not options:
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"num_heads": 4, "num_kv_heads": 2, "ffn_dim": 70}, {"num_heads": 1}])
@torch.no_grad()
def test_a_decoder_with_biases_is_a_bloom_and_comes_back(options, tmp_path):
    model, ids = decoder(WithBiases, **options), torch.randint(50, (2, 40))
    about = DecoderConfig(num_heads=options.get("num_heads", 4), trained_length=64)
    folder = export_bloom(model.state_dict(), about, tmp_path / "bloom")
    assert_transformers_computes(folder, model, ids)
    state, config = import_bloom(folder)
    assert config == about
    again = decoder(WithBiases, num_heads=about.num_heads)
    again.load_state_dict(state)
    torch.testing.assert_close(again(ids), model(ids), rtol=1e-4, atol=1e-5)
    if "num_kv_heads" not in options:
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_a_bloom_that_was_made_elsewhere_becomes_a_decoder(tmp_path, build, tokens):
    bloom, ids = build("bloom", hidden_size=32, n_head=4), tokens(2, 30)
    bloom.save_pretrained(tmp_path / "bloom")
    state, config = import_bloom(tmp_path / "bloom")
    ours = decoder(WithBiases, vocabulary=60)
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(ids), bloom(ids).logits, rtol=1e-4, atol=1e-5)
    assert config.trained_length == 2048  # the default: its config has no length
    assert (ours.norm.eps, config.norm_eps) == (1e-5, 1e-5)


@pytest.mark.parametrize("name", ["bytes", "words", "bpe:300"])
def test_a_saved_tokenizer_of_the_lab_encodes_the_same(name):
    text = "the house, the garden\nand Ж 🙂 the house\n" * 20
    lab = make_tokenizer(name, lambda: iter([text.encode()]), len(text.encode()))
    tokenizer, asked = saved_tokenizer(lab.dump()), "the garden\n  and 🙂 Ж the unheard-of"
    assert tokenizer.get_vocab_size() == lab.vocab_size
    assert tokenizer.encode(asked).ids == lab.encode(asked).tolist()
    if name != "words":
        assert tokenizer.decode(tokenizer.encode(asked).ids) == asked


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "not a tokenizer file of the lab"),
        (b"[", "not a tokenizer file of the lab"),
        (b'{"schema": 1, "schema": 2}', r"not a tokenizer file of the lab \(the name 'schema' comes twice"),
        (b'{"schema": 1, "tokenizer": "words", "words": [1]}', "the tokenizer 'words' has no vocabulary"),
        (b'{"schema": 9, "tokenizer": "bytes"}', "has schema 9 but this version reads 1"),
    ],
)
def test_another_file_is_no_tokenizer(content, message):
    with pytest.raises(ValueError, match=message):
        saved_tokenizer(content)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_norm": True}, r"unexpected blocks\.0\.attention\.k_norm\.weight"),
        ({"bias": True}, r"bias"),
        ({"learn_slopes": True}, r"slopes\.values"),
        ({"ffn_dim": 130}, r"is 130 wide but must be at most 4·32 = 128, the width of MPT"),
    ],
)
def test_models_that_mpt_cannot_express_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_mpt(decoder(**options).state_dict(), ABOUT, tmp_path / "mpt")
    assert list(tmp_path.iterdir()) == []


def test_errors_for_wrong_use_say_what_is_allowed(tmp_path, build):
    state = decoder().state_dict()
    with pytest.raises(ValueError, match="num_heads is 5 but must divide the width, 32"):
        export_mpt(state, DecoderConfig(num_heads=5, trained_length=64), tmp_path / "mpt")
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="never overwritten"):
        export_mpt({}, ABOUT, tmp_path / "there")  # before the state dict is read
    with pytest.raises(ValueError, match=r"cannot be exported as BLOOM: .* missing blocks\.0\.attention\.k_proj\.bias"):
        export_bloom(state, ABOUT, tmp_path / "bloom")
    about = DecoderConfig(num_heads=4, trained_length=64, embedding_scale=2.0)
    with pytest.raises(ValueError, match=r"embedding_scale is 2\.0 and bias_max 8 but a BLOOM has"):
        export_bloom(decoder(WithBiases).state_dict(), about, tmp_path / "bloom")
    build("mpt").save_pretrained(tmp_path / "mpt")
    with pytest.raises(ValueError, match="holds a mpt model but must hold a BLOOM"):
        import_bloom(tmp_path / "mpt")
    build("bloom", apply_residual_connection_post_layernorm=True).save_pretrained(tmp_path / "post")
    with pytest.raises(ValueError, match="residual starts after the norm"):
        import_bloom(tmp_path / "post")
    build("bloom").save_pretrained(tmp_path / "bloom")
    with pytest.raises(ValueError, match="holds a bloom model but must hold an MPT"):
        import_mpt(tmp_path / "bloom")
    build("mpt", attention={"clip_qkv": 1.0}).save_pretrained(tmp_path / "clipped")
    with pytest.raises(ValueError, match="without clipping or QK-norm, can be imported; patch the model instead"):
        import_mpt(tmp_path / "clipped")
    del state["norm.weight"]
    with pytest.raises(ValueError, match=r"missing norm\.weight"):
        export_mpt(state, ABOUT, tmp_path / "other")


def test_a_config_that_is_no_json_is_refused_with_its_path_and_the_reason(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"schema": 1, "schema": 2}')
    for read in (import_mpt, import_bloom):
        with pytest.raises(ValueError, match=rf"{tmp_path / 'config.json'} is damaged: the name 'schema' comes twice"):
            read(tmp_path)


def damaged(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def saying(**fields: object) -> Callable[[Path], object]:
    return damaged("config.json", lambda content: json.dumps(json.loads(content) | fields).encode())


WEIGHTS, CORRECT = "model.safetensors", "(correct it|cannot be loaded|save or download it again)"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damaged(WEIGHTS, lambda content: content[: len(content) // 2]), "incomplete metadata"),
        (damaged(WEIGHTS, lambda _: b""), "header too small"),
        (damaged(WEIGHTS, _without_one), r"missing weight: transformer\.norm_f\.weight"),
        (saying(d_model="wide"), CORRECT),
        (saying(d_model=-32), CORRECT),
        (saying(n_heads=0), CORRECT),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_or_wrong_files_are_refused(damage, reason, tmp_path):
    folder = export_mpt(decoder().state_dict(), ABOUT, tmp_path / "mpt")
    damage(folder)
    with pytest.raises(ValueError, match=rf"{folder}.*{reason}"):
        import_mpt(folder)
