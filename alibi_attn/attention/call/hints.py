"""Argument names of other libraries: the TypeError for such a name has ours (docs/switching.md)."""

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

from alibi_attn.attention.call.options import DEFAULTS

_Function = TypeVar("_Function", bound=Callable[..., object])

_MASK = "key_mask [B, S], True = visible"
_BIAS = "slopes for a bias by distance, key_bias for one per key, toeplitz_attention for a table by distance"
_NO_LENGTH = "leave it out: there is no maximum length"
_NO_WEIGHTS = "leave it out: the weights are never materialized; attention_rows computes those of a few queries"
_CACHE = "cache=KVCache(), made once per layer"
OURS = {
    "attention_mask": _MASK,
    "key_padding_mask": f"{_MASK} (the negation)",
    "mask": _MASK,
    "attn_mask": f"slopes for the bias, {_MASK}",
    "attn_bias": f"slopes for the bias, {_MASK}",
    "bias": _BIAS,
    "position_bias": _BIAS,
    "pair_bias": f"leave it out: a number per pair of tokens needs scaled_dot_product_attention; {_BIAS}",
    "coords": "positions",
    "coordinates": "positions",
    "is_causal": "causal",
    "enable_gqa": "leave it out: the heads of key may divide those of query",
    "alibi_slopes": "slopes",
    "alibi": "slopes",
    "softmax_scale": "scale",
    "window_size": "window, which counts the query itself",
    "dropout": "dropout_p",
    "attn_dropout": "dropout_p",
    "attn_pdrop": "dropout_p",
    "attention_dropout": "dropout_p",
    "return_attn_probs": "return_lse",
    "score_mod": "slopes or key_bias",
    "block_mask": "leave it out: the keys that matter are found in every call",
    "max_seqlen": _NO_LENGTH,
    "max_seq_len": _NO_LENGTH,
    "max_len": _NO_LENGTH,
    "max_position_embeddings": _NO_LENGTH,
    "d_model": "embed_dim",
    "dim": "embed_dim",
    "hidden_size": "embed_dim",
    "n_embd": "embed_dim",
    **dict.fromkeys(("d_ff", "dim_feedforward", "ff_dim", "mlp_dim"), "ffn_dim, of ALiBiTransformerBlock"),
    "n_heads": "num_heads",
    "heads": "num_heads",
    "n_head": "num_heads",
    "nhead": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "kv_heads": "num_kv_heads",
    "qkv_bias": "bias",
    "qk_ln": "qk_norm",
    "alibi_bias_max": "slopes=alibi_slopes(num_heads, bias_max=...)",
    "alibi_num_heads": "slopes with 0 for the other heads",
    "use_cache": _CACHE,
    "past_key_value": _CACHE,
    "past_key_values": _CACHE,
    "past_kv": _CACHE,
    "layer_past": _CACHE,
    "need_weights": _NO_WEIGHTS,
    "output_attentions": _NO_WEIGHTS,
    "s_aux": "sink_logits",
    "learnable_sink": "sink_logits",
    "head_first": "leave it out: the layout is [B, H, T, D]",
}


def hides_unknown(function: _Function) -> _Function:
    """Hides `*more` and `**unknown`, which exist only for their errors, from `inspect.signature` and `help`."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.name not in ("more", "unknown")]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def shows(options: Any) -> Callable[[_Function], _Function]:
    """Shows options with their defaults, instead of `**options`, in `inspect.signature` and `help`.

    Args:
        options: a TypedDict of `options.py`, of a kind of array.
    """
    types = get_type_hints(options.__origin__)
    for name, kinds in types.items():
        if getattr(kinds, "__parameters__", ()):  # written as users write it: int | Tensor | None
            types[name] = functools.reduce(operator.or_, get_args(kinds[options.__args__]))
    names = [*(types.keys() - DEFAULTS.keys()), *(name for name in DEFAULTS if name in types)]
    listed = [
        inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(x), annotation=types[x])
        for x in names
    ]

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        before, after = ([p for p in own if (p.kind is p.KEYWORD_ONLY) == keyword] for keyword in (False, True))
        function.__signature__ = signature.replace(parameters=[*before, *listed, *after])  # type: ignore[attr-defined]
        return function

    return decorate


def unknown_argument(function: str, unknown: Iterable[str]) -> TypeError:
    """The error for an unknown argument: Python's message, and our name for the argument if there is one."""
    name = next(iter(unknown))
    ours = OURS.get(name)
    if ours is None and name in DEFAULTS:
        ours = "leave it out: alibi_attention has it, this function does not"
    hint = "" if ours is None else f"; {ours}" if ours.startswith("leave") else f"; here it is {ours}"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def by_position(layer: str, more: Sequence[object]) -> TypeError:
    """The error for arguments after x in a call of a layer; the usual one is a mask."""
    kind = type(more[0]).__name__
    return TypeError(
        f"{layer} takes x by position but got a {kind} after it; pass options by name: {_MASK}; cache=; positions="
    )


def check_known(function: str, options: Mapping[str, Any], known: Collection[str] = DEFAULTS) -> None:
    """Raises a TypeError for an option that is not among the known ones."""
    if unknown := [name for name in options if name not in known]:
        raise unknown_argument(function, unknown)


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a call; raises a TypeError for an unknown one."""
    check_known("alibi_attention", options)
    return {**DEFAULTS, **options}
