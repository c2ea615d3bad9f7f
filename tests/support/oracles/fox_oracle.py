"""The Forgetting Transformer from its formulas, in fp64, one head and one query at a time.

With the names of flash-linear-attention, or of the authors, whose model_type is AUTHORS.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

AUTHORS = "forgetting_transformer-project_fox"
# Names of the authors that are renamed; they store both halves of SwiGLU in one matrix.
AUTHORS_NAMES = {"attn.f_proj.": "attn.fgate_proj.", "attn.g_proj.": "attn.ogate_proj."}
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
        if about["model_type"] == AUTHORS:
            layer = _of_the_authors(layer, about, draw)
        weights |= {f"model.layers.{n}.{name}": tensor for name, tensor in layer.items()}
    return weights, about


def _of_the_authors(layer: dict[str, Tensor], about: dict[str, object], draw) -> dict[str, Tensor]:
    """The same weights by the authors' names, and those that only they have."""
    width, heads = about["hidden_size"], about["num_heads"]
    for ours, theirs in AUTHORS_NAMES.items():
        layer = {name.replace(ours, theirs): tensor for name, tensor in layer.items()}
    layer["mlp.gate_proj.weight"] = torch.cat((layer["mlp.gate_proj.weight"], layer.pop("mlp.up_proj.weight")))
    for part in "kv":
        if about.get(f"use_{part}_shift"):
            layer[f"attn.{part}_proj.linear.weight"] = layer.pop(f"attn.{part}_proj.weight")
            layer[f"attn.{part}_proj.shift_proj.weight"] = draw(heads, width) * 2
    if about.get("use_output_norm"):
        layer["attn.output_norm.weight"] = draw(width, around=1.0)
    if about.get("qk_norm_share_param_across_head"):
        layer |= {f"attn.{part}_norm.weight": draw(width // heads, around=1.5) for part in "qk"}
    return layer


def logits(weights: dict[str, Tensor], about: dict[str, object], ids: list[int] | Tensor) -> Tensor:
    """Logits [T, V] of one text without padding."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embeddings.weight"][torch.as_tensor(ids)]
    for n in range(about["num_hidden_layers"]):
        at = f"model.layers.{n}."
        layer = {name.removeprefix(at): tensor for name, tensor in w.items() if name.startswith(at)}
        x = x + _attention(layer, about, _rms(x, layer["attn_norm.weight"], about["norm_eps"]))
        y = _rms(x, layer["mlp_norm.weight"], about["norm_eps"])
        gate, up = layer["mlp.gate_proj.weight"], layer.get("mlp.up_proj.weight")
        gate, up = gate.chunk(2) if up is None else (gate, up)
        gated = F.silu(y @ gate.T) * (y @ up.T)
        x = x + gated @ layer["mlp.down_proj.weight"].T
    return _rms(x, w["model.norm.weight"], about["norm_eps"]) @ w["lm_head.weight"].T


def _attention(layer: dict[str, Tensor], about: dict[str, object], x: Tensor) -> Tensor:
    heads = about["num_heads"]
    key_heads = about.get("num_kv_heads") or heads
    size = about["hidden_size"] // heads
    is_authors = about["model_type"] == AUTHORS
    q, k, v = (_projected(layer, one, x) for one in "qkv")
    q, k, v = q.unflatten(-1, (heads, size)), k.unflatten(-1, (key_heads, size)), v.unflatten(-1, (key_heads, size))
    k, v = _shifted(layer, "k", x, k), _shifted(layer, "v", x, v)
    if about.get("qk_norm"):
        q_weight, k_weight = layer["attn.q_norm.weight"], layer["attn.k_norm.weight"]
        q = _rms(q, q_weight.view(-1, size), 1e-5)  # one row, or one per head
        k = _rms(k, k_weight.view(-1, size), 1e-5)
    forget, gate = ("fgate", "ogate") if is_authors else ("f", "g")
    gates = _sigmoid(x @ layer[f"attn.{forget}_proj.weight"].T + layer[f"attn.{forget}_proj.bias"])
    output = torch.zeros(len(x), heads, size, dtype=torch.float64)
    for head in range(heads):
        shared = head * key_heads // heads
        for i in range(len(x)):
            weights = [
                (q[i, head] @ k[j, shared] / size**0.5).exp() * gates[j + 1 : i + 1, head].prod() for j in range(i + 1)
            ]
            output[i, head] = torch.stack(weights) @ v[: i + 1, shared] / sum(weights)
    if about.get("use_output_norm"):
        output = _rms(output, layer["attn.output_norm.weight"].view(heads, size), about["norm_eps"])
    output = output.flatten(1)
    if about.get("use_output_gate"):
        output = output * _sigmoid(x @ layer[f"attn.{gate}_proj.weight"].T)
    return output @ layer["attn.o_proj.weight"].T


def _projected(layer: dict[str, Tensor], one: str, x: Tensor) -> Tensor:
    weight = layer.get(f"attn.{one}_proj.weight", layer.get(f"attn.{one}_proj.linear.weight"))
    return x @ weight.T + layer.get(f"attn.{one}_proj.bias", 0)


def _shifted(layer: dict[str, Tensor], one: str, x: Tensor, y: Tensor) -> Tensor:
    """Each row is mixed with the one before it."""
    if f"attn.{one}_proj.shift_proj.weight" not in layer:
        return y
    alpha = _sigmoid(x @ layer[f"attn.{one}_proj.shift_proj.weight"].T)
    rows = [(1 - alpha[t])[:, None] * y[t] + (alpha[t][:, None] * y[t - 1] if t else 0) for t in range(len(y))]
    return torch.stack(rows)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
