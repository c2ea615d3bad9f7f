"""`alibi bench generating`: decode one token of a whole BLOOM with a long cache: unmodified, patched, and patched with
ALiBiCache; also padded.

Also measures a batch of two rows with and without padding. `next_tokens.py` compares with other programs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BloomForCausalLM
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from alibi_attn.hf import ALiBiCache, patch
from alibi_lab.measure.harness import Config, Rows, Say, keep_by_length
from alibi_lab.measure.peers.transformers_decoders import bloom
from alibi_lab.measure.serving import error
from alibi_lab.measure.timing import medians_ms

LENGTHS = (512, 2048, 8192, 32768, 65536)
DYNAMIC_CACHE, ORIGINAL, ORIGINAL_STATIC = "patched, DynamicCache", "transformers", "transformers, StaticCache"
ROWS, PADDED, UNEVEN = "ours, two rows", "ours, two rows behind padding", "ours, one row a quarter as long"
PADDING = 1 / 8  # padding positions per cached token
MOST_ERROR = 1e-4  # of the largest logit
MOST_PADDED = 32768  # cached tokens per row; the two rows are in memory three times
Filling = Sequence[tuple[Tensor, ...]]
Calls = dict[str, Callable[[], Tensor]]
SPARE = 2  # steps that are not timed: one for the comparison, one to warm up


def generating(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    layers: int = 2,
    num_heads: int = 16,
    head_dim: int = 64,
    repeats: int = 9,
    our_cache: Callable[[], Cache] = ALiBiCache,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record, and returns its path.

    "ours" is a patched model with an `ALiBiCache`. "transformers" has the default cache of `generate`, which copies all keys for
    each token; "transformers, StaticCache" has that of cache_implementation="static", which does not. Random weights, random
    cached keys and values, fp32, one sequence; logits are compared before anything is timed. Up to 32,768 tokens, a batch of two
    sequences is measured too: without padding, with the same tokens after padding of an eighth of their length, and with a mask
    that shows only the last quarter of one of them. The metrics have the cost of padding.

    Args:
        lengths: numbers of cached tokens, as in 8192,65536; default 512 … 65536.
    """
    config: Config = {
        "lengths": list(lengths),
        "layers": layers,
        "heads": num_heads,
        "head_dim": head_dim,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "ways": ["ours", DYNAMIC_CACHE, ORIGINAL, ORIGINAL_STATIC, ROWS, PADDED, UNEVEN],
        "padding": PADDING,
    }
    original, patched = (bloom(num_heads * head_dim, layers=layers, heads=num_heads) for _ in range(2))
    patch(patched)
    metrics: dict[str, float | None] = {}

    def measure(kind: str, length: int) -> Rows:
        torch.manual_seed(1)
        filling = [tuple(torch.randn(1, num_heads, length, head_dim) for _ in range(2)) for _ in range(layers)]
        with torch.no_grad():
            longest = length + repeats + SPARE
            times = _times(_one_row(original, patched, our_cache, filling, longest), ORIGINAL, length, repeats)
            if length <= MOST_PADDED:
                times |= _times(_two_rows(patched, our_cache, filling), ROWS, length, repeats)
                metrics[f"padding_costs_{length}"] = times[PADDED] / times[ROWS]
        return {name: {"length": length, "forward_ms": ms} for name, ms in times.items()}

    return keep_by_length(
        out, "generating", {"bloom": config}, lengths=lengths, measure=measure, summary=lambda _: metrics, say=say
    )


def _times(calls: Calls, right: str, length: int, repeats: int) -> dict[str, float]:
    """Milliseconds of every call, after their logits were compared with those of the call `right`."""
    logits = {name: call() for name, call in calls.items()}
    for name, output in logits.items():
        rows = 1 if name == UNEVEN else None  # its second row sees only the last quarter
        off = error(output[:rows], logits[right][:rows])
        if not off < MOST_ERROR:
            raise RuntimeError(f"{name} is off by {off:.1e} of the largest logit at {length} tokens")
    return medians_ms(calls, repeats=repeats, seconds=60.0)


def _one_row(
    original: BloomForCausalLM, patched: nn.Module, our_cache: Callable[[], Cache], filling: Filling, longest: int
) -> Calls:
    """A step by cache; `filling` is the cached keys and values [1, H, S, D] of every layer."""
    room = StaticCache(config=original.config, max_cache_len=longest)
    caches = {"ours": our_cache(), DYNAMIC_CACHE: DynamicCache(), ORIGINAL: DynamicCache(), ORIGINAL_STATIC: room}
    calls: Calls = {}
    for name, cache in caches.items():
        for layer, (key, value) in enumerate(filling):
            cache.update(key, value, layer)
        # With a StaticCache and no mask, BLOOM in transformers 5.17 has a bias for the tokens only, not for the whole cache.
        mask = torch.ones(1, longest, dtype=torch.long) if cache is room else None
        model = original if name in (ORIGINAL, ORIGINAL_STATIC) else patched
        calls[name] = _step(model, cache, torch.tensor([[7]]), mask)
    return calls


def _two_rows(model: nn.Module, our_cache: Callable[[], Cache], filling: Filling) -> Calls:
    """A step of a batch of two rows; the second row is the first with its heads in reverse order."""
    length = filling[0][0].shape[2]
    padding = max(int(length * PADDING), 1)
    plain, padded, token = our_cache(), our_cache(), torch.tensor([[7], [8]])
    for layer, parts in enumerate(filling):
        rows = [torch.cat([x, x.flip(1)]) for x in parts]
        plain.update(rows[0], rows[1], layer)
        after = [nn.functional.pad(x, (0, 0, padding, 0), value=9.0) for x in rows]
        padded.update(after[0], after[1], layer)
    at = torch.arange(padding + length + 1)
    starts = padding, padding + length - length // 4
    return {
        ROWS: _step(model, plain, token),
        PADDED: _step(model, padded, token, torch.stack([at >= padding] * 2).long()),
        UNEVEN: _step(model, padded, token, torch.stack([at >= start for start in starts]).long()),
    }


def _step(model: nn.Module, cache: Cache, token: Tensor, mask: Tensor | None = None) -> Callable[[], Tensor]:
    """A call that decodes one token per row and removes it from the cache; a StaticCache keeps it and has room for all."""

    def call() -> Tensor:
        logits: Tensor = model(token, attention_mask=mask, past_key_values=cache).logits
        if not isinstance(cache, StaticCache):
            cache.crop(-1)
        return logits

    return call
