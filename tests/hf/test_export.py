"""A decoder exports to an MPT or BLOOM checkpoint that AutoModelForCausalLM loads with equal logits."""

import dataclasses
import math

import pytest
import torch
from refusals import assert_refused
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


def decoder(kind: type[Decoder] = Decoder, **options: object) -> Decoder:
    torch.manual_seed(0)
    return kind(**options).eval()


ONE, SHARED = {"num_heads": 1}, {"num_kv_heads": 2, "ffn_dim": 70}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((Decoder, x) for x in ({}, ONE, {"num_kv_heads": 2}, {"ffn_dim": 70})),
        (Decoder, {"scale": math.sqrt(32), "num_kv_heads": 1}),
        *((WithBiases, x) for x in ({}, ONE, SHARED)),
    ],
)
@torch.no_grad()
def test_logits_are_equal_and_the_decoder_comes_back(kind, options, tmp_path):
    """An MPT, or a BLOOM if it has biases."""
    export, read = (export_mpt, import_mpt) if kind is Decoder else (export_bloom, import_bloom)
    model, ids = decoder(kind, **options), torch.randint(50, (2, 40))
    about = dataclasses.replace(ABOUT, num_heads=options.get("num_heads", 4))
    scaled = dataclasses.replace(about, embedding_scale=options.get("scale", 1.0))
    folder = export(model.state_dict(), scaled, str(tmp_path / "folder"))
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids), rtol=1e-4, atol=1e-5)
    with patch(loaded):
        long = torch.randint(50, (1, 100))  # beyond the trained length
        torch.testing.assert_close(loaded(long).logits, model(long), rtol=1e-4, atol=1e-5)
    state, config = read(str(folder))
    assert config == about
    again = decoder(kind, num_heads=about.num_heads)
    again.load_state_dict(state)
    torch.testing.assert_close(again(ids), model(ids), rtol=1e-4, atol=1e-5)
    if options in ({}, ONE):
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
    state, biased, out = decoder().state_dict(), decoder(WithBiases).state_dict(), tmp_path / "out"
    incomplete = {name: x for name, x in state.items() if name != "norm.weight"}
    five, scaled = dataclasses.replace(ABOUT, num_heads=5), dataclasses.replace(ABOUT, embedding_scale=2.0)
    for name, changes in (
        ("mpt", {}),
        ("mpt-clipped", {"attention": {"clip_qkv": 1.0}}),
        ("bloom", {}),
        ("bloom-post", {"apply_residual_connection_post_layernorm": True}),
    ):
        build(name.partition("-")[0], **changes).save_pretrained(tmp_path / name)
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "config.json").write_bytes(b'{"schema": 1, "schema": 2}')
    less = export_mpt(state, ABOUT, tmp_path / "less")
    weights = load((less / "model.safetensors").read_bytes())
    del weights["transformer.norm_f.weight"]
    (less / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    twice = rf"{tmp_path / 'twice' / 'config.json'} is damaged: the name 'schema' comes twice"
    assert_refused(
        ("num_heads is 5 but must divide the width, 32", lambda: export_mpt(state, five, out)),
        (r"missing norm\.weight", lambda: export_mpt(incomplete, ABOUT, out)),
        (r"as BLOOM: .* missing blocks\.0\.attention\.k_proj\.bias", lambda: export_bloom(state, ABOUT, out)),
        (r"embedding_scale is 2\.0 and bias_max 8 but a BLOOM has", lambda: export_bloom(biased, scaled, out)),
        ("holds a mpt model but must hold a BLOOM", lambda: import_bloom(tmp_path / "mpt")),
        ("residual starts after the norm", lambda: import_bloom(tmp_path / "bloom-post")),
        ("holds a bloom model but must hold an MPT", lambda: import_mpt(tmp_path / "bloom")),
        ("clipping or QK-norm, can be imported; patch the", lambda: import_mpt(tmp_path / "mpt-clipped")),
        (rf"{less} has 1 missing weight: transformer\.norm_f\.weight", lambda: import_mpt(less)),
        (twice, lambda: import_mpt(tmp_path / "twice")),
        (twice, lambda: import_bloom(tmp_path / "twice")),
    )
    with pytest.raises(FileExistsError, match="never overwritten"):
        export_mpt({}, ABOUT, tmp_path)  # before the state dict is read
    assert not out.exists()
