"""`alibi bench streaming`: stream many tokens through caches that drop keys with a certificate: flat time and memory, outputs of
a full pass.

Tokens pass in small chunks through a model with QK-norm. Time per token and memory must stop growing once every head has its full
reach, and outputs must equal those of one full pass.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn.nn import ALiBiTransformerBlock, GatedReachCache, ReachCache
from alibi_lab.measure.harness import Config, Row, Rows, Say, keep


def streaming(
    out: Path,
    *,
    tokens: int = 100_000,
    chunk: int = 16,
    windows: int = 20,
    tolerance: float = 2.0**-28,
    gates: bool = False,
    say: Say = print,
) -> list[Path]:
    """Streams, compares with the full pass, saves one record, and returns its path.

    The record's curve "ours" has the milliseconds per token since the previous point and the bytes that all caches hold, by the
    number of tokens so far (`length`).

    The model has two blocks of width 64 with four heads, slopes 2⁻² … 2⁻⁸, random weights, fp32. It runs one sequence on one
    thread, because a step has too little work for several.

    A step has `chunk` tokens, a curve has `windows` points, and `tolerance` is ε of each layer's cache.

    Args:
        tokens: number of tokens to stream.
        gates: use layers with forget gates instead of slopes, which forget by content; half of the gates are 0.98 or more.
    """
    torch.manual_seed(0)
    blocks = [_gated_block() if gates else ALiBiTransformerBlock(64, 4, qk_norm=True) for _ in range(2)]
    x = torch.randn(1, tokens, 64)
    config: Config = {
        "tokens": tokens,
        "chunk": chunk,
        "windows": windows,
        "tolerance": tolerance,
        "layers": 2,
        "width": 64,
        "heads": 4,
        "dtype": "float32",
        "threads": 1,
        "reach": None if gates else [block.attention.static_reach(tolerance=tolerance).tolist() for block in blocks],
    }
    metrics: dict[str, float | None] = {}
    name = "streaming/gated-reach-cache" if gates else "streaming/reach-cache"

    def steps() -> Iterator[Mapping[str, Rows]]:
        rows: list[Row] = []
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            caches = [block.attention.reach_cache(tolerance=tolerance) for block in blocks]
            outputs: list[Tensor] = []
            for window in x.split(-(-tokens // windows), dim=1):
                start = time.perf_counter()
                outputs += [_through(blocks, part, caches) for part in window.split(chunk, dim=1)]
                token_ms = (time.perf_counter() - start) / window.shape[1] * 1e3
                cache_bytes = sum(cache.nbytes for cache in caches)
                rows.append({"length": len(caches[0]), "forward_ms": token_ms, "cache_bytes": cache_bytes})
            streamed, whole = torch.cat(outputs, dim=1), _through(blocks, x, [None] * len(blocks))
        error = float((streamed - whole).norm(dim=-1).max() / whole.norm(dim=-1).max())
        full_bytes = len(blocks) * 2 * x.numel() * x.element_size()
        forgotten = sum(sum(cache.forgotten) for cache in caches)
        metrics.update(
            error_of_longest_output=error,
            full_cache_bytes=float(full_bytes),
            share_forgotten=forgotten / (tokens * sum(len(cache.kept) for cache in caches)),
        )
        yield from ({name: {"ours": row}} for row in rows)

    return keep(out, {name: config}, steps(), summary=lambda columns: metrics, say=say)


def _gated_block() -> ALiBiTransformerBlock:
    """A block with gates of about sigmoid(N(4, 1)) and no slopes; default weights would forget half of everything per token."""
    block = ALiBiTransformerBlock(64, 4, qk_norm=True, forget_gate=True, slopes=[0.0] * 4)
    assert block.attention.gate_proj is not None
    torch.nn.init.normal_(block.attention.gate_proj.weight, std=64**-0.5)
    torch.nn.init.constant_(block.attention.gate_proj.bias, 4.0)
    return block


def _through(
    blocks: list[ALiBiTransformerBlock], x: Tensor, caches: Sequence[ReachCache | GatedReachCache | None]
) -> Tensor:
    for block, cache in zip(blocks, caches, strict=True):
        x = block(x, cache=cache)
    return x
