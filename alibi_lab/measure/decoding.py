"""`alibi bench decoding`: one more token after many: attention with a cache, static caches and CUDA graphs, and a long stream."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from alibi_attn import ALiBiAttention
from alibi_attn.inspect import Norms, certified_bounds
from alibi_attn.nn import ALiBiTransformerBlock, KVCache
from alibi_lab.measure.attention import SHAPES, checked_dtype
from alibi_lab.measure.harness import Budget, Config, Metrics, Rows, Say, Timed, keep, table
from alibi_lab.measure.inputs import Case, Inputs, cases_of, described
from alibi_lab.measure.peers import Peer, eager, flash_attn, sdpa, sdpa_dense_bias
from alibi_lab.measure.peers.ours import ours, ours_with_cache

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHUNK, WINDOWS = 16, 20  # tokens of a step of a stream, and points of its curve
ROOM = 1024  # tokens that a static cache holds beyond those before the measurement


def decoding(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    shape: Sequence[tuple[int, int]] = (),
    device: str = "cpu",
    dtype: str = "",
    backend: str = "auto",
    stream: int = 0,
    repeats: int = 15,
    seconds: float = 20.0,
    limit: float = 3600.0,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record per shape, and with `stream` one per kind of cache that drops keys; returns their paths.

    "ours" is a layer with a `KVCache`, which stores the norms of its keys; "ours, all keys" is `alibi_attention` with one
    query; "ours, static" and "ours, static reach" are a layer's static caches, as a CUDA graph on a GPU.

    Args:
        lengths: numbers of cached tokens, as in 4096,65536; default 2048 … 131072.
        shape: numbers and sizes of heads; default 16x64, on a GPU 16x128.
        device: "cpu" or "cuda".
        dtype: default float32, on a GPU bfloat16.
        backend: of our call.
        stream: instead, stream this many tokens through caches that drop keys, by reach and by gates.
        repeats: most turns per call; the median counts.
        seconds: time limit in seconds per length.
        limit: time limit in seconds for all.
    """
    if stream:
        return streaming(out, stream, say)
    dtype = checked_dtype(device, dtype)
    cases = {
        f"decoding/{device}-{dtype}-{heads}x{size}": cases_of(
            lengths, heads=heads, head_dim=size, queries=1, dtype=dtype, device=device
        )
        for heads, size in shape or [(16, SHAPES[device][1])]
    }  # fmt: skip
    configs = {name: {**described(each), "backend": backend, "queries": 1} for name, each in cases.items()}
    end = time.perf_counter() + limit
    budget = Budget(repeats=repeats, seconds=seconds, end=end, backward=False, graphs=device == "cuda")
    return keep(out, configs, table(cases, lambda case, x: _peers(backend), budget, _reach), say=say)


def _peers(backend: str) -> list[Peer]:
    return [
        Peer("ours", ours_with_cache(backend)),
        Peer("ours, all keys", ours("dense" if backend == "auto" else backend)),
        Peer("ours, static", static_cache),
        Peer("ours, static reach", static_reach),
        sdpa.PEER,
        sdpa_dense_bias.PEER,
        eager.PEER,
        *flash_attn.installed(),
    ]


def _reach(case: Case, x: Inputs, rows: Mapping[str, Timed]) -> Rows:
    """The share of the keys that lie within the heads' reach."""
    left = certified_bounds(x.query, x.key, x.value, x.slopes, known_norms=Norms.of(x.key, x.value)).left
    share = float(left.clamp(max=case.length).double().mean()) / case.length
    return {"reach": {"length": case.length, "keys_within_reach": share}}


class Given(nn.Module):
    """In place of a linear layer: it returns the same heads [B, H, 1, D] for every input."""

    def __init__(self, heads: Tensor) -> None:
        super().__init__()
        self.rows = heads.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows


def layer_of(query: Tensor, key: Tensor, value: Tensor) -> ALiBiAttention:
    """A layer without linear layers, whose queries, keys and values are always these heads, each [B, H, 1, D]."""
    layer = ALiBiAttention(query.shape[1] * query.shape[3], query.shape[1]).eval()
    for name, heads in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
        setattr(layer, name, Given(heads))
    layer.out_proj = nn.Identity()  # type: ignore[assignment]
    return layer


def static_cache(inputs: Inputs) -> Callable[..., Tensor]:
    """A step of a layer with a cache of a fixed capacity that already holds the earlier keys."""
    return _static_step(inputs, lambda layer, room: KVCache(capacity=room))


