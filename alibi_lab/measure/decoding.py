"""`alibi bench decoding`: decode one token with a long cache: all keys, compared with only the keys within reach."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from alibi_attn.inspect import Norms, certified_bounds
from alibi_lab.measure.correctness import Reference
from alibi_lab.measure.harness import Rows, Say, attention_config, checked, keep_by_length, timed
from alibi_lab.measure.inputs import published_slopes
from alibi_lab.measure.peers import Peer, eager, flash_attn, sdpa_causal, sdpa_dense_bias
from alibi_lab.measure.peers.ours import ours, ours_with_cache

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
WITH_CACHE = "the lengths of keys and values are remembered, as a KVCache does"


def peers_of_one_query() -> list[Peer]:
    """What users run for one query and all keys of a cache; `alibi bench gpu` uses them too."""
    return [
        replace(sdpa_causal.PEER, note="SDPA of one query; no ALiBi at all"),
        replace(sdpa_dense_bias.PEER, note="attn_mask of one row, built once in the inputs' dtype"),
        eager.PEER,
        *flash_attn.installed(),
    ]


def decoding(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    num_heads: int = 16,
    head_dim: int = 64,
    repeats: int = 15,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record, and returns its path.

    "ours" is a layer with a `KVCache`, which stores the norms of its keys; "ours, all keys" is `alibi_attention` with one
    query; the others are what users write. Random keys, fp32, one sequence; outputs are compared with fp64 before timing.

    Args:
        lengths: numbers of cached tokens, as in 4096,65536; default 2048 … 131072.
    """
    peers = [
        Peer("ours", ours_with_cache("auto"), WITH_CACHE),
        Peer("ours, all keys", ours("dense"), "backend='dense', which is what 'auto' takes for one query"),
        *peers_of_one_query(),
    ]
    threads = torch.get_num_threads()
    config = attention_config(peers, lengths, heads=num_heads, head_dim=head_dim, queries=1, threads=threads)
    slopes = published_slopes(num_heads)

    def measure(kind: str, length: int) -> Rows:
        torch.manual_seed(0)
        query, grad = (torch.randn(1, num_heads, 1, head_dim) for _ in range(2))
        key, value = (torch.randn(1, num_heads, length, head_dim) for _ in range(2))
        reference = Reference.of(query, key, value, grad, slopes)
        with torch.inference_mode():
            candidates = {peer.name: checked(peer, reference, query, key, value, None, slopes) for peer in peers}
            rows = timed(candidates, repeats=repeats, seconds=20.0)
        for row in rows.values():
            row["keys_within_reach"] = 1.0  # a share of all heads' keys
            del row["backward_ms"], row["gradient_error"]
        left = certified_bounds(query, key, value, slopes, known_norms=Norms.of(key, value)).left
        rows["ours"]["keys_within_reach"] = float(left.clamp(max=length).double().mean()) / length
        return rows

    return keep_by_length(out, "decoding", {"cpu": config}, lengths=lengths, measure=measure, say=say)
