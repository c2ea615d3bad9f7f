"""Published decoders from their formulas, in fp64 and one head at a time, with their original names and configs."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_attn import alibi_slopes

# The error of a decoding step's logits, as a share of the largest logit: a few roundings.
STEP_ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def logits(
    weights: dict[str, Tensor],
    about: dict[str, object],
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    normalized_head: bool = False,
) -> Tensor:
    """Logits [B, T, V] of the whole text at once; rows of padding are meaningless.

    Args:
        weights, about: of the checkpoint, as in `decoder_checkpoints.original`.
        mask: [B, T], 1 = may be seen.
        normalized_head: whether to normalize the head's rows, as Baichuan2 does.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    family = {"baichuan": _baichuan, "step1": _baichuan, "jais": _cerebras, "btlm": _cerebras, "mpt": _mpt}
    family["gpt_refact"] = _refact
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return family[about["model_type"]](w, about, ids, seen, normalized_head)


def attention(query, key, value, slopes: Tensor, scale: float, seen: Tensor, power: float = 1.0) -> Tensor:
    """Σ_j softmax_j(scale·q_i·k_j − m·(i − j)^power)·v_j over the visible keys j ≤ i: [B, T, H|K, D] -> [B, T, H·D]."""
    length, heads = query.shape[1:3]
    at = torch.arange(length)
    distance = (at[:, None] - at).double()
    outputs = []
    for head in range(heads):
        shared = head * key.shape[2] // heads
        scores = scale * query[:, :, head] @ key[:, :, shared].mT - slopes[head] * distance.clamp(min=0) ** power
        scores = scores.masked_fill((distance < 0) | ~seen[:, None, :], -math.inf)
        shares = scores.softmax(-1).nan_to_num(0.0)  # a query that sees nothing
        outputs.append(shares @ value[:, :, shared])
    return torch.cat(outputs, dim=-1)


def published(heads: int, bias_max: float = 8.0) -> Tensor:
    return torch.as_tensor(alibi_slopes(heads, bias_max=bias_max), dtype=torch.float64)


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _conv1d(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def _layer_norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), eps=1e-5)


def _heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size))


