"""Step-1 in ALiBiForCausalLM equals its formulas in fp64, one head and one query at a time."""

import json
import math
from pathlib import Path

import pytest
import torch
from encoder_oracle import write_folder
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, StaticCache

from alibi_attn.hf import ALiBiCache, ALiBiCausalLMConfig, ALiBiForCausalLM, record_attention

ABOUT = {
    "model_type": "step1",
    "architectures": ["Step1ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_attention_heads": 6,
    "num_attention_groups": 2,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "max_seq_len": 128,
    "tie_word_embeddings": False,
}


def weights() -> dict[str, Tensor]:
    """Random ones by their published names."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, around: float = 0.0) -> Tensor:
        return around + torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)

    found = {"model.embed_tokens.weight": 5 * draw(40, 48), "model.norm.weight": draw(48, around=1.0)}
    found["lm_head.weight"] = draw(40, 48)
    for n in range(2):
        layer = {
            "input_layernorm.weight": draw(48, around=1.0),
            "post_attention_layernorm.weight": draw(48, around=1.0),
            "self_attn.q_proj.weight": 2 * draw(48, 48),
            "self_attn.k_proj.weight": 2 * draw(16, 48),
            "self_attn.v_proj.weight": draw(16, 48),
            "self_attn.o_proj.weight": draw(48, 48),
            "mlp.gate_proj.weight": draw(32, 48),
            "mlp.up_proj.weight": draw(32, 48),
            "mlp.down_proj.weight": draw(48, 32),
        }
        found |= {f"model.layers.{n}.{name}": x for name, x in layer.items()}
    return found


def slopes(heads: int) -> list[float]:
    """`build_alibi_cache` of modeling_step1.py."""
    n = 2 ** math.floor(math.log2(heads))
    return [2.0 ** (-8.0 / n * (h + 1)) for h in range(n)] + [2.0 ** (-4.0 / n * (2 * h + 1)) for h in range(heads - n)]


def formulas(ids: Tensor) -> Tensor:
    """Logits [T, V] of one row."""
    w = {name: x.double() for name, x in weights().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w[name]

    x = w["model.embed_tokens.weight"][ids]
    for n in range(2):
        of = f"model.layers.{n}."
        y = norm(x, of + "input_layernorm.weight")
        q, k, v = (y @ w[f"{of}self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = torch.zeros_like(q)
        for h, m in enumerate(slopes(6)):
            own, shared = slice(8 * h, 8 * h + 8), slice(8 * (h // 3), 8 * (h // 3) + 8)
            for i in range(len(ids)):
                away = torch.arange(i, -1, -1.0, dtype=torch.float64)
                scores = k[: i + 1, shared] @ q[i, own] / 8**0.5 - m * away.sqrt()
                mixed[i, own] = scores.softmax(0) @ v[: i + 1, shared]
        x = x + mixed @ w[of + "self_attn.o_proj.weight"].T
        y = norm(x, of + "post_attention_layernorm.weight")
        gated = F.silu(y @ w[of + "mlp.gate_proj.weight"].T) * (y @ w[of + "mlp.up_proj.weight"].T)
        x = x + gated @ w[of + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "step", weights(), ABOUT)


IDS = torch.randint(1, 40, (2, 50), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def test_logits_and_cached_tokens_are_those_of_the_formulas(folder: Path) -> None:
    expected = torch.stack([formulas(row) for row in IDS])
    model = ALiBiForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for backend in ("auto", "native", "dense"):
        model = ALiBiForCausalLM.from_pretrained(folder, dtype=torch.float64, backend=backend)
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-11, atol=1e-11)
    for cache in (ALiBiCache(), DynamicCache()):
        steps = [model(part, past_key_values=cache).logits for part in IDS.split([30, 15, 1, 1, 3], dim=1)]
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-11, atol=1e-11)
    single = ALiBiForCausalLM.from_pretrained(folder)(IDS).logits
    assert float((single.double() - expected).abs().max() / expected.abs().max()) < 5e-6


@torch.no_grad()
def test_padding_and_other_texts_change_nothing(folder: Path) -> None:
    model = ALiBiForCausalLM.from_pretrained(folder, dtype=torch.float64)
    expected = torch.stack([formulas(row) for row in IDS])
    padded = torch.cat([torch.zeros(2, 7, dtype=torch.long), IDS], 1)
    seen = model(padded, attention_mask=(torch.arange(57) >= 7).expand(2, -1)).logits[:, 7:]
    torch.testing.assert_close(seen, expected, rtol=1e-11, atol=1e-11)
    packed = model(IDS.reshape(1, -1), segment_ids=torch.arange(100)[None] // 50).logits
    torch.testing.assert_close(packed.reshape(expected.shape), expected, rtol=1e-11, atol=1e-11)


def test_it_generates_trains_saves_and_records(folder: Path, tmp_path: Path) -> None:
    model = ALiBiForCausalLM.from_pretrained(folder)
    tokens = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        greedy = model(tokens[:, :-1]).logits[:, 49:].argmax(-1)
    assert torch.equal(greedy, tokens[:, 50:])
    model(IDS, labels=IDS).loss.backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in model.parameters())
    model.save_pretrained(tmp_path / "saved")
    again = ALiBiForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.root_bias
    with torch.no_grad(), record_attention(again, rows=[-1]) as passes:
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits)
    torch.testing.assert_close(passes[0][0].sum(-1), torch.ones(2, 6, 1))


def test_llama_with_the_same_names_is_not_taken_for_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", weights(), ABOUT | {"model_type": "llama"})
    with pytest.raises(ValueError, match="does not hold a checkpoint of Baichuan-13B"):
        ALiBiForCausalLM.from_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_what_needs_the_length_on_the_device_is_refused(folder: Path) -> None:
    model = ALiBiForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="needs the length of the text, which a static cache does not report"):
        model(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=60))
    with pytest.raises(ValueError, match="prefix_len and positions do not exist for a model with a bias by the root"):
        model(IDS, prefix_len=torch.tensor([3, 3]))
    with pytest.raises(StrictDataclassError, match="root_bias"):
        ALiBiCausalLMConfig(root_bias=True, alibi_scaling={"type": "linear", "factor": 2.0})
