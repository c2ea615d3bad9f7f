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
_NAMES = {
    _MASK: ("attention_mask", "mask"),
    f"{_MASK} (the negation)": ("key_padding_mask",),
    f"slopes for the bias, {_MASK}": ("attn_mask", "attn_bias"),
    _BIAS: ("bias", "position_bias"),
    f"leave it out: a number per pair of tokens needs scaled_dot_product_attention; {_BIAS}": ("pair_bias",),
    "positions": ("coords", "coordinates"),
    "causal": ("is_causal",),
    "leave it out: the heads of key may divide those of query": ("enable_gqa",),
    "slopes": ("alibi_slopes", "alibi"),
    "scale": ("softmax_scale",),
    "window, which counts the query itself": ("window_size",),
    "dropout_p": ("dropout", "attn_dropout", "attn_pdrop", "attention_dropout"),
    "return_lse": ("return_attn_probs",),
    "slopes or key_bias": ("score_mod",),
    "leave it out: the keys that matter are found in every call": ("block_mask",),
    "leave it out: there is no maximum length": ("max_seqlen", "max_seq_len", "max_len", "max_position_embeddings"),
    "embed_dim": ("d_model", "dim", "hidden_size", "n_embd"),
    "ffn_dim, of ALiBiTransformerBlock": ("d_ff", "dim_feedforward", "ff_dim", "mlp_dim"),
    "num_heads": ("n_heads", "heads", "n_head", "nhead"),
    "num_kv_heads": ("num_key_value_heads", "kv_heads"),
    "bias": ("qkv_bias",),
    "qk_norm": ("qk_ln",),
    "slopes=alibi_slopes(num_heads, bias_max=...)": ("alibi_bias_max",),
    "slopes with 0 for the other heads": ("alibi_num_heads",),
    "cache=KVCache(), made once per layer": ("use_cache", "past_key_value", "past_key_values", "past_kv", "layer_past"),
    "leave it out: the weights are never materialized; attention_rows computes those of a few queries": (
        "need_weights",
        "output_attentions",
    ),
    "sink_logits": ("s_aux", "learnable_sink"),
    "leave it out: the layout is [B, H, T, D]": ("head_first",),
}
OURS = {theirs: ours for ours, names in _NAMES.items() for theirs in names}


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