def _baichuan(w: dict[str, Tensor], about: dict, ids: Tensor, seen: Tensor, normalized_head: bool) -> Tensor:
    def rms(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + about["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    width, heads = about["hidden_size"], about["num_attention_heads"]
    size, x, power = width // heads, w["model.embed_tokens.weight"][ids], 0.5 if about["model_type"] == "step1" else 1.0
    for n in range(about["num_hidden_layers"]):
        at = f"model.layers.{n}"
        y = rms(f"{at}.input_layernorm", x)
        if power == 1.0:
            parts = _linear(w, f"{at}.self_attn.W_pack", y).chunk(3, -1)
        else:
            parts = [_linear(w, f"{at}.self_attn.{part}_proj", y) for part in "qkv"]
        q, k, v = (_heads(part, size) for part in parts)
        x = x + _linear(w, f"{at}.self_attn.o_proj", attention(q, k, v, published(heads), size**-0.5, seen, power))
        y = rms(f"{at}.post_attention_layernorm", x)
        gated = F.silu(_linear(w, f"{at}.mlp.gate_proj", y)) * _linear(w, f"{at}.mlp.up_proj", y)
        x = x + _linear(w, f"{at}.mlp.down_proj", gated)
    head = w["lm_head.weight"]
    head = head / head.norm(dim=1, keepdim=True) if normalized_head else head
    return rms("model.norm", x) @ head.T


def _cerebras(w: dict[str, Tensor], about: dict, ids: Tensor, seen: Tensor, _: bool) -> Tensor:
    early = "width_scale" in about
    size = about["n_embd"] // about["n_head"]
    by_size = about["scale_qk_dot_by_d" if early else "mup_scale_qk_dot_by_d"]
    scaling, length = about.get("alibi_scaling") or {}, ids.shape[1]
    stretch = scaling.get("factor") or max(1.0, length / scaling.get("train_seq_len", length))
    slopes = w["transformer.relative_pe.slopes"].flatten() / stretch
    x = w["transformer.wte.weight"][ids] * about["embeddings_scale" if early else "mup_embeddings_scale"]
    for n in range(about["n_layer"]):
        at = f"transformer.h.{n}"
        q, k, v = (
            _heads(part, size) for part in _conv1d(w, f"{at}.attn.c_attn", _layer_norm(w, f"{at}.ln_1", x)).chunk(3, -1)
        )
        scale = 1 / size if by_size else size**-0.5
        scale = scale / (n + 1) if about.get("scale_attn_by_inverse_layer_idx") else scale
        x = x + _conv1d(w, f"{at}.attn.c_proj", attention(q, k, v, slopes, scale, seen))
        y = _layer_norm(w, f"{at}.ln_2", x)
        x = x + _conv1d(
            w, f"{at}.mlp.c_proj", _conv1d(w, f"{at}.mlp.c_fc", y) * F.silu(_conv1d(w, f"{at}.mlp.c_fc2", y))
        )
    factor = about["width_scale"] if early else about["mup_output_alpha"] * about["mup_width_scale"]
    return _layer_norm(w, "transformer.ln_f", x) @ w.get("lm_head.weight", w["transformer.wte.weight"]).T * factor


def _mpt(w: dict[str, Tensor], about: dict, ids: Tensor, seen: Tensor, _: bool) -> Tensor:
    options, width, heads = about["attn_config"], about["d_model"], about["n_heads"]
    size, limit = width // heads, options.get("clip_qkv") or math.inf
    slopes = published(heads, options.get("alibi_bias_max", 8))
    x = w["transformer.wte.weight"][ids]
    for n in range(about["n_layers"]):
        at = f"transformer.blocks.{n}"
        y = _layer_norm(w, f"{at}.norm_1", x)
        if f"{at}.attn.Wqkv.weight" in w:
            shared = size * options.get("kv_n_heads", heads)
            q, k, v = _linear(w, f"{at}.attn.Wqkv", y).clamp(-limit, limit).split([width, shared, shared], -1)
        else:
            q, k, v = (_linear(w, f"{at}.attn.W{part}", y).clamp(-limit, limit) for part in "qkv")
        if options.get("qk_ln"):
            q, k = _layer_norm(w, f"{at}.attn.q_ln", q), _layer_norm(w, f"{at}.attn.k_ln", k)
        scale = options.get("softmax_scale") or size**-0.5
        x = x + _linear(
            w, f"{at}.attn.out_proj", attention(*(_heads(part, size) for part in (q, k, v)), slopes, scale, seen)
        )
        y = _layer_norm(w, f"{at}.norm_2", x)
        up = _linear(w, f"{at}.ffn.up_proj", y)
        gated = F.silu(_linear(w, f"{at}.ffn.gate_proj", y)) * up if "ffn_config" in about else F.gelu(up)
        x = x + _linear(w, f"{at}.ffn.down_proj", gated)
    factor = width**-0.5 if about.get("logit_scale") == "inv_sqrt_d_model" else 1.0
    return _layer_norm(w, "transformer.norm_f", x) @ w.get("lm_head.weight", w["transformer.wte.weight"]).T * factor


def _refact(w: dict[str, Tensor], about: dict, ids: Tensor, seen: Tensor, _: bool) -> Tensor:
    heads = about["n_head"]
    size, x = about["n_embd"] // heads, w["transformer.wte.weight"][ids]
    for n in range(about["n_layer"]):
        at = f"transformer.h.{n}"
        y = _layer_norm(w, f"{at}.ln_1", x)
        q, k, v = (_heads(_linear(w, f"{at}.attn.{part}", y), size) for part in "qkv")
        x = x + _linear(w, f"{at}.attn.c_proj", attention(q, k, v, published(heads), size**-0.5, seen))
        y = _layer_norm(w, f"{at}.ln_2", x)
        x = x + _linear(
            w, f"{at}.mlp.c_proj", F.silu(_linear(w, f"{at}.mlp.linear_1", y)) * _linear(w, f"{at}.mlp.linear_3", y)
        )
    return _layer_norm(w, "ln_f", x) @ w["lm_head.weight"].T