def static_reach(inputs: Inputs) -> Callable[..., Tensor]:
    """The same with a static cache of the reach that the norms of these keys imply."""
    longest = [float(torch.linalg.vector_norm(x.float(), dim=-1).max()) for x in (inputs.query, inputs.key)]
    bound = 1.01 * longest[0] * longest[1] * inputs.query.shape[-1] ** -0.5
    tolerance = torch.finfo(inputs.query.dtype).eps / 32
    return _static_step(
        inputs, lambda layer, room: layer.reach_cache(score_bound=bound, tolerance=tolerance, capacity=room)
    )


def _static_step(inputs: Inputs, cache_of: Callable[[ALiBiAttention, int], KVCache]) -> Callable[..., Tensor]:
    """A call that appends the last key and attends. The cache grows while it is timed, and begins anew when it is full."""
    query, key, value = inputs.query, inputs.key, inputs.value
    layer = layer_of(query, key[:, :, -1:], value[:, :, -1:]).to(query)
    cache, x, steps = cache_of(layer, key.shape[2] + ROOM), query.transpose(1, 2).flatten(2), [ROOM]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if steps[0] >= ROOM and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            cache.crop(0)
            cache.append(k[:, :, :-1], v[:, :, :-1])
            steps[0] = 0
        steps[0] += 1
        return layer(x, cache=cache).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    return attention


def streaming(out: Path, tokens: int, say: Say) -> list[Path]:
    """Streams tokens through a model with QK-norm, whose caches drop keys with a certificate, and compares with a full pass.

    Two blocks of width 64 with four heads, random weights, fp32, one thread. Time per token and memory must stop growing once
    every head has its full reach.
    """
    if tokens < 1000:
        raise ValueError(f"stream is {tokens} but must be at least 1000 tokens")
    kinds: dict[str, Callable[[], ALiBiTransformerBlock]] = {
        "decoding/stream-reach": lambda: ALiBiTransformerBlock(64, 4, qk_norm=True),
        "decoding/stream-gated-reach": _gated_block,
    }
    tolerance, errors = 2.0**-28, dict[str, Metrics]()
    config: Config = {
        "tokens": tokens, "chunk": CHUNK, "windows": WINDOWS, "tolerance": tolerance, "layers": 2, "width": 64,
        "heads": 4, "dtype": "float32", "threads": 1,
    }  # fmt: skip

    def steps(name: str) -> Iterator[Mapping[str, Rows]]:
        torch.manual_seed(0)
        blocks, x = [kinds[name](), kinds[name]()], torch.randn(1, tokens, 64)
        caches, outputs = [block.attention.reach_cache(tolerance=tolerance) for block in blocks], list[Tensor]()
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            for window in x.split(-(-tokens // WINDOWS), dim=1):
                start = time.perf_counter()
                outputs += [_through(blocks, part, caches) for part in window.split(CHUNK, dim=1)]
                ms = (time.perf_counter() - start) / window.shape[1] * 1e3
                sizes = {"length": len(caches[0]), "cache_bytes": sum(cache.nbytes for cache in caches)}
                yield {name: {"ours": {**sizes, "forward_ms": ms}}}
            whole = _through(blocks, x, [None] * len(blocks))
        error = (torch.cat(outputs, dim=1) - whole).norm(dim=-1).max() / whole.norm(dim=-1).max()
        errors[name] = {"error_of_longest_output": float(error)}
        yield {name: {}}

    every = (step for name in kinds for step in steps(name))
    return keep(out, dict.fromkeys(kinds, config), every, summary=lambda name, columns: errors.get(name, {}), say=say)


def _gated_block() -> ALiBiTransformerBlock:
    """A block with gates of about sigmoid(N(4, 1)) and no slopes; default weights would forget half of everything per token."""
    block = ALiBiTransformerBlock(64, 4, qk_norm=True, forget_gate=True, slopes=[0.0] * 4)
    assert block.attention.gate_proj is not None
    torch.nn.init.normal_(block.attention.gate_proj.weight, std=64**-0.5)
    torch.nn.init.constant_(block.attention.gate_proj.bias, 4.0)
    return block


def _through(blocks: list[ALiBiTransformerBlock], x: Tensor, caches: Sequence[KVCache | None]) -> Tensor:
    for block, cache in zip(blocks, caches, strict=True):
        x = block(x, cache=cache)
    return x
