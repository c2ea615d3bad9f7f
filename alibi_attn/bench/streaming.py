"""`alibi bench streaming`: tokens streamed in small chunks through a QK-normalised model whose caches forget with a certificate.

Time a token and memory must not grow once every head has its reach, and the outputs must be those of one full pass.
"""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn import records
from alibi_attn.nn import ALiBiTransformerBlock, GatedReachCache, ReachCache


def streaming(
    out: Path,
    *,
    tokens: int = 100_000,
    chunk: int = 16,
    windows: int = 20,
    tolerance: float = 2.0**-28,
    gates: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Stream, compare with the full pass, and keep one record; returns its path.

    The record's curve "ours" has, after so many tokens (`length`), the milliseconds that a token took since the point before
    and the bytes that all caches hold.

    Two blocks of width 64 with four heads of slopes 2⁻² … 2⁻⁸, random weights, fp32, one sequence, one thread: there is too
    little in a step for several to share.

    Args:
        chunk: tokens that come at a time.
        windows: points of the curves.
        tolerance: ε of each layer's caches.
        gates: the layers have forget gates and no slopes, and forget by content; half of their tokens keep 0.98 and more.
    """
    started = datetime.datetime.now(datetime.UTC)
    torch.manual_seed(0)
    blocks = [_gated_block() if gates else ALiBiTransformerBlock(64, 4, qk_norm=True) for _ in range(2)]
    x = torch.randn(1, tokens, 64)
    with torch.inference_mode(), _one_thread():
        caches = [block.attention.reach_cache(tolerance=tolerance) for block in blocks]
        columns: dict[str, list[records.Json]] = {"length": [], "forward_ms": [], "cache_bytes": []}
        outputs: list[Tensor] = []
        for stretch in x.split(-(-tokens // windows), dim=1):
            start = time.perf_counter()
            for part in stretch.split(chunk, dim=1):
                outputs.append(_through(blocks, part, caches))
            seconds = time.perf_counter() - start
            columns["length"].append(len(caches[0]))
            columns["forward_ms"].append(seconds / stretch.shape[1] * 1e3)
            columns["cache_bytes"].append(sum(cache.nbytes for cache in caches))
            say(f"{len(caches[0]):>7} tokens: {columns['forward_ms'][-1]:.3f} ms a token, {caches[0]!r}")
        streamed, whole = torch.cat(outputs, dim=1), _through(blocks, x, None)
    error = float((streamed - whole).norm(dim=-1).max() / whole.norm(dim=-1).max())
    full_bytes = len(blocks) * 2 * x.numel() * x.element_size()
    say(
        f"largest difference from the full pass: {error:.1e} of the longest output; a full cache has {full_bytes} bytes"
    )
    record = records.make(
        "benchmark",
        "streaming/gated-reach-cache" if gates else "streaming/reach-cache",
        config={
            "tokens": tokens, "chunk": chunk, "windows": windows, "tolerance": tolerance, "layers": 2, "width": 64,
            "heads": 4, "dtype": "float32", "threads": 1,
            "reach": None if gates else [block.attention.static_reach(tolerance=tolerance).tolist() for block in blocks],
        },
        metrics={
            "error_of_longest_output": error, "full_cache_bytes": float(full_bytes),
            "share_forgotten": sum(sum(cache.forgotten) for cache in caches) / (tokens * sum(len(c.kept) for c in caches)),
        },
        curves={"ours": columns},
        started=started,
    )  # fmt: skip
    return records.save(record, out)


def _gated_block() -> ALiBiTransformerBlock:
    """Gates alone, sigmoid(N(4, 1)) or so: random weights would forget half of all at every token."""
    block = ALiBiTransformerBlock(64, 4, qk_norm=True, forget_gate=True, slopes=[0.0] * 4)
    assert block.attention.gate_proj is not None
    torch.nn.init.normal_(block.attention.gate_proj.weight, std=64**-0.5)
    torch.nn.init.constant_(block.attention.gate_proj.bias, 4.0)
    return block


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _through(
    blocks: list[ALiBiTransformerBlock], x: Tensor, caches: Sequence[ReachCache | GatedReachCache] | None
) -> Tensor:
    for at, block in enumerate(blocks):
        x = block(x, cache=None if caches is None else caches[at])
    return x
