"""What a decoder is that may leave as a checkpoint of transformers, as a state dict (E the width, V the vocabulary):

    embedding.weight [V, E]                              token embeddings, also those of the output
    embedding_norm.weight, .bias [E]                     BLOOM only: LayerNorm of the embeddings
    blocks.N.attention_norm.weight [E]                   LayerNorm
    blocks.N.attention.{q,k,v,out}_proj.weight           grouped-query attention allowed
    blocks.N.ffn_norm.weight, ffn.0.weight, ffn.3.weight   LayerNorm, then W₂·GELU(W₁·x), up to 4·E wide
    norm.weight [E]                                      LayerNorm of the end

and for BLOOM a `.bias` beside every weight but the embeddings'. The blocks are `ALiBiTransformerBlock`s. Read next: `export.py`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Mapping[str, Tensor]
Kind: TypeAlias = Literal["weight", "bias"]

PARTS = (
    "attention_norm", "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.out_proj", "ffn_norm",
    "ffn.0", "ffn.3",
)  # fmt: skip

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What the state dict does not say.

    Args:
        num_heads: H.
        trained_length: becomes MPT's `max_seq_len`, which ends an MPT in transformers, unless it is patched, and BLOOM's
            `seq_length`, which only says so.
        embedding_scale: what the embeddings are multiplied with before the first block, √E for many; not at the output.
        bias_max: the last slope of a power of two of heads is 2^−bias_max.
        norm_eps: of all norms.
    """

    num_heads: int
    trained_length: int
    embedding_scale: float = 1.0
    bias_max: int = 8
    norm_eps: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family of transformers has.

    Args:
        name: as it is written.
        kinds: what its linear maps and norms have.
        outside: what it has outside of the blocks.
        advice: what it is, for those whose decoder is another.
    """

    name: str
    kinds: tuple[Kind, ...]
    outside: tuple[str, ...]
    advice: str


def layers_and_width(state: State, config: DecoderConfig, family: Family) -> tuple[int, int]:
    """(layers, E) of a decoder that this family can be.

    Raises:
        ValueError: one that it cannot be, with the name that does not fit.
    """
    numbers = {int(match[1]) for name in state if (match := _BLOCK.fullmatch(name))}
    blocks = {f"blocks.{n}.{part}.{kind}" for n in range(len(numbers)) for part in PARTS for kind in family.kinds}
    wanted = blocks | set(family.outside)
    missing, foreign = sorted(wanted - state.keys()), sorted(state.keys() - wanted)
    if foreign or missing or not numbers:
        raise ValueError(
            f"this is no decoder that {family.name} can be: it has {', '.join(foreign[:3]) or 'nothing else'} and lacks "
            f"{', '.join(missing[:3]) or 'nothing'}; {family.name} is {family.advice}"
        )
    width = state["embedding.weight"].shape[1]
    if config.num_heads < 1 or width % config.num_heads:
        raise ValueError(f"num_heads is {config.num_heads} but must divide the width, {width}")
    for n in range(len(numbers)):
        hidden = state[f"blocks.{n}.ffn.0.weight"].shape[0]
        if hidden > 4 * width:
            raise ValueError(
                f"blocks.{n}.ffn is {hidden} wide but that of {family.name} is 4·{width} = {4 * width}; at most that"
            )
        rows = state[f"blocks.{n}.attention.k_proj.weight"].shape[0]
        if width % rows or rows % (width // config.num_heads):
            raise ValueError(
                f"blocks.{n}.attention.k_proj has {rows} rows, which are not heads of {width // config.num_heads}"
            )
    return len(numbers), width


def widened(state: State, n: int, kind: Kind, *, width: int, head_dim: int) -> list[Tensor]:
    """The tensors of block n in the order of `PARTS`, as wide as transformers has them: key and value heads that are shared
    once for each query head, a narrower feed-forward padded with zeros.
    """
    norm_1, query, key, value, out, norm_2, up, down = (state[f"blocks.{n}.{part}.{kind}"] for part in PARTS)
    shared = width // key.shape[0]
    key, value = (x.unflatten(0, (-1, head_dim)).repeat_interleave(shared, 0).flatten(0, 1) for x in (key, value))
    up = torch.cat([up, up.new_zeros(4 * width - up.shape[0], *up.shape[1:])])
    if kind == "weight":
        down = torch.nn.functional.pad(down, (0, 4 * width - down.shape[1]))
    return [norm_1, query, key, value, out, norm_2, up, down]
