"""What a call reads, for tools that measure it: reach, bounds, plan, and the keys that were visited.

Benchmarks, reports and attacks use the public names of the package and this module, and nothing else of it. Every function takes
query, key and value like `alibi_attention`, with its keyword arguments. Shapes: `attention/call/spec.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused.plan import How, planned
from alibi_attn.attention.backends.fused.split_keys import reads_whole
from alibi_attn.attention.backends.native import backend as native
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.call.dropout import drawn_seed
from alibi_attn.attention.call.options import AttentionOptions
from alibi_attn.attention.call.reads import DROPOUT, MASKS, Reads
from alibi_attn.attention.call.transforms import constant_when_compiled
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate import bounds as certificate
from alibi_attn.attention.certificate.bounds import Bounds
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.run import decoding, dispatch
from alibi_attn.attention.run.execution import VISITS, attend, visits
from alibi_attn.lazy import lazy_names

if TYPE_CHECKING:
    from alibi_attn.hf.patching.capture_qk import watched
    from alibi_attn.hf.patching.loading import load_decoder
    from alibi_attn.hf.readers.checkpoint_files import read_config
    from alibi_attn.hf.readers.tokenizer_files import encode
    from alibi_attn.hf.readers.tokenizing import saved_tokenizer

__all__ = [
    "TILE",
    "Bounds",
    "Norms",
    "attention_of_head",
    "backend_of",
    "certified_bounds",
    "compiled_kernels",
    "computed_scores",
    "decode_with_norms",
    "default_tolerance",
    "device_plan",
    "encode",
    "load_decoder",
    "read_config",
    "saved_tokenizer",
    "tiles_of_a_step",
    "visited_reach",
    "watched",
]

# Readers of models, which need transformers.
_HOMES = {
    "alibi_attn.hf.patching.capture_qk": ("watched",),
    "alibi_attn.hf.patching.loading": ("load_decoder",),
    "alibi_attn.hf.readers.checkpoint_files": ("read_config",),
    "alibi_attn.hf.readers.tokenizer_files": ("encode",),
    "alibi_attn.hf.readers.tokenizing": ("saved_tokenizer",),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES, ("transformers", "transformers", "hf"))


@constant_when_compiled  # it reads files
def compiled_kernels() -> bool:
    """Whether the C++ kernels of the `native` backend can run here."""
    return build.why_not() is None


def default_tolerance(query: Tensor, key: Tensor, value: Tensor) -> float:
    """The tolerance that a call with these tensors has by default."""
    return make_spec(query, key, value).tolerance


@torch.no_grad()
def certified_bounds(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Any = None,
    *,
    known_norms: Norms | None = None,
    **options: Unpack[AttentionOptions[Tensor]],
) -> Bounds:
    """The keys that each block of TILE queries must visit in a call without gradients, computed before any score.

    Args:
        known_norms: norms of keys and values that a cache stores.
    """
    spec = make_spec(query, key, value, slopes, **options)
    Reads("certified_bounds", MASKS | DROPOUT | {"sink_logits"}).check(spec)
    tile_norms = None if known_norms is None else known_norms.tile_norms(key, value)
    return certificate.bounds(spec, query, key, value, tile_norms=tile_norms, for_gradients=False)


def backend_of(
    query: Tensor, key: Tensor, value: Tensor, slopes: Any = None, **options: Unpack[AttentionOptions[Tensor]]
) -> str:
    """The name of the backend that "auto" picks for this call."""
    return dispatch.choose("auto", make_spec(query, key, value, slopes, **options), query, key, value).name


@torch.no_grad()
def computed_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Any = None,
    *,
    backend: str,
    backward: bool = False,
    table: Tensor | None = None,
    **options: Unpack[AttentionOptions[Tensor]],
) -> int:
    """The number of scores that a backend computes, over all sequences and heads, in forward or in backward.

    Args:
        table: that of `toeplitz_attention`, whose slopes are 0.
    """
    spec = dataclasses.replace(make_spec(query, key, value, slopes, **options), table=table)
    Reads("computed_scores", VISITS | {"table"}).check(spec)
    found = visits(spec, query, key, value, backend)
    if found is None:
        return query.shape[:3].numel() * key.shape[2]
    measured = found.measured_scores if backward else None
    return int((found.scores if measured is None else measured).sum())


@torch.no_grad()
def visited_reach(
    query: Tensor, key: Tensor, value: Tensor, slopes: Any = None, **options: Unpack[AttentionOptions[Tensor]]
) -> Tensor:
    """[B, H, N] int64: how far back each block of TILE queries read in the C++ kernels; S = to the first key.

    The kernels determine the reach while they run, so this computes the attention.
    """
    spec = make_spec(query, key, value, slopes, **options)
    Reads("visited_reach", native.READS).check(spec)
    keys = native.visited(spec, query, key, value).keys
    start = torch.arange(keys.shape[2]) * TILE
    near = torch.from_numpy(keys[..., 0]).long()
    return torch.where(near > 0, start - near + 1, key.shape[2])


def decode_with_norms(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, known_norms: Norms, *, backend: str = "auto"
) -> Tensor | None:
    """A decoding step with the norms that a cache stores, [B, H, T, D]; None where a layer would read all keys.

    Args:
        backend: "fused" = the Triton kernel, also in its interpreter; otherwise what a layer does on this device.
    """
    if backend == "fused":
        return fused.decode(make_spec(query, key, value, slopes), query, key, value, known_norms)[0]
    if not decoding.reads_near(query, key):
        return None
    return decoding.attend_near(query, key, value, slopes, known_norms)


@torch.no_grad()
def device_plan(query: Tensor, key: Tensor, value: Tensor, slopes: Any = None) -> tuple[int, Callable[[], object]]:
    """(the number of scores that the Triton kernels compute, a function that computes certificate and plan alone)."""
    spec = make_spec(query, key, value, slopes)
    return int(fused.visits(spec, query, key, value)[1].sum()), lambda: fused.plan(spec, query, key, value)


@torch.no_grad()
def tiles_of_a_step(query: Tensor, key: Tensor, value: Tensor, slopes: Any = None) -> tuple[int, Bounds]:
    """(the number of tiles that a decoding step of the Triton kernels reads with known norms, the bounds they come from)."""
    spec, known_norms = make_spec(query, key, value, slopes), Norms.of(key, value)
    tiles, bounds = planned(spec, query, key, value, How(TILE, shared=True, known_norms=known_norms, gradients=False))
    if reads_whole(spec, key):
        return spec.batch * spec.num_kv_heads * -(-spec.key_len // TILE), bounds
    return int(tiles.weight.sum()), bounds


def attention_of_head(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, head: int, backend: str, dropout_p: float, seed: int
) -> Tensor:
    """One head of a larger call without skipping, [B, 1, T, D], with the dropout mask that the head has there.

    Args:
        query, key, value, slopes: those of the head alone.
        head: its index in the larger call.
        seed: of torch's generator before the larger call.
    """
    spec = make_spec(query, key, value, slopes, dropout_p=dropout_p, tolerance=0.0)
    if dropout_p > 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = drawn_seed(query.device)
        spec = dataclasses.replace(spec, dropout_seed=drawn + torch.tensor([0, 0, head, 0]))
    return cast("Tensor", attend(spec, query, key, value, backend))  # no lse was requested
