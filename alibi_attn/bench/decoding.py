"""`alibi bench decoding`: one new token with a long cache, on this machine's processor; all keys, or those within reach."""

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from alibi_attn import records
from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.certificate.bounds import bounds
from alibi_attn.attention.certificate.norms import Lengths
from alibi_attn.attention.decoding import attend_near
from alibi_attn.attention.validation import make_spec
from alibi_attn.bench.columns import Columns, append
from alibi_attn.bench.timing import medians_ms
from alibi_attn.slopes import alibi_slopes

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)


def decoding(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    num_heads: int = 16,
    head_dim: int = 64,
    repeats: int = 15,
    say: Callable[[str], None] = print,
) -> Path:
    """Measure and keep one record; returns its path.

    "ours" is what a layer does with a `KVCache`, which remembers how long its keys are; "dense" scores all keys, which is what
    `alibi_attention` does with one query. Random keys, fp32, one sequence; outputs are compared before anything is timed.
    """
    config: dict[str, records.Json] = {
        "lengths": list(lengths), "heads": num_heads, "head_dim": head_dim, "dtype": "float32", "queries": 1,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    records.expect_new(out, "benchmark", "decoding/cpu", config)
    started = datetime.datetime.now(datetime.UTC)
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32)
    columns: Columns = {}
    for length in sorted(lengths):
        torch.manual_seed(0)
        query = torch.randn(1, num_heads, 1, head_dim)
        key, value = (torch.randn(1, num_heads, length, head_dim) for _ in range(2))
        remembered = Lengths.of(key, value)
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda q=query, k=key, v=value, kept=remembered: attend_near(q, k, v, slopes, kept),  # type: ignore[misc]
            "dense": lambda q=query, k=key, v=value: alibi_attention(q, k, v, slopes, backend="dense"),  # type: ignore[misc]
        }
        with torch.inference_mode():
            near, dense = (call() for call in calls.values())
            error = float((near - dense).abs().max() / value.norm(dim=-1).max())  # type: ignore[operator]
            if not error < 1e-5:
                raise RuntimeError(f"the two differ by {error:.1e} of max‖v‖ at {length} keys")
            taken = medians_ms(calls, repeats=repeats, budget_s=20.0)
        share = _share_within_reach(query, key, value, slopes, remembered)
        for name, milliseconds in taken.items():
            within = share if name == "ours" else 1.0
            append(columns, name, {"length": length, "forward_ms": milliseconds, "keys_within_reach": within})
        say(
            f"{length:>7} keys: {taken['ours']:.2f} ms, dense {taken['dense']:.2f} ms "
            f"({taken['dense'] / taken['ours']:.2f}×); {share:.1%} of the keys are within reach"
        )
    record = records.make("benchmark", "decoding/cpu", config=config, metrics={}, curves=columns, started=started)
    return records.save(record, out)


def _share_within_reach(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor, remembered: Lengths
) -> float:
    """Of all keys of all heads."""
    spec = make_spec(query, key, value, slopes)
    found = bounds(spec, query, key, value, tile_norms=remembered.tile_norms(key, value))
    return float(found.left.clamp(max=spec.key_len).double().mean()) / spec.key_len
