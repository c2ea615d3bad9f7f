"""`alibi bench decoding`: one new token with a long cache, on this machine's processor; all keys, or those within reach."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from alibi_attn import records
from alibi_attn.attention.certificate.bounds import bounds
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.validation import make_spec
from alibi_attn.bench.columns import GrowingRecord, append
from alibi_attn.bench.exactness import Reference, computed
from alibi_attn.bench.peers import Peer, decoding_peers, ours, ours_told
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

    "ours" is what a layer does with a `KVCache`, which remembers how long its keys are; "ours, all keys" is `alibi_attention`
    with one query; the others are what users write. Random keys, fp32, one sequence; outputs are held against fp64 before they
    are timed.
    """
    peers = [
        Peer("ours", ours_told("auto"), "the lengths of keys and values are remembered, as a KVCache does"),
        Peer("ours, all keys", ours("dense"), "backend='dense', which is what 'auto' takes for one query"),
        *decoding_peers(),
    ]
    config: dict[str, records.Json] = {
        "lengths": list(lengths), "heads": num_heads, "head_dim": head_dim, "dtype": "float32", "queries": 1,
        "threads": torch.get_num_threads(), "peers": {peer.name: peer.note for peer in peers},
    }  # fmt: skip
    records.expect_new(out, "benchmark", "decoding/cpu", config)
    record = GrowingRecord(out, "decoding/cpu", config, lambda _: {})
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32)
    for length in sorted(lengths):
        torch.manual_seed(0)
        query, grad = (torch.randn(1, num_heads, 1, head_dim) for _ in range(2))
        key, value = (torch.randn(1, num_heads, length, head_dim) for _ in range(2))
        reference = Reference.of(query, key, value, grad, slopes)
        calls: dict[str, Callable[[], object]] = {}
        rows: dict[str, dict[str, records.Json]] = {}
        with torch.inference_mode():
            for peer in peers:
                attention = peer.prepare(query, key, value, slopes)
                errors = reference.compare(peer, computed(attention, query, key, value, None))
                if errors.wrong is not None:
                    raise RuntimeError(f"{errors.wrong}, at {length} keys")
                calls[peer.name] = partial(attention, query, key, value)
                rows[peer.name] = {"length": length, "relative_error": errors.output, "keys_within_reach": 1.0}
            taken = medians_ms(calls, repeats=repeats, budget_s=20.0)
        share = _share_within_reach(query, key, value, slopes, Norms.of(key, value))
        rows["ours"]["keys_within_reach"] = share
        for name, milliseconds in taken.items():
            append(record.curves, name, {**rows[name], "forward_ms": milliseconds})
        said = ", ".join(f"{name} {ms:.2f} ms ({ms / taken['ours']:.2f}×)" for name, ms in taken.items())
        say(f"{length:>7} keys: {said}; {share:.1%} of the keys are within reach")
        record.keep()
    return record.keep()


def _share_within_reach(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor, remembered: Norms
) -> float:
    """Of all keys of all heads."""
    spec = make_spec(query, key, value, slopes)
    found = bounds(spec, query, key, value, tile_norms=remembered.tile_norms(key, value))
    return float(found.left.clamp(max=spec.key_len).double().mean()) / spec.key_len
