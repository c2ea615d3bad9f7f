"""The Forgetting Transformer of flash-linear-attention from its formulas, in fp64, one head and one query at a time."""

import torch
from torch import Tensor
from torch.nn import functional as F

SIZES = {"vocab_size": 40, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 6, "intermediate_size": 32}


def checkpoint(seed: int, **about: object) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Random weights by their published names, and the config. Gates keep between a tenth and nearly all."""
    about = {"model_type": "forgetting_transformer", "norm_eps": 1e-6, **SIZES, **about}
    width, inner, heads = about["hidden_size"], about["intermediate_size"], about["num_heads"]
    shared = width // heads * (about.get("num_kv_heads") or heads)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, around: float = 0.0) -> Tensor:
        return around + torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)

    weights = {
        "model.embeddings.weight": draw(about["vocab_size"], width) * 5,
        "model.norm.weight": draw(width, around=1.0),
        "lm_head.weight": draw(about["vocab_size"], width),
    }
    for n in range(about["num_hidden_layers"]):
        layer = {
            "attn_norm.weight": draw(width, around=1.0),
            "mlp_norm.weight": draw(width, around=1.0),
            "attn.q_proj.weight": draw(width, width) * 2,
            "attn.k_proj.weight": draw(shared, width) * 2,
            "attn.v_proj.weight": draw(shared, width),
            "attn.f_proj.weight": draw(heads, width) * 2,
            "attn.f_proj.bias": draw(heads, around=2.0),
            "attn.o_proj.weight": draw(width, width),
            "mlp.gate_proj.weight": draw(inner, width),
            "mlp.up_proj.weight": draw(inner, width),
            "mlp.down_proj.weight": draw(width, inner),
        }
        if about.get("qkv_bias"):
            sizes = (("q", width), ("k", shared), ("v", shared))
            layer |= {f"attn.{name}_proj.bias": draw(size) for name, size in sizes}
        if about.get("qk_norm"):
            layer |= {"attn.q_norm.weight": draw(width, around=1.5), "attn.k_norm.weight": draw(shared, around=1.5)}
        if about.get("use_output_gate"):
            layer["attn.g_proj.weight"] = draw(width, width)
        weights |= {f"model.layers.{n}.{name}": tensor for name, tensor in layer.items()}
    return weights, about


def logits(weights: dict[str, Tensor], about: dict[str, object], ids: list[int] | Tensor) -> Tensor:
    """Logits [T, V] of one text without padding."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embeddings.weight"][torch.as_tensor(ids)]
    for n in range(about["num_hidden_layers"]):
        at = f"model.layers.{n}."
        layer = {name.removeprefix(at): tensor for name, tensor in w.items() if name.startswith(at)}
        x = x + _attention(layer, about, _rms(x, layer["attn_norm.weight"], about["norm_eps"]))
        y = _rms(x, layer["mlp_norm.weight"], about["norm_eps"])
        gated = F.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + gated @ layer["mlp.down_proj.weight"].T
    return _rms(x, w["model.norm.weight"], about["norm_eps"]) @ w["lm_head.weight"].T


def _attention(layer: dict[str, Tensor], about: dict[str, object], x: Tensor) -> Tensor:
    heads = about["num_heads"]
    key_heads = about.get("num_kv_heads") or heads
    size = about["hidden_size"] // heads
    q, k, v = (x @ layer[f"attn.{one}_proj.weight"].T + layer.get(f"attn.{one}_proj.bias", 0) for one in "qkv")
    q, k, v = q.unflatten(-1, (heads, size)), k.unflatten(-1, (key_heads, size)), v.unflatten(-1, (key_heads, size))
    if about.get("qk_norm"):
        q = _rms(q, layer["attn.q_norm.weight"].view(heads, size), 1e-5)
        k = _rms(k, layer["attn.k_norm.weight"].view(key_heads, size), 1e-5)
    gates = 1 / (1 + (-(x @ layer["attn.f_proj.weight"].T + layer["attn.f_proj.bias"])).exp())
    output = torch.zeros(len(x), heads, size, dtype=torch.float64)
    for head in range(heads):
        shared = head * key_heads // heads
        for i in range(len(x)):
            weights = [
                (q[i, head] @ k[j, shared] / size**0.5).exp() * gates[j + 1 : i + 1, head].prod() for j in range(i + 1)
            ]
            output[i, head] = torch.stack(weights) @ v[: i + 1, shared] / sum(weights)
    output = output.flatten(1)
    if about.get("use_output_gate"):
        output = output / (1 + (-(x @ layer["attn.g_proj.weight"].T)).exp())
    return output @ layer["attn.o_proj.weight"].T


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
